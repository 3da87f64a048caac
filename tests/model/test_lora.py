"""Adapters compute what PEFT's compute, in PEFT's files, and leave the base as it was."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import TINY, digest

from pellucid import load_model, save_model
from pellucid.checkpoint import export_model
from pellucid.checkpoint.adapter import save_adapter
from pellucid.config import LoraConfig, ModelConfig, load_config, run_config
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import LoraLinear, add_lora, is_adapter_weight, lora_of, merge, remove_lora, unmerge

TOKENS = torch.arange(24).view(2, 12) * 7 % 61
LORA = LoraConfig(r=3, alpha=5.0, targets=("q_proj", "v_proj", "down_proj"))


def small(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**(TINY | changes)), generator=torch.Generator().manual_seed(1))


def trained(model: torch.nn.Module) -> None:
    """B as if it had been trained: at zero it would hide everything."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.normal_(0, 0.3, generator=generator)


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone().view(torch.int16 if p.dtype == torch.bfloat16 else torch.int32)
        for name, p in model.named_parameters()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_model(tmp_path / "base", small())
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """An adapter's folder, of trained weights, beside its base."""
    model = load_model(base).model
    add_lora(model, LORA, generator=torch.Generator().manual_seed(3))
    trained(model)
    save_adapter(tmp_path / "adapter", model, base=str(base))
    return tmp_path / "adapter"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- the layer -----------------------------------------------------------------------------------------------


def test_an_untrained_adapter_changes_no_bit_and_leaves_only_itself_trainable() -> None:
    model, before = small(), logits(small())
    names = add_lora(model, LORA)
    assert names == [
        f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    ]
    assert torch.equal(logits(model), before)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"{name}.lora_{x}.weight" for name in names for x in "AB"}
    assert {n for n, _ in model.named_parameters()} - trainable == {n for n, _ in small().named_parameters()}


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 5 / 3), (True, 5 / math.sqrt(3))])
def test_a_layer_computes_the_formula(rslora: bool, scaling: float) -> None:
    model = small(attention_bias=True)
    add_lora(model, replace(LORA, use_rslora=rslora))
    trained(model)
    layer, x = model.model.layers[0].self_attn.q_proj, torch.randn(4, 16)
    expected = x @ layer.weight.T + layer.bias + scaling * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_joined_products_are_computed_one_by_one_where_a_linear_has_an_adapter() -> None:
    model = small()
    add_lora(model, LORA)
    trained(model)
    with_gradients = model(TOKENS).logits
    torch.testing.assert_close(with_gradients.detach(), logits(model))
    with_gradients.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == is_adapter_weight(name), name


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    names = add_lora(small(tie_word_embeddings=False), LoraConfig())
    assert len(names) == 14 and not any("lm_head" in name for name in names)
    assert "lm_head" in add_lora(small(tie_word_embeddings=False), LoraConfig(targets=("lm_head",)))


def test_dropout_acts_in_training_on_the_adapter_alone() -> None:
    model = small()
    add_lora(model, replace(LORA, dropout=0.5))
    trained(model.train())
    assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(model.eval()), logits(model))


def test_the_start_is_drawn_by_the_generator_alone() -> None:
    first, second, other = small(), small(), small()
    for seed, model in ((1, first), (1, second), (2, other)):
        torch.manual_seed(seed + id(model) % 1000)
        add_lora(model, LORA, generator=torch.Generator().manual_seed(seed))
    assert digest(first) == digest(second) != digest(other)


# -- merging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerging_gives_the_base_back_bit_for_bit(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    add_lora(model, LORA)
    trained(model)
    before, apart = bits(model), logits(model)
    merge(model)
    merge(model)  # again changes nothing
    assert not same(bits(model), before)
    if dtype == torch.float32:
        torch.testing.assert_close(logits(model), apart, atol=1e-5, rtol=0)
    unmerge(model)
    assert same(bits(model), before) and torch.equal(logits(model), apart)


def test_removed_it_leaves_a_plain_model_merged_or_bare() -> None:
    model, bare = small(), digest(small())
    add_lora(model, LORA)
    trained(model)
    apart = logits(model)
    merge(model)
    remove_lora(model)
    assert lora_of(model) is None and not any(isinstance(m, LoraLinear) for m in model.modules())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in small().named_parameters()]
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(logits(model), apart, atol=1e-5, rtol=0)
    model = small()
    add_lora(model, LORA)
    trained(model)
    remove_lora(model)
    assert digest(model) == bare


