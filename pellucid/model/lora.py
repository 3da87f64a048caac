"""Low-rank adapters on linear layers: ``W x + s B A x`` with the base ``W`` frozen (Hu et al. 2021, arXiv:2106.09685).

The base keeps its parameter names; an adapter adds ``<linear>.lora_A.weight`` ``[r, in]`` and ``<linear>.lora_B.weight``
``[out, r]``, which PEFT calls the same behind a prefix.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import LoraConfig
from pellucid.errors import ConfigError
from pellucid.model.linear import Linear, linear
from pellucid.model.moe import BALANCING_BIAS

ALL_LINEAR = "all-linear"
A, B = ".lora_A.weight", ".lora_B.weight"
"""What the names of an adapter's parameters end with."""
HEAD = "lm_head"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter beside its frozen weight; the same function as the layer alone until B is trained.

    Takes over ``base``'s parameters. The adapter has their type and device; on "meta" it is not initialised.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would draw a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.config = config
        """Of the whole adapter, which this is a part of."""
        self.scaling = scaling_of(config)
        self.original: Tensor | None = None
        """The base's weight while the adapter is merged into ``weight``; None while it is not."""
        self.switched_off = False
        self.lora_A = _without_bias(base.in_features, config.r, base.weight)
        self.lora_B = _without_bias(config.r, base.out_features, base.weight)
        if base.weight.device.type != "meta":
            drawn = torch.empty(self.lora_A.weight.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                self.lora_A.weight.copy_(drawn)
                self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight, self.bias)
        if self.original is not None or self.switched_off:
            return out
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        low: Tensor = self.lora_B(self.lora_A(x))
        return out + low * self.scaling


def add_lora(model: nn.Module, config: LoraConfig, *, generator: torch.Generator | None = None) -> list[str]:
    """Freeze ``model`` and put an adapter on each linear layer that ``config.targets`` names; returns their names.

    Args:
        generator: draws every A (uniform, as PEFT's and `nn.Linear`'s own); B is zero. None: torch's global one.

    Raises:
        ConfigError: a target matches no linear layer, or the model has an adapter; nothing is changed.
    """
    if lora_of(model) is not None:
        raise ConfigError(
            "the model has an adapter already, and an adapter on an adapter is not supported; merge the first one into "
            "its base with `pellucid export ADAPTER --out MODEL` and start from that"
        )
    chosen = _targeted(model, config.targets)
    model.requires_grad_(False)
    for name, layer in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, config, generator))
    return list(chosen)


def lora_of(model: nn.Module) -> LoraConfig | None:
    """The configuration of a model's adapter, with the full name of each layer it is on; None where there is none."""
    layers = _layers(model)
    if not layers:
        return None
    return replace(next(iter(layers.values())).config, targets=tuple(layers))


def merge(model: nn.Module) -> None:
    """Add the adapter to the weights, keeping the base beside them: one product a layer, as without an adapter.

    Not for training. A second call does nothing.

    Raises:
        ConfigError: there is no adapter.
    """
    with torch.no_grad():
        for layer in _require_layers(model).values():
            if layer.original is None:
                layer.original = layer.weight.detach().clone()
                merged = merged_weight(layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scaling)
                layer.weight.copy_(merged)


def unmerge(model: nn.Module) -> None:
    """Undo `merge`: every weight has the bits it had before. Nothing, where nothing is merged."""
    with torch.no_grad():
        for layer in _layers(model).values():
            if layer.original is not None:
                layer.weight.copy_(layer.original)
                layer.original = None


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model is its bare base; nothing, where it has no adapter.

    Raises:
        ConfigError: the adapter is merged into the base's weights.
    """
    layers = _layers(model).values()
    if any(layer.original is not None for layer in layers):
        raise ConfigError("the adapter is merged into the base, which cannot be used alone; unmerge(model) first")
    for layer in layers:
        layer.switched_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.switched_off = False


def remove_lora(model: nn.Module) -> None:
    """Make plain linear layers of those with an adapter, trainable again: with it if it is merged, else the bare base."""
    for name, layer in _require_layers(model).items():
        plain = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(BALANCING_BIAS))


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """``weight + scaling * b a``, computed in float32 at least, in ``weight``'s type: ``[out, in]``, or the rows b is of."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + (b.to(wide) @ a.to(wide)) * scaling).to(weight.dtype)


def scaling_of(config: LoraConfig) -> float:
    """The factor on B A: alpha / r, or alpha / sqrt(r) with ``use_rslora`` (Kalajdzievski 2023, arXiv:2312.03732)."""
    return config.alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((A, B))


def _targeted(model: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers that targets name, in the model's order."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen: set[str] = set()
    for target in targets:
        found = [name for name in linears if _is_named(name, target)]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none"
            raise ConfigError(f"lora.targets: {target!r} matches no linear layer; the model has {known}")
        chosen.update(found)
    return {name: layer for name, layer in linears.items() if name in chosen}


def _is_named(name: str, target: str) -> bool:
    if target == ALL_LINEAR:
        return name.rpartition(".")[2] != HEAD
    return name == target or name.endswith(f".{target}")


def _layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _require_layers(model: nn.Module) -> dict[str, LoraLinear]:
    layers = _layers(model)
    if not layers:
        raise ConfigError("the model has no adapter; add_lora or load_model of an adapter's folder gives it one")
    return layers


def _without_bias(width_in: int, width_out: int, like: Tensor) -> nn.Linear:
    layer = Linear(width_in, width_out, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.empty(width_out, width_in, dtype=like.dtype, device=like.device))
    return layer
