"""A mixture of experts: each token goes to a few of many feed-forward networks (Shazeer et al. 2017, arXiv:1701.06538).

Shapes: N tokens, D model width, E experts, K experts a token, I width inside an expert. Tokens are sorted by expert, so that
each expert multiplies its own in one product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pellucid.config import ModelConfig
from pellucid.model.canonical import MATMUL_ROWS
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

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, device=device))
        bias = torch.zeros(config.n_routed_experts, device=device) if config.topk_method == "noaux_tc" else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        """The bias stays in float32: steps of 0.001 would be lost in bfloat16."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        bias = self.e_score_correction_bias
        if bias is not None and bias.dtype in (torch.bfloat16, torch.float16):
            bias.data = bias.data.float()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x ``[..., D]`` -> the weights ``[..., K]`` of the chosen experts, and the routing."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            logits = F.linear(x.to(wide), self.weight.to(wide))
            scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(-1)
            chosen = self._choose(scores.detach())
            weights = scores.gather(-1, chosen)
            if config.norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            probs = scores / scores.sum(-1, keepdim=True) if config.scoring_func == "sigmoid" else scores
            return weights * config.routed_scaling_factor, Routing(probs, chosen)

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

    Every expert has a gradient in each backward, zeros where it got no token: it is the same on one process and on ranks.
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

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x ``[..., D]`` -> ``[..., D]``, and where its tokens went."""
        weights, routing = self.gate(x)
        out = self._routed(x.flatten(0, -2), weights.flatten(0, -2), routing.chosen.flatten(0, -2)).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Each token's experts' outputs, weighted and added up: ``[N, D]``."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = self.count(flat, len(self.experts))
        dtype = torch.get_autocast_dtype(tokens.device.type) if torch.is_autocast_enabled(tokens.device.type) else None
        tokens = tokens.to(dtype) if dtype is not None else tokens
        linears = [getattr(e, name) for e in self.experts for name in ("gate_proj", "up_proj", "down_proj")]
        if all(type(linear) is nn.Linear for linear in linears):
            parameters = [linear.weight for linear in linears]
            routed: Tensor = _Experts.apply(tokens, weights, order, counts, self.min_rows, *parameters)  # type: ignore[no-untyped-call]
            return routed
        return self._one_by_one(tokens, weights, order, counts)

    def _one_by_one(self, tokens: Tensor, weights: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        """The same with the experts' own forward, for layers of another class."""
        mine = tokens[order // weights.shape[1]].split(counts)
        outs = [
            expert(_padded(x, self.min_rows))[: len(x)]
            for expert, x in zip(self.experts, mine, strict=True)
            if len(x) or torch.is_grad_enabled()  # without a token too, so that its gradients are zeros
        ]
        return _add_up(torch.cat(outs), weights, order)


def count_tokens(chosen: Tensor, experts: int) -> list[int]:
    """How often each expert stands in ``chosen`` (flat)."""
    counts: list[int] = torch.bincount(chosen, minlength=experts).tolist()
    return counts


def balance(counts: Tensor, speed: float) -> Tensor:
    """What is added to a router's bias after a step in which experts got ``counts`` ``[E]`` tokens.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    return (counts.mean() - counts).sign() * speed


def _add_up(out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Outputs ``[N K, D]`` in the order of experts -> ``[N, D]``, each token's K in the order they were chosen in."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    chosen = out[place].view(*weights.shape, -1)  # [N, K, D]
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), chosen).squeeze(1)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) >= rows else F.pad(x, (0, 0, 0, rows - len(x)))


class _Experts(torch.autograd.Function):
    """All experts at once: what is the same for all is one operation over all tokens, and only products go by expert.

    Saves the inputs and two ``[N K, I]`` products; tokens are gathered again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, counts: list[int], min_rows: int, *experts: Tensor
    ) -> Tensor:
        gates, ups, downs = (_in_type(experts[i::3], x.dtype) for i in range(3))
        mine = x[order // weights.shape[1]]
        gate, up = _products(mine, gates, counts, min_rows), _products(mine, ups, counts, min_rows)
        out = _products(F.silu(gate).mul_(up), downs, counts, min_rows)
        ctx.save_for_backward(x, weights, order, gate, up, *experts)
        ctx.counts = counts
        return _add_up(out, weights, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, gate, up, *experts = ctx.saved_tensors
        counts, num_chosen = ctx.counts, weights.shape[1]
        gates, ups, downs = (_in_type(experts[i::3], x.dtype) for i in range(3))
        sorted_weights = weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        grad_out = grad[order // num_chosen]
        grad_inner = _products(grad_out, [w.t() for w in downs], counts, 1)  # of the inner values, not yet weighted
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        inner = silu * up
        grad_sorted = (
            (grad_inner.float() * inner.float()).sum(-1) if x.dtype.itemsize < 4 else (grad_inner * inner).sum(-1)
        )
        grad_weights = torch.empty_like(weights).flatten()
        grad_weights[order] = grad_sorted.to(weights.dtype)
        grad_inner *= sorted_weights
        grad_out *= sorted_weights
        grad_downs = _outer(grad_out, inner, counts, experts[2::3])
        del grad_out, inner
        grad_up = grad_inner * silu
        grad_gate = grad_inner.mul_(up).mul_(sigmoid.add_(silu.mul_(1 - sigmoid)))  # silu' = s + silu (1 - s)
        mine = x[order // num_chosen]
        grad_gates, grad_ups = (
            _outer(grad_gate, mine, counts, experts[::3]),
            _outer(grad_up, mine, counts, experts[1::3]),
        )
        grad_mine = _products(grad_gate, [w.t() for w in gates], counts, 1)
        grad_mine += _products(grad_up, [w.t() for w in ups], counts, 1)
        grad_x = _add_up(grad_mine, torch.ones_like(weights), order)
        each = [g for three in zip(grad_gates, grad_ups, grad_downs, strict=True) for g in three]
        return (grad_x, grad_weights.view(weights.shape), None, None, None, *each)


def _in_type(weights: Any, dtype: torch.dtype) -> list[Tensor]:
    return [w.to(dtype) for w in weights]


def _products(x: Tensor, weights: list[Tensor], counts: list[int], min_rows: int) -> Tensor:
    """Rows ``[N K, a]`` of each expert times its ``[b, a]`` -> ``[N K, b]``."""
    out = x.new_empty(len(x), weights[0].shape[0])
    start = 0
    for weight, count in zip(weights, counts, strict=True):
        if count >= min_rows:
            torch.mm(x[start : start + count], weight.t(), out=out[start : start + count])
        elif count:
            out[start : start + count] = F.linear(_padded(x[start : start + count], min_rows), weight)[:count]
        start += count
    return out


def _outer(grad: Tensor, x: Tensor, counts: list[int], weights: Any) -> list[Tensor]:
    """Each expert's ``grad^T x`` over its own rows, in its weight's type."""
    grads, start = [], 0
    for weight, count in zip(weights, counts, strict=True):
        product = torch.mm(grad[start : start + count].t(), x[start : start + count])
        grads.append(product.to(weight.dtype))
        start += count
    return grads
