"""`verify_modes`: correct modes pass on a user's configuration, and the certificate says what was measured."""

import math
from dataclasses import replace

import pytest
import torch
from experts import EXPERTS, LATENT
from support import TINY

from pellucid.config import RunConfig, run_config
from pellucid.data.batches import Loader
from pellucid.errors import ConfigError
from pellucid.parallel import Executor, comm
from pellucid.parallel.ledger import CommEvent
from pellucid.parallel.plan import PlannedCollective
from pellucid.verify import certificate
from pellucid.verify.certificate import BOUND_FACTOR, Certificate, ModeResult, Number, bound, verify_modes
from pellucid.verify.measure import Distance, RankResult, Reference, _differences
from pellucid.verify.shrink import changes, generated_windows, one_process, shrink

SMALL = {
    "model": TINY | {"tie_word_embeddings": True},
    "train": {"steps": 100, "dtype": "bfloat16"},
    "parallel": {"bucket_size_mb": 0.005},
}


def test_modes_that_are_right_pass_far_inside_the_bound():
    result = verify_modes(run_config(SMALL), 2, modes=["ddp", "zero1"])
    assert result.passed and result.last_line() == "verified: 2 modes, 2 ranks"
    for mode in result.modes:
        assert mode.bytes == "ok" and not mode.zero_gradients and mode.line().endswith("PASS")
        for number in mode.numbers.values():
            assert 0 < number.worst < number.bound / 4, "nothing at all would mean that nothing was compared"
        assert mode.numbers["fp64"].worst < 1e-12 < 1e-9 < mode.numbers["fp32"].worst < 1e-5