# -- PEFT's format -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"targets": ("all-linear",)}])
@pytest.mark.parametrize("kind", [{}, {"qk_norm": True}])
def test_peft_opens_our_adapter_with_equal_logits(
    tmp_path: Path, changes: dict[str, Any], kind: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_model(tmp_path / "base", small(**kind))
    model = load_model(tmp_path / "base").model
    add_lora(model, replace(LORA, **changes))
    plain = logits(model)
    trained(model)
    save_adapter(tmp_path / "adapter", model, base=str(tmp_path / "base"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    assert (logits(model) - plain).abs().max() > 1e-2
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)
    again = load_model(tmp_path / "adapter").model
    assert torch.equal(logits(again), logits(model)) and lora_of(again) == lora_of(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "o_proj"]},
        {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1},
        {"target_modules": r".*\.(up|gate)_proj", "init_lora_weights": "gaussian"},
        {"target_modules": ["down_proj"], "layers_to_transform": [1]},
    ],
)
def test_peft_s_adapter_opens_here_with_equal_logits(tmp_path: Path, base: Path, changes: dict[str, Any]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **changes))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs").model
    assert (logits(ours) - logits(small())).abs().max() > 1e-2
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)
    save_adapter(tmp_path / "ours", ours)
    theirs_weights, weights = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("theirs", "ours"))
    assert theirs_weights.keys() == weights.keys()
    assert all(torch.equal(theirs_weights[name], weights[name]) for name in weights)


def test_an_adapter_is_exported_merged_into_its_base(tmp_path: Path, base: Path, adapter: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    export_model(adapter, tmp_path / "merged")
    merged, apart = load_model(tmp_path / "merged").model, load_model(adapter).model
    assert lora_of(merged) is None and (logits(merged) - logits(small())).abs().max() > 1e-2
    torch.testing.assert_close(logits(merged), logits(apart), atol=1e-5, rtol=0)
    export_model(adapter, tmp_path / "narrow", dtype="bfloat16")  # read in pieces
    expected = {name: p.bfloat16() for name, p in merged.named_parameters()}
    for name, tensor in load_file(tmp_path / "narrow" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-3, rtol=1e-2)
    assert (base / "model.safetensors").read_bytes() == before


def test_weights_merged_in_any_range_are_those_merged_whole(tmp_path: Path, adapter: Path) -> None:
    from pellucid.checkpoint.model_folder import open_model

    saved = open_model(adapter).weights
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        whole = saved.read(name)
        for start, stop in ((0, 5), (7, 60), (24, 48), (25, 26), (100, len(whole)), (3, 3)):
            torch.testing.assert_close(saved.read(name, start, stop), whole[start:stop], atol=1e-7, rtol=1e-6)


def test_the_base_is_found_from_the_adapter_s_folder_or_given(tmp_path: Path, base: Path, adapter: Path) -> None:
    expected = logits(load_model(adapter).model)
    edit(adapter, base_model_name_or_path="../base")
    assert torch.equal(logits(load_model(adapter).model), expected)
    edit(adapter, base_model_name_or_path="org/some-model")
    with pytest.raises(
        CheckpointError, match=r"adapter of 'org/some-model', which is no folder here; give it as load_model"
    ):
        load_model(adapter)
    assert torch.equal(logits(load_model(adapter, base=base).model), expected)
    edit(adapter, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="does not name its base"):
        load_model(adapter)
    with pytest.raises(ConfigError, match="is no adapter; leave it out"):
        load_model(base, base=base)


# -- bad input -----------------------------------------------------------------------------------------------


def test_a_target_that_matches_nothing_is_named_with_the_linears_there_are() -> None:
    model = small()
    with pytest.raises(
        ConfigError, match=r"'query' matches no linear layer; the model has down_proj, gate_proj, k_proj"
    ):
        add_lora(model, LoraConfig(targets=("q_proj", "query")))
    with pytest.raises(ConfigError, match="'lm_head' matches no"):  # tied: there is no such layer
        add_lora(model, LoraConfig(targets=("lm_head",)))
    assert lora_of(model) is None and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("r", 0, "lora.r must be at least 1, got 0"),
        ("alpha", 0.0, "lora.alpha must be positive"),
        ("alpha", math.inf, "lora.alpha must be positive and finite"),
        ("dropout", 1.0, r"lora.dropout must be in \[0, 1\)"),
        ("targets", [], "lora.targets is empty"),
        ("rank", 8, "unknown key lora.rank"),
    ],
)
def test_values_out_of_range_are_refused_by_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config({"lora": {key: value}})


