"""What a run is said to need before its first step."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support import TINY, run_ranks, tiny_config, windows

from pellucid import kernels, registry
from pellucid.config import ModelConfig, load_config, options_of
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.linear import as_elsewhere
from pellucid.parallel import comm
from pellucid.parallel.layout import MIB
from pellucid.train import Trainer, memory, setup
from pellucid.train import estimate as module
from pellucid.train.activations import peak_activation_bytes
from pellucid.train.estimate import estimate, planned_parameters
from pellucid.train.setup import plan_mode


@pytest.fixture
def entries(monkeypatch):
    """Room for optimizers of a test's own."""
    for kind in registry.HOMES:
        registry.names(kind)  # or what is imported meanwhile would be registered in the copy alone
    monkeypatch.setattr(registry, "_entries", {kind: dict(known) for kind, known in registry._entries.items()})


def state_bytes_after_a_step(config) -> int:
    model = Transformer(config.model)
    options = options_of("optimizer", config.optim.name, config.optim.options)
    optimizer = registry.lookup("optimizer", config.optim.name).target(model, config.optim.lr, options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in tensors if tensor.ndim)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_state_is_what_a_real_step_leaves(name, tied):
    config = tiny_config(optim__name=name, model__tie_word_embeddings=tied)
    infos = planned_parameters(config)
    assert sum(info.state_tensors * info.num_bytes for info in infos) == state_bytes_after_a_step(config)
    assert sum(info.numel for info in infos) == Transformer(config.model).num_parameters()


def test_muon_keeps_one_tensor_for_a_hidden_matrix_and_wants_it_whole():
    infos = {
        info.name: info
        for info in planned_parameters(tiny_config(optim__name="muon", model__tie_word_embeddings=False))
    }
    for name, info in infos.items():
        hidden = "_proj" in name
        assert (info.state_tensors, info.elementwise) == ((1, False) if hidden else (2, True)), name
    assert all(info.elementwise for info in planned_parameters(tiny_config()))