@pytest.mark.slow
def test_every_mode_passes_in_every_kind_of_configuration_and_this_is_the_measured_bound():
    """Run with -s to see the table in docs/verify.md."""
    tiny = {"model": {"preset": "tiny", "vocab_size": 2048}, "train": {"steps": 10}, "optim": {"lr": 1e-3}}
    kinds = {
        "adamw": {},
        "muon": {"optim": {"name": "muon", "lr": 0.02}},
        "norms, gate, biases": {"model": {"qk_norm": True, "attention_gate": True, "attention_bias": True, "mlp_bias": True}},
        "window, canonical": {"model": {"sliding_window": 16, "attend": "canonical"}},
        "untied, embedding 1": {"model": {"tie_word_embeddings": False, "embedding_range": 1.0}},
        "recomputed, not clipped": {"train": {"activation_checkpointing": True}, "optim": {"max_grad_norm": None}},
        "smoothed, yarn": {"strategy": {"label_smoothing": 0.1}, "model": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        "latent": {"model": LATENT | {"num_key_value_heads": 4}},
        "latent, muon, interleaved": {
            "model": LATENT | {"num_key_value_heads": 4, "rope_interleave": True}, "optim": {"name": "muon", "lr": 0.02},
        },
        "experts": {"model": EXPERTS | {"moe_intermediate_size": 64, "n_routed_experts": 8}},
        "experts, softmax, muon": {
            "model": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "optim": {"name": "muon", "lr": 0.02},
        },
        "latent, experts, groups": {
            "model": LATENT | EXPERTS | {
                "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                "moe_intermediate_size": 64,
            },
            "train": {"activation_checkpointing": True},
        },
        "large weights and rate": {"model": {"initializer_range": 0.2}, "optim": {"lr": 0.1}},
    }  # fmt: skip
    highest = 0.0
    for name, table in kinds.items():
        merged = {key: tiny.get(key, {}) | table.get(key, {}) for key in tiny.keys() | table.keys()}
        for seed, ranks in ((0, 2), (1, 3), (2, 4)):
            merged["train"]["seed"] = seed
            checked = verify_modes(run_config(merged), ranks)
            assert checked.passed, checked.last_line()
            for dtype in ("fp64", "fp32"):
                ratio = max(m.numbers[dtype].worst / m.numbers[dtype].bound for m in checked.modes if m.numbers)
                print(f"{name:25} {ranks} ranks  {dtype}  {ratio * BOUND_FACTOR:6.2f} eps x depth")
                highest = max(highest, ratio)
    print(f"highest {highest * BOUND_FACTOR:.1f}, allowed {BOUND_FACTOR}")
    assert highest < 0.7


def test_every_mode_is_right_with_latent_attention_and_experts():
    """Latents, groups, a dense layer, shared experts, the balancing loss and biases that move."""
    model = TINY | LATENT | EXPERTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    result = verify_modes(run_config(SMALL | {"model": model}), 2)
    assert result.passed and result.last_line() == "verified: 6 modes, 2 ranks", result.last_line()
    assert all(mode.bytes == "ok" and not mode.zero_gradients for mode in result.modes)


def test_biases_must_move_where_they_balance_and_stay_where_they_do_not():
    model = TINY | EXPERTS
    still = run_config(SMALL | {"model": model | {"router_bias_update_speed": 0.0}})
    assert verify_modes(still, 2, modes=["ddp"]).last_line() == "verified: 1 mode, 2 ranks"
    weights = {"w": torch.ones(4), "gate.e_score_correction_bias": torch.zeros(4)}
    reference = Reference("fp64", [1.0, 2.0], [1.0], [], weights, weights | {"w": torch.zeros(4)})
    assert certificate._unmoved(reference, 1e-13, biases=False) == ""
    assert certificate._unmoved(reference, 1e-13, biases=True) == "gate.e_score_correction_bias"


def test_a_bias_that_moves_on_one_rank_alone_is_caught(monkeypatch):
    """Rank 1 moves it twice as far: its tokens then go elsewhere, and its copy differs."""
    move = Executor.add_to_weight

    def wrong(self, name, delta):
        move(self, name, delta * (1 + comm.rank()))

    monkeypatch.setattr(Executor, "add_to_weight", wrong)
    model = TINY | EXPERTS | {"router_bias_update_speed": 0.05}
    result = verify_modes(run_config(SMALL | {"model": model}), 2, modes=["ddp"])
    assert not result.passed and result.last_line().startswith("FAILED: ddp fp64")


def test_the_bound_is_epsilon_times_depth():
    model = run_config(SMALL).model
    assert bound(model, "fp64") == BOUND_FACTOR * 2**-52 * 10
    assert bound(model, "fp32") == BOUND_FACTOR * 2**-23 * 10
    assert bound(replace(model, num_hidden_layers=4), "fp64") == BOUND_FACTOR * 2**-52 * 18


def test_one_rank_cannot_be_compared_with_one_process():
    with pytest.raises(ConfigError, match=r"--nproc must be at least 2 .*, got 1"):
        verify_modes(run_config(SMALL), 1)


# -- what is run --------------------------------------------------------------------------------------------


def shrunk(ranks: int = 4, **tables: dict) -> RunConfig:
    return shrink(run_config(SMALL | tables), ranks)


def test_shrinking_keeps_what_makes_a_configuration_its_own():
    config = run_config(
        {
            "model": {
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "sliding_window": 4096,
                "qk_norm": True, "tie_word_embeddings": False, "dropout": 0.1,
            },
            "optim": {"name": "muon", "lr": 0.02, "warmup_steps": 2000, "schedule": {"name": "wsd", "decay_ratio": 0.4}},
            "parallel": {"mode": "zero1", "ddp": {"bucket_size_mb": 25.0, "reduce_dtype": "bfloat16"}},
            "train": {"epochs": 3, "global_batch": 512, "micro_batch": 1, "seed": 5, "compile": True},
        }
    )  # fmt: skip
    small = shrink(config, 4)
    model = small.model
    assert (model.hidden_size, model.num_hidden_layers, model.vocab_size) == (128, 2, 509)
    assert model.num_attention_heads // model.num_key_value_heads == 4, "heads stay grouped as they were"
    assert model.intermediate_size == 448 and model.head_dim == 32 and model.sliding_window < 64
    assert model.qk_norm and not model.tie_word_embeddings and model.dropout == 0
    assert (small.optim.name, small.optim.schedule) == ("muon", config.optim.schedule)
    assert small.optim.max_grad_norm is not None and small.optim.max_grad_norm < 1
    assert (small.train.steps, small.train.epochs, small.train.seed) == (3, None, 5)
    assert small.train.global_batch == 2 * 2 * 4 and small.train.micro_batch == 2
    assert small.parallel.modes["ddp"].reduce_dtype is None
    told = {key: (old, new) for key, old, new in changes(config, small)}
    assert told["model.hidden_size"] == (4096, 128) and told["model.dropout"] == (0.1, 0.0)
    assert told["ddp.reduce_dtype" if "ddp.reduce_dtype" in told else "parallel.ddp.reduce_dtype"] == ("bfloat16", None)
    assert "optim.name" not in told and "model.qk_norm" not in told
    assert shrink(small, 4) == small, "what is small already stays"


DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_shrinking_keeps_latents_groups_and_kinds_of_experts():
    model = shrink(run_config({"model": DEEPSEEK_V3, "train": {"steps": 5}}), 2).model
    assert (model.kv_lora_rank, model.q_lora_rank, model.head_dim) == (32, 32, 32) and model.is_latent
    assert (model.n_routed_experts, model.n_group, model.topk_group, model.num_experts_per_tok) == (8, 2, 1, 2)
    assert (model.first_k_dense_replace, model.num_hidden_layers, model.n_shared_experts) == (1, 2, 1)
    assert model.moe_intermediate_size == 2048 * 128 // 7168 and model.topk_method == "noaux_tc"


@pytest.mark.parametrize(
    "experts, chosen, groups, allowed, expected",
    [
        (8, 2, 1, 1, 2),
        (4, 2, 2, 1, 2),
        (2, 2, 1, 1, 2),
        (3, 3, 1, 1, 2),
        (64, 6, 1, 1, 4),
        (5, 1, 1, 1, 1),
        (16, 8, 4, 4, 4),
    ],
)
def test_two_experts_a_token_stay_two(experts, chosen, groups, allowed, expected):
    """One alone with normed weights has a weight of 1, and its router no gradient."""
    model = TINY | EXPERTS | {
        "n_routed_experts": experts, "num_experts_per_tok": chosen, "n_group": groups, "topk_group": allowed,
    }  # fmt: skip
    small = shrunk(2, model=model).model
    assert small.num_experts_per_tok == expected <= small.n_routed_experts // small.n_group * small.topk_group


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_masks_are_uneven_and_in_each_step_a_micro_batch_of_another_rank_has_nothing_to_learn(ranks):
    config = shrunk(ranks)
    windows = generated_windows(config, ranks)
    train = config.train
    loaders = [
        Loader(windows, global_batch=train.global_batch, micro_batch=train.micro_batch, seed=train.seed, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]  # fmt: skip
    places = []
    for _ in range(3):
        counts = [[int(batch.loss_mask.sum()) for batch in loader.next_window()] for loader in loaders]
        empty = [(rank, micro) for rank, own in enumerate(counts) for micro, count in enumerate(own) if count == 0]
        assert len(empty) == 1 and all(len(own) == 2 for own in counts)
        assert len({sum(own) for own in counts}) == ranks, "no two ranks have as many tokens"
        places += empty
    assert len(set(places)) == min(3, ranks)
    whole = Loader(windows, global_batch=train.global_batch, micro_batch=train.global_batch, seed=train.seed)
    batch = whole.next_window()
    assert len(batch) == 1 and batch[0].packed and one_process(config).train.micro_batch == train.global_batch


# -- the verdict --------------------------------------------------------------------------------------------


def judged(tensor: torch.Tensor, *ranks: list[Distance]) -> float:
    reference = Reference("fp64", [1.0], [1.0], [{"w": tensor}], {"w": tensor * 0}, {"w": tensor})
    whole = {"w": Distance(0, tensor.numel(), 0.0, 1.0)}
    results = [RankResult([1.0], [1.0], [{"w": parts} if parts else {}], whole) for parts in ranks]
    return certificate._number(reference, results, 1.0).worst


def test_distances_of_slices_add_up_and_replicas_count_by_the_worst():
    tensor = torch.full((4, 2), 2.0)  # norm 32 ** 0.5
    assert judged(tensor, [Distance(0, 3, 0.25, 1.0)], [Distance(3, 8, 0.25, 1.0)]) == pytest.approx((0.5 / 32) ** 0.5)
    assert judged(tensor, [Distance(0, 8, 0.5, 1.0)], [Distance(0, 8, 2.0, 1.0)]) == pytest.approx((2 / 32) ** 0.5)
    assert judged(tensor, [Distance(0, 8, 0.0, 1.0)], [Distance(0, 8, 0.0, 1.0)]) == 0


@pytest.mark.parametrize(
    "ranks",
    [
        [[Distance(0, 3, 0.0, 1.0)], [Distance(4, 8, 0.0, 1.0)]],
        [[Distance(0, 4, 0.0, 1.0)], [Distance(3, 8, 0.0, 1.0)]],
        [[Distance(0, 4, 0.0, 1.0)], []],
        [[], []],
        [[Distance(0, 8, math.nan, 1.0)], [Distance(0, 8, 0.0, 1.0)]],
    ],
    ids=["a gap", "an overlap", "the end is missing", "nothing", "not a number"],
)
def test_what_is_not_whole_is_infinitely_far(ranks):
    assert judged(torch.ones(8), *ranks) == math.inf


def event(**changes: object) -> CommEvent:
    values = {
        "step": 1, "micro": 0, "op": "all_reduce", "tag": "grad/bucket0", "group": "world", "dtype": "float32", "numel": 25,
        "payload_bytes": 100, "wire_bytes": 150, "owner": (), "phase": "backward", "t_issue": 0.0,
    }  # fmt: skip
    return CommEvent(**(values | changes))


def test_bytes_are_compared_exactly_and_nothing_unplanned_is_overlooked():
    row = PlannedCollective("grad/bucket0", "all_reduce", 1, 100, 150, "float32")
    family = PlannedCollective("grad", "all_reduce", 5, 200, 300, "float32")
    assert _differences([event()], (row,)) == []
    assert _differences([event(), event(tag="grad/bucket1")], (family,)) == [], "torch cuts its buckets itself"
    assert _differences([event(payload_bytes=101)], (row,)) == ["grad/bucket0: payload_bytes 101, planned 100"]
    assert "count 2, planned 1" in " ".join(_differences([event(payload_bytes=50, wire_bytes=75)] * 2, (row,)))
    assert _differences([event(), event(tag="more")], (row,)) == ["more: all_reduce of 100 bytes was not planned"]
    assert _differences([], (row,))


def test_the_last_line_names_what_failed_first():
    fine = ModeResult("ddp", {"fp64": Number(1e-15, 1e-13, "loss")}, bytes="ok")
    bad = ModeResult("zero2", {"fp32": Number(0.5, 1e-5, "w (gradient)")}, bytes="ok", failure="fp32 w (gradient)")
    other = ModeResult("zero3", skipped="too few rows")
    assert Certificate(4, [fine, other]).last_line() == "verified: 1 mode, 4 ranks"
    assert Certificate(4, [fine, bad]).last_line() == "FAILED: zero2 fp32 w (gradient)"
    assert not Certificate(4, [fine, bad]).passed and not Certificate(4, [other]).passed
    assert fine.line() == "ddp  fp64 1.0e-15 <= 1.0e-13  bytes ok  grads nonzero  PASS"
    assert bad.line() == "zero2  fp32 5.0e-01 > 1.0e-05  bytes ok  grads nonzero  FAIL"
    assert other.line() == "zero3  cannot run here: too few rows"
