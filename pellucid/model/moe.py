"""A mixture of experts: each token goes to a few of many feed-forward networks (Shazeer et al. 2017, arXiv:1701.06538).

Shapes: N tokens, D model width, E experts, K experts a token, I width inside an expert. Tokens are sorted by expert, so that
each expert multiplies its own in one product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pellucid.config import ModelConfig
from pellucid.model.canonical import MATMUL_ROWS, in_products, narrow_rows
from pellucid.model.experts import add_up, mix, pack, padded
from pellucid.model.linear import Linear
from pellucid.model.mlp import SwiGLU

BALANCING_BIAS = "e_score_correction_bias"
"""What the name of a router's bias ends with: float32 always, and never trained by gradients."""


class Routing(NamedTuple):
    """Where the tokens of one layer went."""

    probs: Tensor
    """``[..., E]`` float32: each token's scores of all experts, divided by their sum."""
    chosen: Tensor
    """``[..., K]`` int64: the experts it went to."""


class Router(nn.Module):
    """Scores experts, and chooses some for each token; computed in float32 at least, whatever the rest of the model is in.

    ``e_score_correction_bias`` (with "noaux_tc") only moves the choice, not the weights of what is chosen, and is no
    matter of gradients: `balance` moves it.
    """

    own_types = ("e_score_correction_bias",)
    """Vectors that stay in their type where full sharding computes in another one."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, device=device))
        bias = torch.zeros(config.n_routed_experts, device=device) if config.topk_method == "noaux_tc" else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        canonical = config.attend == "canonical"
        self.padding, self.min_rows = (self.exact_padding, MATMUL_ROWS) if canonical else (0, 1)

    @property
    def exact_padding(self) -> int:
        """Columns to add to a sigmoid, whose last numel % 32 elements torch rounds by another routine."""
        return -self.config.n_routed_experts % 32

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        """The bias stays in float32, bit for bit: steps of 0.001 would be lost in bfloat16."""
        exact = None if self.e_score_correction_bias is None else self.e_score_correction_bias.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        bias = self.e_score_correction_bias
        if bias is not None and exact is not None and bias.dtype in (torch.bfloat16, torch.float16):
            bias.data = exact.to(bias.device, torch.float32)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x ``[..., D]`` -> the weights ``[..., K]`` of the chosen experts, and the routing."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            rows = x.to(wide).reshape(-1, x.shape[-1])
            logits = F.linear(padded(rows, self.min_rows), self.weight.to(wide))[: len(rows)]
            logits = logits.view(*x.shape[:-1], -1)
            scores = self._sigmoid(logits) if config.scoring_func == "sigmoid" else logits.softmax(-1)
            chosen = self._choose(scores.detach())
            weights = scores.gather(-1, chosen)
            if config.norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            probs = scores / scores.sum(-1, keepdim=True) if config.scoring_func == "sigmoid" else scores
            return weights * config.routed_scaling_factor, Routing(probs, chosen)

    def _sigmoid(self, logits: Tensor) -> Tensor:
        if self.padding:
            return F.pad(logits, (0, self.padding)).sigmoid()[..., : logits.shape[-1]]
        return logits.sigmoid()

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if config.topk_group < config.n_group:
            grouped = scores.unflatten(-1, (config.n_group, -1))  # [..., groups, E / groups]
            best = 2 if config.topk_method == "noaux_tc" else 1
            of_group = grouped.topk(best, dim=-1).values.sum(-1)
            allowed = torch.zeros_like(of_group, dtype=torch.bool)
            allowed.scatter_(-1, of_group.topk(config.topk_group, dim=-1).indices, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(config.num_experts_per_tok, dim=-1).indices


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones that see every token; parameters named as in DeepSeek and Qwen3-MoE.

    Every expert that is trained has a gradient in each backward, zeros where it got no token: it is the same on one process
    and on ranks.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        inner = config.moe_intermediate_size
        self.min_rows = MATMUL_ROWS if config.attend == "canonical" else 1
        self.gate = Router(config, device)
        self.experts = nn.ModuleList(SwiGLU(config, device, width=inner) for _ in range(config.n_routed_experts))
        shared = config.n_shared_experts
        self.shared_experts = SwiGLU(config, device, width=inner * shared) if shared else None
        self.count: Callable[[Tensor, int], list[int]] = count_tokens
        """Tokens of each expert; replaced where tensors have no values."""
        self.register_load_state_dict_post_hook(MixtureOfExperts._pack)  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self, *, exact: bool) -> Iterator[None]:
        """Meanwhile a token's bits do not depend on what else is in a call, or may, whatever ``attend`` says."""
        gate = self.gate
        before = self.min_rows, gate.min_rows, gate.padding
        rows = MATMUL_ROWS if exact else 1
        self.min_rows, gate.min_rows, gate.padding = rows, rows, gate.exact_padding if exact else 0
        try:
            yield
        finally:
            self.min_rows, gate.min_rows, gate.padding = before

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x ``[..., D]`` -> ``[..., D]``, and where its tokens went."""
        weights, routing = self.gate(x)
        routed = self._routed_uncompiled if torch.compiler.is_compiling() else self._routed
        out = routed(x.flatten(0, -2), weights.flatten(0, -2), routing.chosen.flatten(0, -2)).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routing

    def _routed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Each token's experts' outputs, weighted and added up: ``[N, D]``."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = self.count(flat, len(self.experts))
        device = tokens.device.type
        if torch.is_autocast_enabled(device) and tokens.dtype != torch.float64:  # which autocast leaves alone
            tokens = tokens.to(torch.get_autocast_dtype(device))
        linears = self._linears()
        if all(type(linear) is Linear for linear in linears):
            experts = [cast(Tensor, linear.weight) for linear in linears]
            return mix(tokens, weights, order, counts, experts, min_rows=self._least_rows(tokens.dtype))
        return self._one_by_one(tokens, weights, order, counts)

    # torch.compiler.disable would load the compiler here and now, seconds for every command that has a model
    _routed_uncompiled = _disable_dynamo(_routed)

    def _least_rows(self, dtype: torch.dtype) -> int:
        """Of an expert's products."""
        if self.min_rows == 1 or not in_products(dtype):
            return self.min_rows
        return narrow_rows(self.gate.config.hidden_size * self.gate.config.moe_intermediate_size)

    def _linears(self) -> list[nn.Module]:
        return [getattr(e, name) for e in self.experts for name in ("gate_proj", "up_proj", "down_proj")]

    def _pack(self, *_: Any) -> None:
        """Wherever parameters were moved, cast or loaded: let those of all experts lie in one storage again."""
        linears = self._linears()
        if all(type(linear) is Linear for linear in linears):
            pack([cast(Tensor, linear.weight) for linear in linears])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MixtureOfExperts":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._pack()
        return self

    def _one_by_one(self, tokens: Tensor, weights: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        """The same with the experts' own forward, for layers of another class."""
        mine = tokens[order // weights.shape[1]].split(counts)
        outs = [
            expert(padded(x, self._least_rows(x.dtype)))[: len(x)]
            for expert, x in zip(self.experts, mine, strict=True)
            if len(x) or torch.is_grad_enabled()  # without a token too, so that its gradients are zeros
        ]
        return add_up(torch.cat(outs), weights, order)


def count_tokens(chosen: Tensor, experts: int) -> list[int]:
    """How often each expert stands in ``chosen`` (flat)."""
    counts: list[int] = torch.bincount(chosen, minlength=experts).tolist()
    return counts


def balance(counts: Tensor, speed: float) -> Tensor:
    """What is added to a router's bias after a step in which experts got ``counts`` ``[E]`` tokens.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    return (counts.mean() - counts).sign() * speed
