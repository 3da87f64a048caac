"""Configuration: what is written is what runs, and what is misspelt never passes in silence."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid import config as config_module
from pellucid import config_tables, config_text, model_config, registry
from pellucid.config import (
    CONFIG_VERSION,
    PRESETS,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    StrategyConfig,
    TrainConfig,
    build,
    field_docs,
    load_config,
    options_of,
    run_config,
    to_table,
    to_toml,
)
from pellucid.errors import ConfigError
from pellucid.registry import register

CLASSES = [
    ModelConfig, DataConfig, StrategyConfig, ScheduleConfig, OptimConfig, ParallelConfig, TrainConfig, LoraConfig, RunConfig,
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Options of a test strategy."""

    beta: float = 0.1
    """Weight of the test."""
    kind: Literal["mean", "sum"] = "mean"
    layers: tuple[int, ...] = ()
    names: list[str] = dataclasses.field(default_factory=list)
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ConfigError(f"strategy.beta must not be negative, got {self.beta}")


@dataclass(frozen=True)
class NoDefault:
    size: int


@pytest.fixture(autouse=True)
def own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known entries of each kind, whatever the rooms register: these tests are about reading, not about them."""
    monkeypatch.setattr(registry, "HOMES", dict.fromkeys(registry.HOMES, "pellucid.errors"))
    monkeypatch.setattr(registry, "_entries", {kind: {} for kind in registry.HOMES})
    for kind, name in [("strategy", "pretrain"), ("optimizer", "adamw"), ("schedule", "constant"), ("mode", "none")]:
        register(kind, name)(lambda: None)
    register("strategy", "test", config=Objective)(lambda: None)
    register("strategy", "sized", config=NoDefault)(lambda: None)

    @dataclass(frozen=True)
    class Cosine:
        """Options of a test schedule."""

        cycles: float = 0.5
        """Half turns."""

    register("schedule", "cosine", config=Cosine)(lambda: None)

    @dataclass(frozen=True)
    class Patience:
        """Options of a test callback."""

        patience: int = 3
        """Validations to wait."""

    register("callback", "early_stopping", config=Patience)(lambda: None)
    register("callback", "my stats", config=Patience)(lambda: None)


def read(text: str, tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


# -- what is written is what runs ----------------------------------------------------------------------------


def test_values_in_the_file_arrive_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    got = read(
        """
        [model]
        hidden_size = 64
        num_attention_heads = 2
        [train]
        steps = 7
        max_seconds = 60
        [optim]
        lr = 1
        schedule = "cosine"
        """,
        tmp_path,
    )
    assert (got.model.hidden_size, got.model.head_dim, got.model.num_key_value_heads) == (64, 32, 2)
    assert got.train == TrainConfig(steps=7, max_seconds=60.0)
    assert isinstance(got.optim.lr, float)
    assert got.optim.schedule.name == "cosine"
    assert got.data == DataConfig()


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\nseed = 3\n")
    got = load_config(path, {"train.steps": "9", "model.hidden_size": 768, "optim.schedule.cycles": "2"})
    assert (got.train.steps, got.train.seed, got.model.hidden_size, got.optim.schedule.options.cycles) == (
        9,
        3,
        768,
        2.0,
    )


@pytest.mark.parametrize(
    ("key", "text", "want"),
    [
        ("data.path", "2024", "2024"),
        ("data.path", "true", "true"),
        ("data.path", "a = b # c", "a = b # c"),
        ("train.device", "cuda:1", "cuda:1"),
        ("train.dtype", "float32", "float32"),
        ("train.compile", "true", True),
        ("train.steps", "none", None),
        ("train.steps", "1_000", 1000),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", "1", 1.0),
        ("optim.max_grad_norm", "none", None),
        ("model.rope_scaling", '{rope_type = "linear", factor = 2}', {"rope_type": "linear", "factor": 2}),
        ("plugins", "[]", ()),
    ],
)
def test_a_flag_is_read_as_its_key_wants_it(key: str, text: str, want: Any) -> None:
    got: Any = load_config(None, {key: text})
    for part in key.split("."):
        got = getattr(got, part)
    assert got == want and type(got) is type(want)


def test_a_flag_cannot_smuggle_in_a_second_key() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps must be a whole number"):
        load_config(None, {"train.steps": "1\nother = 2"})


def test_flags_reach_the_options_of_registered_entries() -> None:
    got = load_config(
        None,
        {
            "strategy.name": "test", "strategy.beta": "0.5", "strategy.kind": "sum", "strategy.layers": "[1, 2]",
            "strategy.names": '["a"]', "strategy.folder": "12", "callbacks.early_stopping.patience": "5",
        },
    )  # fmt: skip
    assert got.strategy.options == Objective(beta=0.5, kind="sum", layers=(1, 2), names=["a"], folder="12")
    assert got.callbacks["early_stopping"].patience == 5
    assert load_config(None, {"callbacks.early_stopping": "{}"}).callbacks["early_stopping"].patience == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_in_the_sizes_that_are_not_written(preset: str, tmp_path: Path) -> None:
    got = read(f'[model]\npreset = "{preset}"\nnum_hidden_layers = 3\n', tmp_path).model
    assert got == ModelConfig(**{**PRESETS[preset], "num_hidden_layers": 3})
    assert got.num_hidden_layers != PRESETS[preset]["num_hidden_layers"]


def test_a_preset_may_come_from_a_flag() -> None:
    got = load_config(None, {"model.preset": "tiny", "model.hidden_size": "64"}).model
    assert (got.hidden_size, got.num_hidden_layers, got.head_dim) == (64, 4, 16)


@pytest.mark.parametrize("preset", ["big", 3, ["tiny"]])
def test_an_unknown_preset_is_refused(preset: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.preset is .*known: tiny, small, base"):
        run_config({"model": {"preset": preset}})


# -- unknown keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"modle": {}}, "unknown key modle; did you mean model?"),
        ({"model": {"hiden_size": 1}}, "unknown key model.hiden_size; did you mean model.hidden_size?"),
        ({"model": {"prest": "tiny"}}, "unknown key model.prest; did you mean model.preset?"),
        ({"train": {"step": 1}}, "unknown key train.step; did you mean train.steps?"),
        (
            {"optim": {"warmup_step": 1}},
            "unknown key optim.warmup_step; did you mean optim.warmup_steps?",
        ),
        (
            {"optim": {"schedule": {"name": "cosine", "cycle": 1}}},
            "unknown key optim.schedule.cycle; did you mean optim.schedule.cycles?",
        ),
        (
            {"strategy": {"name": "test", "bta": 1}},
            "unknown key strategy.bta; did you mean strategy.beta?",
        ),
        (
            {"strategy": {"name": "pretrain", "beta": 1}},
            "unknown key strategy.beta; known keys of strategy 'pretrain': name",
        ),
        (
            {"callbacks": {"early_stopping": {"patiense": 1}}},
            "unknown key callbacks.early_stopping.patiense; did you mean callbacks.early_stopping.patience?",
        ),
        (
            {"callbacks": {"early_stoping": {}}},
            "unknown callback 'early_stoping'; did you mean early_stopping?; known: early_stopping, my stats",
        ),
        ({"strategy": {"name": "tset"}}, "unknown strategy 'tset'; did you mean test?; known: pretrain, sized, test"),
        ({"strategy": {"options": {"beta": 1}}}, "unknown key strategy.options; known keys of strategy 'pretrain': name"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_one(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(table)
    assert str(error.value) == message


def test_a_key_like_nothing_else_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown key data\.zzz; known keys: path, context, stride"):
        run_config({"data": {"zzz": 1}})


def test_a_misspelt_flag_is_refused_like_a_key_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"unknown key train\.stepz; did you mean train\.steps"):
        load_config(None, {"train.stepz": "3"})
    with pytest.raises(ConfigError, match=r"train\.steps\.more: train\.steps is a value"):
        load_config(None, {"train.steps": "3", "train.steps.more": "3"})


# -- wrong types and ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"train": {"steps": "ten"}}, "train.steps must be a whole number, got 'ten'"),
        ({"train": {"steps": 1.5}}, "train.steps must be a whole number, got 1.5"),
        ({"train": {"steps": True}}, "train.steps must be a whole number, got True"),
        ({"train": {"compile": 1}}, "train.compile must be true or false, got 1"),
        ({"train": {"dtype": "fp16"}}, "train.dtype must be one of auto, float32, bfloat16, float16; got 'fp16'"),
        ({"train": {"dtype": "float23"}}, "did you mean float32?"),
        ({"train": {"dtype": "none"}}, "train.dtype must be one of"),
        ({"train": 3}, "train must be a table, got 3"),
        ({"model": "tiny"}, "model must be a table, got 'tiny'"),
        ({"optim": {"lr": "fast"}}, "optim.lr must be a number, got 'fast'"),
        ({"optim": {"lr": False}}, "optim.lr must be a number, got False"),
        ({"optim": {"schedule": 3}}, "optim.schedule must be a table, got 3"),
        ({"data": {"path": 3}}, "data.path must be a string, got 3"),
        ({"plugins": "one"}, "plugins must be a list, got 'one'"),
        ({"plugins": [1]}, "plugins[0] must be a string, got 1"),
        ({"model": {"rope_scaling": 2}}, "model.rope_scaling must be a table, got 2"),
        ({"callbacks": []}, "callbacks must be a table of tables"),
        ({"callbacks": {"early_stopping": 3}}, "callbacks must be a table of tables"),
        ({"strategy": {"name": "sized"}}, "strategy.size has no default; give it a value"),
        ({"strategy": {"name": "test", "layers": ["x"]}}, "strategy.layers[0] must be a whole number, got 'x'"),
        ({"strategy": {"name": "test", "names": "x"}}, "strategy.names must be a list, got 'x'"),
        ({"strategy": {"name": "test", "beta": -1}}, "strategy.beta must not be negative, got -1.0"),
        ({"config_version": "one"}, "config_version must be a whole number, got 'one'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_path(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(table)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 0),
        ("model.num_hidden_layers", 0),
        ("model.num_hidden_layers", 10_001),
        ("model.vocab_size", -1),
        ("model.num_key_value_heads", -1),
        ("model.num_key_value_heads", 4),  # 6 heads
        ("model.hidden_size", 385),
        ("model.head_dim", 3),
        ("model.rms_norm_eps", 0),
        ("model.rms_norm_eps", math.inf),
        ("model.rope_theta", -1),
        ("model.rope_theta", math.nan),
        ("model.dropout", 1.0),
        ("model.dropout", -0.1),
        ("model.dropout", math.nan),
        ("model.initializer_range", 0),
        ("model.sliding_window", 0),
        ("model.attend", "flash"),
        ("model.hidden_size", 10**11),
        ("model.max_position_embeddings", 10**20),
        ("data.context", -1),
        ("data.context", 2**31),
        ("data.stride", -1),
        ("optim.lr", 0),
        ("optim.lr", math.nan),
        ("optim.lr", math.inf),
        ("optim.warmup_steps", -1),
        ("optim.min_lr_ratio", 1.5),
        ("optim.max_grad_norm", 0),
        ("optim.max_grad_norm", math.nan),
        ("train.steps", -1),
        ("train.global_batch", 0),
        ("train.micro_batch", 0),
        ("train.micro_batch", 5),  # 16 a step
        ("train.global_batch", 2**31),
        ("train.log_every", 0),
        ("train.keep_last", -1),
        ("train.seed", -1),
        ("train.seed", 2**32),
        ("train.max_seconds", 0),
        ("config_version", 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {key: value})
    assert key in str(error.value)


LATENT: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS: dict[str, Any] = EXPERTS | {"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2}


def test_latent_attention_settles_head_dim_and_heads_of_its_own() -> None:
    got = ModelConfig(**LATENT, hidden_size=100, num_attention_heads=3)  # which does not divide
    assert (got.is_latent, got.head_dim, got.num_key_value_heads) == (True, 4, 3)
    assert ModelConfig(**LATENT, head_dim=4, num_key_value_heads=6) == ModelConfig(**LATENT)
    assert not ModelConfig().is_latent


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"q_lora_rank": 4},
            "model.q_lora_rank is 4 and belongs to latent attention; set model.kv_lora_rank, or leave",
        ),
        ({"qk_nope_head_dim": 4}, "model.qk_nope_head_dim is 4 and belongs to latent attention"),
        ({"qk_rope_head_dim": 4}, "model.qk_rope_head_dim is 4 and belongs to latent attention"),
        ({"v_head_dim": 4}, "model.v_head_dim is 4 and belongs to latent attention"),
        ({"rope_interleave": True}, "model.rope_interleave is True and belongs to latent attention"),
        (LATENT | {"kv_lora_rank": 0}, "model.kv_lora_rank must be at least 1 where model.kv_lora_rank is set, got 0"),
        (LATENT | {"qk_nope_head_dim": 0}, "model.qk_nope_head_dim must be at least 1"),
        (LATENT | {"qk_rope_head_dim": -2}, "model.qk_rope_head_dim must be at least 1"),
        (LATENT | {"qk_rope_head_dim": 5}, "model.qk_rope_head_dim must be even for rotary embeddings, got 5"),
        (LATENT | {"v_head_dim": 0}, "model.v_head_dim must be at least 1"),
        (LATENT | {"q_lora_rank": 0}, 'model.q_lora_rank must be at least 1 or "none", got 0'),
        (
            LATENT | {"num_key_value_heads": 2},
            "model.num_key_value_heads is 2; latent attention makes keys and values for each of the 6 query heads, leave it "
            "out or set it to 0",
        ),
        (
            LATENT | {"head_dim": 10},
            "model.head_dim is 10; with latent attention it is model.qk_rope_head_dim (4), leave",
        ),
        (
            LATENT | {"qk_rope_head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "model.rope_scaling.rope_type 'dynamic' needs model.head_dim above 2, got 2",
        ),
    ],
)
def test_latent_attention_that_cannot_work_is_refused_by_name(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config({"model": model})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts_per_tok", 2), ("moe_intermediate_size", 8), ("n_shared_experts", 1), ("first_k_dense_replace", 1),
        ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("n_group", 2), ("topk_group", 2),
        ("norm_topk_prob", True), ("routed_scaling_factor", 2.0), ("router_aux_loss_coef", 0.01),
        ("router_bias_update_speed", 0.001),
    ],
)  # fmt: skip
def test_a_key_of_experts_without_experts_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        run_config({"model": {key: value}})
    message = (
        f"model.{key} is {value!r} and belongs to a mixture of experts; set model.n_routed_experts, or leave it out"
    )
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"n_routed_experts": -1}, "model.n_routed_experts must not be negative, got -1"),
        (EXPERTS | {"n_shared_experts": -1}, "model.n_shared_experts must not be negative, got -1"),
        (
            EXPERTS | {"num_experts_per_tok": 0},
            "model.num_experts_per_tok must be between 1 and model.n_routed_experts (8)",
        ),
        (
            EXPERTS | {"num_experts_per_tok": 9},
            "model.num_experts_per_tok must be between 1 and model.n_routed_experts (8)",
        ),
        (
            EXPERTS | {"moe_intermediate_size": 0},
            "model.moe_intermediate_size must be at least 1 where there are experts",
        ),
        (
            EXPERTS | {"first_k_dense_replace": 7},
            "model.first_k_dense_replace 7 is more than model.num_hidden_layers (6)",
        ),
        (EXPERTS | {"first_k_dense_replace": -1}, "model.first_k_dense_replace must not be negative, got -1"),
        (EXPERTS | {"mlp_bias": True}, "model.mlp_bias is true; a mixture of experts has no biases, leave it out"),
        (EXPERTS | {"scoring_func": "sigmoyd"}, "model.scoring_func must be one of softmax, sigmoid; got 'sigmoyd'"),
        (EXPERTS | {"topk_method": "best"}, "model.topk_method must be one of greedy, group_limited_greedy, noaux_tc"),
        (GROUPS | {"n_group": 3}, "model.n_routed_experts 8 is not divisible by model.n_group 3"),
        (GROUPS | {"n_group": 0}, "model.n_routed_experts 8 is not divisible by model.n_group 0"),
        (GROUPS | {"topk_group": 5}, "model.topk_group must be between 1 and model.n_group (4), got 5"),
        (GROUPS | {"topk_group": 0}, "model.topk_group must be between 1 and model.n_group (4), got 0"),
        (
            GROUPS | {"topk_method": "greedy"},
            'model.n_group is 4 and model.topk_method "greedy" knows no groups; choose',
        ),
        (
            GROUPS | {"num_experts_per_tok": 5},
            "model.num_experts_per_tok 5 is more than the experts of model.topk_group 2 groups of 2",
        ),
        (
            GROUPS | {"n_group": 8},
            'model.n_group is 8 for 8 experts, and model.topk_method "noaux_tc" compares groups by their two best experts',
        ),
        (EXPERTS | {"routed_scaling_factor": 0.0}, "model.routed_scaling_factor must be positive, got 0.0"),
        (EXPERTS | {"routed_scaling_factor": math.inf}, "model.routed_scaling_factor must be finite and not negative"),
        (
            EXPERTS | {"router_aux_loss_coef": -0.1},
            "model.router_aux_loss_coef must be finite and not negative, got -0.1",
        ),
        (EXPERTS | {"router_aux_loss_coef": math.nan}, "model.router_aux_loss_coef must be finite and not negative"),
        (GROUPS | {"router_bias_update_speed": -1.0}, "model.router_bias_update_speed must be finite and not negative"),
        (
            EXPERTS | {"router_bias_update_speed": 0.001},
            "model.router_bias_update_speed needs the bias of model.topk_method \"noaux_tc\", which is 'greedy'",
        ),
    ],
)
def test_experts_that_cannot_work_are_refused_by_name(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config({"model": model})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("scoring_func", "sqrtsoftplus"), ("topk_method", "hash"), ("topk_method", None)]
)
def test_a_way_to_route_that_is_unknown_is_refused_of_code_too(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key} must be one of .*; got {value!r}"):
        ModelConfig(**EXPERTS | {key: value})


def test_groups_and_dense_layers_at_their_limits_are_accepted() -> None:
    assert list(ModelConfig(**EXPERTS | {"first_k_dense_replace": 2}).expert_layers) == [2, 3, 4, 5]
    assert not ModelConfig(**EXPERTS | {"first_k_dense_replace": 6}).expert_layers  # all of them are dense
    assert not ModelConfig().expert_layers
    ModelConfig(**GROUPS | {"num_experts_per_tok": 4, "router_bias_update_speed": 0.001})
    ModelConfig(**GROUPS | {"n_group": 8, "topk_group": 8})  # nothing to choose between
    ModelConfig(**GROUPS | {"n_group": 8, "topk_method": "group_limited_greedy"})
    ModelConfig(**EXPERTS | {"num_experts_per_tok": 8})


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps \(3\) and train\.epochs \(2\) are both set"):
        load_config(None, {"train.steps": 3, "train.epochs": 2})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, "rope_type is None"),
        ({"rope_type": "lineer", "factor": 2.0}, "did you mean linear?"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be a number of at least 1"),
        ({"rope_type": "linear", "factor": math.nan}, "factor must be a number of at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number of at least 1"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, "beta_fast is not known to rope_type 'linear'"),
        ({"rope_type": "llama3", "factor": 8}, "lacks high_freq_factor, low_freq_factor, original_max"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": "x"}, "beta_fast must be a number"),
    ],
)
def test_rope_scaling_is_checked_by_its_type(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling") as error:
        run_config({"model": {"rope_scaling": scaling}})
    assert message in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2},
        {"rope_type": "ntk", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "truncate": False},
        {
            "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_each_rope_scaling_type_is_accepted(scaling: dict[str, Any]) -> None:
    assert run_config({"model": {"rope_scaling": scaling}}).model.rope_scaling == scaling


# -- files ---------------------------------------------------------------------------------------------------


def test_a_file_of_a_newer_version_is_refused_before_its_new_keys_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config_version is {CONFIG_VERSION + 1}.*upgrade pellucid"):
        read(f"config_version = {CONFIG_VERSION + 1}\nkey_of_tomorrow = 1\n", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such configuration file"),
        (b"[model\n", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"a = 1\na = 2", "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; give a TOML file"):
        load_config(tmp_path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert read("", tmp_path) == load_config(None)


def test_plugins_load_before_their_names_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config_plugin.py").write_text(
        "from pellucid.registry import register\n@register('strategy', 'plugged')\ndef plugged(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    got = read('plugins = ["config_plugin"]\n[strategy]\nname = "plugged"\n', tmp_path)
    assert got.strategy.name == "plugged"


# -- round trips ---------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "model": {"preset": "tiny", "rope_scaling": {"rope_type": "linear", "factor": 2.5}, "sliding_window": 64},
    "data": {"path": 'a "quoted" folder\twith \x7f and ünïcode \\ in it', "stride": 8},
    "strategy": {"name": "test", "beta": 1e-9, "kind": "sum", "layers": [3, 1], "names": ["x", "none"], "folder": "f"},
    "optim": {"lr": 1e16, "max_grad_norm": "none", "schedule": {"name": "cosine", "cycles": 3}},
    "train": {"epochs": 2, "max_seconds": 0.1, "compile": True},
    "lora": {"r": 4, "targets": ["q_proj"], "use_rslora": True},
    "callbacks": {"early_stopping": {"patience": 9}, "my stats": {}},
}  # fmt: skip


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("table", [{}, EVERYTHING])
def test_toml_reads_back_equal(table: dict[str, Any], docs: bool, tmp_path: Path) -> None:
    config = run_config(table)
    assert read(to_toml(config, docs=docs), tmp_path) == config


def test_a_table_reads_back_equal() -> None:
    config = run_config(EVERYTHING)
    assert run_config(to_table(config)) == config


def test_the_text_written_is_stable() -> None:
    config = run_config(EVERYTHING)
    assert to_toml(run_config(tomllib.loads(to_toml(config)))) == to_toml(config)


@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    path=st.text(st.characters(codec="utf-8"), max_size=30),
    steps=st.none() | st.integers(0, 2**62),
)
def test_any_number_and_any_text_survive_the_file(lr: float, path: str, steps: int | None) -> None:
    config = run_config(
        {"optim": {"lr": lr}, "data": {"path": path}, "train": {"steps": "none" if steps is None else steps}}
    )
    again = run_config(tomllib.loads(to_toml(config)))
    assert again == config and again.data.path == path


def test_every_key_is_written() -> None:
    table = tomllib.loads(to_toml(run_config({})))
    for name, cls in [
        ("model", ModelConfig),
        ("data", DataConfig),
        ("train", TrainConfig),
        ("parallel", ParallelConfig),
    ]:
        assert set(table[name]) == {f.name for f in dataclasses.fields(cls)} - {"modes"}
    assert {f.name for f in dataclasses.fields(OptimConfig)} - {"options"} == set(table["optim"])


# -- documentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_each_field_says_what_it_is(cls: type) -> None:
    documented = field_docs(cls)
    nested = {
        f.name for f in dataclasses.fields(cls) if dataclasses.is_dataclass(f.default_factory) or f.name == "options"
    }
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in documented and f.name not in nested]
    assert missing == []
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")  # dataclass writes one where there is none


def test_classes_under_test_are_all_there_are() -> None:
    found = {
        value for module in (config_module, model_config, config_tables, config_text) for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    }  # fmt: skip
    assert found == set(CLASSES)


def test_the_documented_defaults_hold_every_docstring_as_a_comment() -> None:
    text = to_toml(run_config({"strategy": {"name": "test"}}), docs=True)
    for cls in CLASSES:
        for name, note in field_docs(cls).items():
            if name not in ("callbacks", "modes"):  # tables that are empty by default
                for line in note.splitlines():
                    assert f"# {line}\n" in text, name
    assert "# Weight of the test.\nbeta = 0.1" in text
    assert "# strategy: one of pretrain, sized, test. Options of 'test':" in text


def test_docstrings_spread_over_lines_are_kept_whole() -> None:
    assert field_docs(ModelConfig)["rope_scaling"].count("\n") == 1


# -- options -------------------------------------------------------------------------------------------------


def test_options_left_out_are_the_entry_s_defaults() -> None:
    assert options_of("strategy", "test", None) == Objective()
    assert options_of("strategy", "test", Objective(beta=3)).beta == 3


def test_options_of_another_entry_are_refused() -> None:
    with pytest.raises(ConfigError, match="options of strategy 'pretrain' must be NoOptions, got Objective"):
        options_of("strategy", "pretrain", Objective())


def test_a_config_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().hidden_size = 3  # type: ignore[misc]
    for cls in CLASSES:
        with pytest.raises(TypeError):
            cls(1)
        assert not hasattr(cls(), "__dict__"), f"{cls.__name__} takes stray attributes"


def test_build_names_the_prefix_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"a\.b\.path must be a string"):
        build(DataConfig, {"path": 1}, "a.b.")