def test_targets_are_a_list_on_the_command_line_too() -> None:
    for text in ("q_proj,v_proj", '["q_proj", "v_proj"]'):
        assert load_config(None, {"lora.targets": text}).lora == LoraConfig(targets=("q_proj", "v_proj"))
    assert load_config(None, {"lora.targets": "all-linear"}).lora == LoraConfig()
    assert load_config(None).lora is None


def test_an_adapter_on_an_adapter_is_refused(tmp_path: Path, adapter: Path) -> None:
    model = load_model(adapter).model
    with pytest.raises(ConfigError, match="has an adapter already"):
        add_lora(model, LORA)
    model = small()
    add_lora(model, LORA)
    save_adapter(tmp_path / "second", model, base=str(adapter))
    for act in (load_model, lambda path: export_model(path, tmp_path / "out")):
        with pytest.raises((ConfigError, CheckpointError), match="adapter"):
            act(tmp_path / "second")


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"intermediate_size": 40}, {"num_hidden_layers": 1}])
def test_an_adapter_of_a_base_of_another_shape_names_the_layer(
    tmp_path: Path, adapter: Path, changes: dict[str, int]
) -> None:
    save_model(tmp_path / "other", small(**changes))
    edit(adapter, base_model_name_or_path=str(tmp_path / "other"))
    for act in (load_model, lambda path: export_model(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"does not fit its base: .*layers\.\d\.\w+\.\w+_proj"):
            act(adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True), ("bias", "all"), ("lora_bias", True), ("fan_in_fan_out", True), ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}), ("alpha_pattern", {"q_proj": 2}), ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]), ("use_qalora", True), ("init_lora_weights", "pissa"), ("brand_new", 1),
        ("peft_type", "IA3"), ("target_parameters", ["x"]),
    ],
)  # fmt: skip
def test_what_changes_the_computation_and_is_not_supported_is_refused_by_name(
    adapter: Path, key: str, value: Any
) -> None:
    load_model(adapter)
    edit(adapter, **{key: value})
    with pytest.raises(CheckpointError, match=key):
        load_model(adapter)
    edit(adapter, **{key: "LORA" if key == "peft_type" else None})
    load_model(adapter)


@pytest.mark.parametrize(
    ("key", "value"), [("r", 0), ("r", "x"), ("r", None), ("lora_alpha", -1), ("lora_alpha", "much"), ("r", 2)]
)
def test_numbers_that_are_none_or_do_not_fit_are_refused(adapter: Path, key: str, value: Any) -> None:
    edit(adapter, **{key: value})
    with pytest.raises(CheckpointError, match=r"adapter"):
        load_model(adapter)


def test_weights_that_do_not_belong_together_are_named(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(CheckpointError, match=rf"missing {name}"):
        load_model(adapter)
    save_file(tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected .*lora_embedding_A"):
        load_model(adapter)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="adapter_model"):
        load_model(adapter)


def test_what_is_not_there_to_save_or_would_be_lost_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match="no adapter to save"):
        save_adapter(tmp_path / "x", small())
    for act in (merge, remove_lora):
        with pytest.raises(ConfigError, match="has no adapter"):
            act(small())
    model = small()
    add_lora(model, LORA)
    with pytest.raises(ConfigError, match="no place for"):
        save_model(tmp_path / "x", model)
    with pytest.raises(ConfigError, match="is no adapter"):
        save_adapter(base, model)


# -- experts -----------------------------------------------------------------------------------------------


def test_a_router_s_bias_stays_untrained_with_an_adapter_and_after_it() -> None:
    model = small(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1,
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    biases = [name for name, _ in model.named_parameters() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name in biases:
            model.get_parameter(name).copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    before = bits(model)

    def trained_names() -> set[str]:
        return {name for name, p in model.named_parameters() if p.requires_grad}

    every = trained_names()
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    layers = add_lora(model, LoraConfig(r=2, targets=targets))
    assert sum(".experts." in name for name in layers) == 2 * 4 * 3 and len(layers) == 2 * (1 + 3 * (4 + 1))
    assert all(is_adapter_weight(name) for name in trained_names())
    trained(model)
    with_adapter = logits(model)
    merge(model)
    torch.testing.assert_close(logits(model), with_adapter, rtol=1e-4, atol=1e-5)
    unmerge(model)
    remove_lora(model)
    assert trained_names() == every and not every & set(biases) and len(biases) == 2
    assert same(bits(model), before)
