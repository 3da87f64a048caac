"""The memory that forward and backward of one micro-batch take, found by running them on shapes without values.

B rows, T tokens a row.
"""

import weakref
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.config import ModelConfig, RunConfig
from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.attend import WindowAttend
from pellucid.model.attention import Attend
from pellucid.model.canonical import CanonicalAttend
from pellucid.model.lora import add_lora
from pellucid.model.moe import MixtureOfExperts
from pellucid.train.precision import DTYPES, autocast, resolve_dtype
from pellucid.train.setup import build_strategy, context_of
from pellucid.train.strategies import Pretrain, PretrainOptions, Strategy

CPU = torch.device("cpu")


def peak_activation_bytes(
    config: RunConfig,
    *,
    vocab_size: int = 0,
    strategy: Strategy | None = None,
    device: torch.device = CPU,
    documents: int = 2,
) -> int:
    """Most bytes that one micro-batch holds at once beyond weights, gradients and optimizer state.

    Everything between a batch and its gradients is in it: what forward keeps, copies of weights in a narrower type,
    masks, logits, and gradients on their way to ``.grad``. The gradients of all parameters are taken to stand already,
    as they do from the second micro-batch of a step on: weights + gradients + optimizer state + this is the peak of a
    step that accumulates, and an upper bound of one that does not. Not in it: the batch itself (41 bytes a token), and
    what kernels allocate inside, which is little in the model's own.

    The real strategy runs on the real model of ``config.model``, all of it trained or ``config.lora`` alone, with train.dtype and
    train.activation_checkpointing; no tensor has storage, so that an 8B model takes about two seconds and no memory.
    All layers are run: with autocast and checkpointing forward and backward grow differently with depth, so that a
    line through two shallow models would be wrong by a tenth and more. Under train.compile the figure stays that of
    eager mode, an upper bound: fused kernels keep less.

    Args:
        vocab_size: where ``config.model.vocab_size`` is 0.
        strategy: None builds ``config.strategy``. One that looks at values cannot run without them; next-token
            prediction stands in for it.
        device: whose kernels to follow; cuda must be there, and any other device is taken for a cpu.
        documents: in each row, of equal length; 1 needs no mask.

    Raises:
        ConfigError: no vocabulary size is known, or a tensor has more bytes than can be counted.
    """
    strategy = strategy or build_strategy(config)
    device = device if device.type == "cuda" else CPU
    try:
        return _peak(config, strategy, vocab_size, device, documents)
    except RuntimeError:  # of many kinds: .item(), nonzero(), .numpy(), an operator without a shape rule
        return _pretraining_peak(config, vocab_size, device, documents)


def _pretraining_peak(config: RunConfig, vocab_size: int, device: torch.device, documents: int) -> int:
    try:
        return _peak(config, Pretrain(PretrainOptions()), vocab_size, device, documents)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            f"one micro-batch of {config.train.micro_batch:,} x {context_of(config):,} tokens has tensors of more bytes than 64 bits "
            "count; lower train.micro_batch, data.context or model.max_position_embeddings"
        ) from error


def _peak(config: RunConfig, strategy: Strategy, vocab_size: int, device: torch.device, documents: int) -> int:
    rows, tokens = config.train.micro_batch, context_of(config)
    name = config.train.dtype
    dtype = resolve_dtype(name, device) if name == "auto" else DTYPES[name]
    model = ShapeModel(known_shape(config, vocab_size), rows, tokens, documents)
    if config.lora is not None:
        add_lora(model, config.lora)
    model.activation_checkpointing = config.train.activation_checkpointing
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        model.fill(device)
        if dtype == torch.bfloat16:  # copied all at once then; no operator without values knows float32
            model.pack_experts()
        batch = _batch(rows, tokens, device, packed=documents > 1)
        example = getattr(strategy, "example", None)
        given = batch if example is None else example(batch)
        live = LiveBytes()
        live.ignore(model.parameters())
        live.ignore(p.grad for p in model.parameters())
        live.ignore(getattr(batch, f.name) for f in fields(batch) if f.name != "packed")
        with live:
            with autocast(device, dtype):
                out = strategy(model, given)
            live.sums_in_place = True
            (out.sum / 1 if out.routing is None else out.sum / 1 + out.routing.loss / 1).backward()
    return live.peak


def known_shape(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The model's configuration, with this vocabulary if it has none."""
    return config.model if config.model.vocab_size else replace(config.model, vocab_size=vocab_size)


class ShapeModel(Transformer):
    """A `Transformer` whose tensors have no storage and whose layers ask for no values: experts get equally many tokens.

    Args:
        rows, tokens, documents: of the batches that it will see: which tokens may see each other is a question of values,
            so that it has to be settled here.
    """

    def __init__(self, config: ModelConfig, rows: int = 1, tokens: int = 1, documents: int = 1) -> None:
        super().__init__(config, device="meta")
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.count = _equally
        self._canonical: CanonicalAttend | None = None
        if config.attend == "canonical":
            ids = torch.arange(tokens) * documents // tokens
            self._canonical = CanonicalAttend(self.layer_windows(), ids.expand(rows, -1) if documents > 1 else None)

    def fill(self, device: torch.device) -> None:
        """Give parameters, their gradients and buffers a device; inside a `FakeTensorMode`."""
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                        requires_grad=parameter.requires_grad,
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        for parameter in filter(lambda p: p.requires_grad, self.parameters()):
            parameter.grad = torch.empty_like(parameter)

    def pack_experts(self) -> None:
        """Let the experts of a layer lie together, as a real model's do."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module._pack()

    def make_attend(self, document_ids: Tensor | None = None, *, written_out: bool | None = None) -> Attend:
        return self._canonical or WindowAttend(self.layer_windows(), document_ids, written_out=bool(written_out))


def _equally(chosen: Tensor, experts: int) -> list[int]:
    each, more = divmod(len(chosen), experts)
    return [each + (i < more) for i in range(experts)]


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make, each from its birth to the death of its last tensor.

    ``peak`` is the most bytes that were alive at once. Views and in-place results are their base's storage.
    """

    sums_in_place = False
    """Backward runs: autograd adds a gradient to another in place if that owns its storage, but not under a mode such as
    this one. The operands of such a sum are given the time to die before it counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, object] = {}

    def ignore(self, tensors: Iterable[Tensor | None]) -> None:
        """Do not count these, which must outlive the mode."""
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(out)
        if not (self.sums_in_place and func is torch.ops.aten.add.Tensor and _can_be_added_to(args[0])):
            self.peak = max(self.peak, self.now)
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self._count(out)
        elif isinstance(out, tuple | list):
            for item in out:
                self._see(item)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size


def _can_be_added_to(gradient: Tensor) -> bool:
    return gradient.is_contiguous() and not gradient._is_view()


def _batch(rows: int, tokens: int, device: torch.device, *, packed: bool) -> Batch:
    def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Batch(
        tokens=ids(rows, tokens),
        targets=ids(rows, tokens),
        loss_mask=ids(rows, tokens, dtype=torch.bool),
        positions=ids(rows, tokens),
        document_ids=ids(rows, tokens),
        sample_ids=ids(rows),
        packed=packed,
    )
