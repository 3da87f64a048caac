"""ZeRO stage 3: `FSDP` around the model, behind the executor's methods.

W ranks. Rows of every matrix, of its gradient and of its optimizer state are on one rank each; vectors are on all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pellucid.parallel.fsdp import FSDP
from pellucid.parallel.parts import Rows
from pellucid.parallel.rows import RowExecutor
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero3Options:
    """Weights, gradients and optimizer state are cut by rows; each layer gathers its weights when it computes."""

    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Gather weights in this type, and compute in it; "none": in that of the weights."""
    reshard_after_forward: bool = True
    """Free a layer's weights after its forward, and gather them again in backward."""


@register("mode", "zero3", config=Zero3Options)
class Zero3Executor(RowExecutor):
    """ZeRO-3; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3."""

    fsdp: FSDP

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._refuse_optimizer("zero3")
        dtype = getattr(torch, self.options.compute_dtype) if self.options.compute_dtype else None
        self.fsdp = FSDP(
            model, dtype, average=self.average, reshard_after_forward=self.options.reshard_after_forward, tag=self.weights_tag,
        )  # fmt: skip
        sharded = {p.name: p for p in self.fsdp.sharded}
        self.rows = [
            Rows(
                name, tuple(self.fsdp.shapes[name]), sharded[name].start if name in sharded else 0, parameter,
                replicated=name not in sharded,
            )
            for name, parameter in model.named_parameters()
        ]  # fmt: skip
        self.whole, self.held = [], {}
        if self.optimizer is not None:
            self._hand_over(self.optimizer, {row.weight: row.name for row in self.rows})
        return self.fsdp

    @contextmanager
    def _window(self) -> Iterator[None]:
        self.fsdp.reducer.synchronizing = self.sync_gradients
        yield

    def backward(self, loss: Tensor) -> None:
        if self.sync_gradients and not self.fsdp.reducer.outstanding:  # a forward that torch.compile has traced
            self.fsdp.reducer.expected = True
        super().backward(loss)

    def _finish(self) -> None:
        self.fsdp.finish_gradient_sync()

    def _drop_grads(self) -> None:
        self.fsdp.zero_grad()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, FSDP) else model