def test_an_optimizer_from_outside_is_counted_as_it_is(entries):
    @registry.register("optimizer", "plain_sgd")
    def plain_sgd(model, lr, options):
        return torch.optim.SGD(model.parameters(), lr=lr)

    class Peeking(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["params"][0].grad.norm().item() >= 0
            return super().step(closure)

    @registry.register("optimizer", "peeking")
    def peeking(model, lr, options):
        return Peeking(model.parameters(), lr=lr)

    assert {info.state_tensors for info in planned_parameters(tiny_config(optim__name="plain_sgd"))} == {0}
    assert {info.state_tensors for info in planned_parameters(tiny_config(optim__name="peeking"))} == {
        2
    }  # taken for Adam


def test_planning_parameters_allocates_and_draws_nothing():
    before = torch.get_rng_state()
    infos = planned_parameters(tiny_config(model__hidden_size=2**14, model__vocab_size=2**20, optim__name="muon"))
    assert sum(info.num_bytes for info in infos) > 2**36  # more than there is
    assert torch.equal(torch.get_rng_state(), before)


def test_the_options_of_a_mode_reach_its_plan():
    settings = {
        "bucket_size_mb": 2,
        "ddp.bucket_size_mb": 4,
        "ddp.reduce_dtype": "bfloat16",
        "torch_ddp.bucket_cap_mb": 9,
    }
    config = load_config(
        None, {"model.vocab_size": 512} | {f"parallel.{key}": value for key, value in settings.items()}
    )
    infos = planned_parameters(config)
    sizes = {
        mode: [b.payload_bytes / MIB for b in plan_mode(config, infos, mode, world_size=2, micro_batches=1).buckets]
        for mode in ("ddp", "zero1", "torch_ddp")
    }
    whole = sum(info.num_bytes for info in infos) / MIB
    assert sum(sizes["ddp"]) == whole / 2 and sum(sizes["torch_ddp"]) == whole  # bfloat16 and float32
    for mode, cap in (
        ("ddp", 4),
        ("zero1", 2),
        ("torch_ddp", 9),
    ):  # the first one closes at 1 MiB, the last one is a rest
        assert cap <= min(sizes[mode][1:-1]) and max(sizes[mode]) < cap + 2, mode


def test_the_estimate_of_a_run_adds_state_and_activations():
    data = windows()  # documents of 3 to 39 tokens, 21 in the mean, in rows of 16
    setup = Trainer(tiny_config(optim__name="muon"), train_data=data).setup
    forecast = estimate(setup)
    weights = 4 * setup.model.num_parameters()
    assert forecast.state_bytes == 2 * weights + state_bytes_after_a_step(setup.config)
    assert forecast.activation_bytes == peak_activation_bytes(setup.config, documents=2)
    need = forecast.state_bytes + forecast.activation_bytes
    replace(forecast, available_bytes=need).refuse_if_too_large()
    with pytest.raises(ConfigError, match=r"GiB are free; lower train\.micro_batch"):
        replace(forecast, available_bytes=need - 1).refuse_if_too_large()


@pytest.mark.parametrize("by", ["kernels", "operators"])
def test_short_documents_need_more_than_one_long_one_where_their_keys_are_padded(by):
    """As canonical attention by torch's operators does; our kernel needs no padding."""
    padded = by == "operators" or not kernels.available()
    config = tiny_config(model__attend="canonical", model__hidden_size=32)
    peaks = []
    for lengths in ([400], [4] * 100):
        data = windows()
        data.split = type(data.split)(lengths)
        with as_elsewhere() if by == "operators" else nullcontext():
            peaks.append(estimate(Trainer(config, train_data=data).setup).activation_bytes)
    assert peaks[1] > 1.5 * peaks[0] if padded else peaks[1] < 1.1 * peaks[0]


def test_checkpointing_lowers_the_estimate():
    config = tiny_config(model__num_hidden_layers=6)
    plain = estimate(Trainer(config, train_data=windows()).setup)
    sparing = estimate(
        Trainer(replace(config, train=replace(config.train, activation_checkpointing=True)), train_data=windows()).setup
    )
    assert sparing.activation_bytes < 0.7 * plain.activation_bytes
    assert sparing.state_bytes == plain.state_bytes


def test_a_model_without_a_vocabulary_needs_one():
    config = replace(tiny_config(), model=ModelConfig(**TINY | {"vocab_size": 0}))
    assert planned_parameters(config, vocab_size=61)[0].shape == (61, 16)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        planned_parameters(config)


@pytest.mark.parametrize("mode", ["zero1", "zero3", "fsdp2"])
def test_the_whole_model_is_counted_where_a_rank_holds_rows(mode):
    def rank():
        config = tiny_config(parallel__mode=mode if comm.world_size() > 1 else "none")
        found = estimate(Trainer(config, train_data=windows()).setup)
        return [found.parameters, found.seconds is not None]

    expected = Transformer(tiny_config().model).num_parameters()
    assert run_ranks(rank, 2) == [[expected, True]] * 2


def test_the_time_is_of_the_whole_models_arithmetic(monkeypatch):
    monkeypatch.setattr(module, "matmul_gflops", lambda dtype: 1.0)

    def rank(mode):
        return estimate(Trainer(tiny_config(parallel__mode=mode), train_data=windows()).setup).seconds

    assert len({seconds for mode in ("ddp", "zero3") for seconds in run_ranks(lambda mode=mode: rank(mode), 2)}) == 1


def test_a_model_whose_weights_do_not_fit_is_refused_before_it_is_built(monkeypatch):
    weights = 4 * Transformer(tiny_config().model, device="meta").num_parameters()
    for free, fits in ((weights, True), (weights - 1, False)):
        monkeypatch.setattr(memory, "_free_bytes", lambda free=free: free)
        if fits:
            memory.refuse_unbuildable(tiny_config().model)
            continue
        monkeypatch.setattr(setup, "seed_everything", lambda *_, **__: pytest.fail("it was built"))
        with pytest.raises(
            ConfigError, match=r"weights of this model alone need .* GiB are free; .*model\.hidden_size"
        ):
            Trainer(tiny_config(), train_data=windows(30))
