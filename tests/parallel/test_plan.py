"""The plan of a step is the ledger of a step, byte for byte."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from experts import EXPERTS, LATENT
from experts import changes as of_model
from support import fork, recorded, run_ranks, tiny_config, windows
from torch.testing._internal.distributed.fake_pg import FakeStore

from pellucid.config import run_config
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.parallel.layout import ParameterInfo, parameter_infos
from pellucid.parallel.plan import plan
from pellucid.train import Trainer, setup

ORDINARY = 2
"""A step without a save or a validation."""


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    Trainer(tiny_config(train__steps=1), train_data=windows(30)).train()


def planned(rows):
    """The rows of a plan in the form of `recorded`."""
    as_tables = [row if isinstance(row, dict) else {f: getattr(row, f) for f in row.__slots__} for row in rows]
    result = {(r["tag"], r["op"], r["dtype"]): [r["count"], r["payload_bytes"], r["wire_bytes"]] for r in as_tables}
    assert len(result) == len(as_tables), "two rows of one tag"
    return result


def run(folder, mode, size_mb, **changes):
    config = tiny_config(
        folder, parallel__mode=mode, parallel__bucket_size_mb=size_mb, train__global_batch=2 * comm.world_size(), train__micro_batch=1,
        train__steps=3, train__save_every=0, train__val_every=3, **changes,
    )  # fmt: skip
    trainer = Trainer(config, train_data=windows(40), val_data=windows(3, seed=5, score_once=True))
    trainer.train()
    return trainer


def check_plan(folder, size, mode, infos, size_mb, *, total_of_gradients=False, **options):
    own = plan(infos, mode=mode, world_size=size, micro_batches=2, bucket_size_mb=size_mb, **options)
    written = json.loads((folder / "ledger/plan.json").read_text())
    assert written == own.to_json()
    expected, got = planned(own.step), recorded(folder, 0, ORDINARY)
    assert written["wire_bytes"] == sum(wire for *_, wire in expected.values())
    if total_of_gradients:
        for rows in (expected, got):
            gradients = [rows.pop(key) for key in list(rows) if key[0].startswith("grad") and key[0] != "grad_norm"]
            rows["gradients"] = [sum(column) for column in zip(*gradients, strict=True)][1]  # payload
    assert got == expected
    return own


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "torch_ddp"])
@pytest.mark.parametrize("size, sizes_mb", [(2, [25, 0.002]), (3, [0.02, 0.004]), (4, [0.005])])
def test_an_ordinary_step_sends_what_was_planned(tmp_path, mode, size, sizes_mb):
    def rank():
        for size_mb in sizes_mb:
            run(tmp_path / str(size_mb), mode, size_mb)

    run_ranks(rank, size)
    infos = parameter_infos(Transformer(tiny_config().model, device="meta"))
    buckets = []
    for size_mb in sizes_mb:
        own = check_plan(tmp_path / str(size_mb), size, mode, infos, size_mb, total_of_gradients=mode == "torch_ddp")
        buckets.append(len(own.buckets))
    assert buckets == sorted(set(buckets)), "smaller buckets are more"
    assert all(recorded(tmp_path / str(sizes_mb[0]), rank, ORDINARY) for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "mode, options",
    [
        ("zero3", {}),
        ("zero3", {"compute_dtype": "bfloat16"}),
        ("zero3", {"reshard_after_forward": False}),
        ("fsdp2", {}),
        ("fsdp2", {"reshard_after_forward": False}),
    ],
)
def test_a_step_that_gathers_weights_sends_what_was_planned(tmp_path, mode, options, size):
    changes = {f"parallel__{mode}__{key}": value for key, value in options.items()}
    run_ranks(lambda: run(tmp_path, mode, 25, **changes) and None, size)
    infos = parameter_infos(Transformer(tiny_config().model, device="meta"))
    options = options | ({"compute_dtype": torch.bfloat16} if "compute_dtype" in options else {})
    own = check_plan(tmp_path, size, mode, infos, 25, **options)
    gathers = [row for row in own.step if row.op == "all_gather"]
    assert {info.unit for info in infos} == {"", "model.layers.0", "model.layers.1"}
    assert sum(row.count for row in gathers) == 2 * (5 if options.get("reshard_after_forward", True) else 3)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_a_plan_knows_whole_matrices_of_muon(tmp_path, mode):
    def rank():
        infos = run(tmp_path, mode, 0.01, optim__name="muon").setup.executor.infos
        return [[info.name, list(info.shape), info.elementwise, info.unit] for info in infos]

    infos = [ParameterInfo(n, tuple(s), elementwise=e, unit=u) for n, s, e, u in run_ranks(rank, 3)[0]]
    assert Counter(info.elementwise for info in infos)[False] == 14
    check_plan(tmp_path, 3, mode, infos, 0.01)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_a_plan_knows_what_a_mixture_of_experts_sends(tmp_path, mode):
    """Sequences beside tokens, and a sum of who got how many; frozen biases of routers are in no bucket of gradients."""
    model = of_model(LATENT | EXPERTS)
    run_ranks(lambda: run(tmp_path, mode, 0.01, **model) and None, 3)
    infos = parameter_infos(Transformer(tiny_config(**model).model, device="meta"))
    experts = {"expert_layers": 2, "experts": EXPERTS["n_routed_experts"]}
    own = check_plan(tmp_path, 3, mode, infos, 0.01, total_of_gradients=mode == "torch_ddp", **experts)
    rows = {row.tag: row for row in own.step}
    assert rows["tokens"].payload_bytes == 3 * 8 and rows["router"].payload_bytes == (2 * 6 + 2) * 8
    assert [info.name for bucket in own.buckets for info in bucket.parameters if "bias" in info.name] == []
    assert sum("e_score_correction_bias" in info.name for info in infos) == 2
    for rank in range(3):
        events = recorded(tmp_path, rank, ORDINARY)
        assert events["router", "all_reduce", "float64"][:2] == [1, (2 * 6 + 2) * 8]


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_without_experts_nothing_of_them_is_planned(mode):
    infos = small_infos()
    without = plan(infos, mode=mode, world_size=4)
    with_them = plan(infos, mode=mode, world_size=4, expert_layers=3, experts=5)
    rows = {row.tag: row for row in without.step}
    assert rows["tokens"].payload_bytes == 16 and "router" not in rows
    more = {row.tag: row for row in with_them.step}
    assert more.keys() - rows.keys() == {"router"} and more["router"].payload_bytes == (3 * 5 + 2) * 8
    assert [tag for tag in rows if rows[tag] != more[tag]] == ["tokens"]
    assert with_them.wire_bytes == without.wire_bytes + 8 * (1 + 17) * 3 // 2
    assert plan(infos, mode=mode, world_size=1, expert_layers=3, experts=5).step == ()


def test_a_plan_knows_the_type_in_which_gradients_are_reduced(tmp_path):
    def rank():
        run(tmp_path, "ddp", 0.01, parallel__ddp__reduce_dtype="bfloat16")

    run_ranks(rank, 2)
    infos = parameter_infos(Transformer(tiny_config().model, device="meta"))
    own = check_plan(tmp_path, 2, "ddp", infos, 0.01, reduce_dtype=torch.bfloat16)
    assert {row.dtype for row in own.step if row.tag.startswith("grad/")} == {"bfloat16"}


SMALL = {
    "model": {"preset": "small", "vocab_size": 8192},
    "data": {"context": 16},
    "optim": {"lr": 1e-3},
    "train": {"steps": 2, "micro_batch": 1, "dtype": "float32", "device": "cpu", "save_every": 0, "val_every": 0},
}


@pytest.mark.parametrize(
    "mode, size",
    [
        ("ddp", 256),
        pytest.param("zero1", 1024, marks=pytest.mark.slow),
        pytest.param("zero1", 256, marks=pytest.mark.slow),
        pytest.param("ddp", 1024, marks=pytest.mark.slow),
        ("zero2", 256),
        ("zero3", 256),
        pytest.param("zero3", 1024, marks=pytest.mark.slow),
    ],
)
def test_rank_0_of_many_records_what_was_planned_for_it(tmp_path, monkeypatch, mode, size):
    """A backend that moves nothing stands for the other ranks; what this one would send is real."""
    monkeypatch.setattr(setup, "store", lambda: None)  # and nobody there could agree with it
    table = SMALL | {
        "train": SMALL["train"] | {"out": str(tmp_path), "global_batch": size},
        "parallel": {"mode": mode, "bucket_size_mb": 4.0},
    }

    def rank():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        torch.empty_like = torch.zeros_like  # what nobody sends is 0
        torch.UntypedStorage.resize_ = lambda *_: None
        Trainer(run_config(table), train_data=windows(1500)).train()

    assert fork(rank) == 0
    infos = parameter_infos(Transformer(run_config(table).model, device="meta"))
    own = plan(infos, mode=mode, world_size=size, bucket_size_mb=4.0)
    assert len(own.buckets) > 5 and recorded(tmp_path, 0, 1) == planned(own.step)
    weights = 4 * sum(info.numel for info in infos)
    again = sum(info.num_bytes for info in infos if info.unit and len(info.shape) > 1) if mode == "zero3" else 0
    passes = (2 * weights + again) * (size - 1) / size
    gradients = [row for row in own.step if row.tag.startswith(("grad/", "param/"))]
    padding = own.padding_bytes * (size - 1) / size
    assert sum(row.wire_bytes for row in gradients) - padding == pytest.approx(passes, rel=1e-6)
    assert padding < 0.05 * passes or mode == "zero3"  # whole rows: 384 of them are padded to 512


# -- formulas -----------------------------------------------------------------------------------------------


def small_infos():
    return parameter_infos(Transformer(run_config(SMALL).model, device="meta"))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 256, 1024])
def test_memory_and_traffic_are_those_of_the_formulas(size):
    """16 P bytes of weights, gradients and moments for ddp, 8 P + 8 P / W for zero1; both send 2 (W - 1) / W of 4 P."""
    infos = small_infos()
    numel = sum(info.numel for info in infos)
    for mode, bytes_held in (("ddp", 16 * numel), ("torch_ddp", 16 * numel), ("zero1", 8 * numel + 8 * numel / size)):
        own = plan(infos, mode=mode, world_size=size)
        held = own.weights_bytes + own.gradients_bytes + own.optimizer_bytes
        assert held == pytest.approx(bytes_held, rel=0.01), mode
        sent = own.wire_bytes - own.padding_bytes * (size - 1) / size
        assert sent == pytest.approx(2 * (size - 1) / size * 4 * numel, rel=1e-3), mode
        padded = sum(row.payload_bytes for row in own.step if row.tag.startswith(("grad", "param")))
        passes = 2 if mode == "zero1" else 1
        norm = 8 if mode == "zero1" else 0
        assert padded - norm - own.padding_bytes == passes * 4 * numel, mode


@pytest.mark.parametrize("mode", ["none", "ddp", "zero1", "torch_ddp"])
def test_alone_nothing_is_sent_and_all_is_held(mode):
    infos = small_infos()
    own = plan(infos, mode=mode, world_size=1)
    held = own.weights_bytes + own.gradients_bytes + own.optimizer_bytes
    assert (own.mode, own.step, own.wire_bytes) == ("none", (), 0)
    assert held == 16 * sum(info.numel for info in infos)


def test_the_sum_of_all_ranks_wire_bytes_does_not_depend_on_micro_batches():
    """Gradients are reduced once a window."""
    infos = small_infos()
    for mode in ("ddp", "zero1"):
        once, often = (plan(infos, mode=mode, world_size=4, micro_batches=k) for k in (1, 8))
        assert once == often


def test_a_mode_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match=r"mode 'mine' cannot be planned; known: none, ddp"):
        plan(small_infos(), mode="mine", world_size=2)
