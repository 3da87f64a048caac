"""One forward of the model over the rows of a batch, as strategies and references run it."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from pellucid.data.batches import Batch
from pellucid.data.records import PreferenceBatch, RolloutBatch
from pellucid.model import ModelOutput, Transformer
from pellucid.model.attend import RowsAttend
from pellucid.train.prefixes import Prefixes

WRITTEN_OUT_TOKENS = 256
"""Longest row whose bfloat16 attention is written out as two products on the CPU, uncompiled too: forward and backward of
`small` then took 0.87 of the time of the fused kernel (one thread, Zen 4). Longer rows would keep large score matrices."""


def predict(
    model: Transformer,
    batch: Batch | PreferenceBatch | RolloutBatch,
    noise: Tensor | None = None,
    *,
    at: Tensor | None = None,
    prefixes: Prefixes | None = None,
) -> ModelOutput:
    """The model's output for the rows of a batch, documents apart.

    Args:
        noise: added to the embeddings, ``[B, T, D]``.
        at: where logits are wanted, as `places` has it; None: everywhere.
        prefixes: of these rows, one document each: what they share is computed once. Needs ``at``; ``hidden`` is then theirs.
    """
    tokens = batch.tokens
    short = tokens.device.type == "cpu" and tokens.shape[-1] <= WRITTEN_OUT_TOKENS
    documents = batch.document_ids if batch.packed else None
    attend = bare_model(model).make_attend(documents, written_out=True if short else None)
    if prefixes is not None:
        assert at is not None and documents is None and noise is None
        output: ModelOutput = model(
            prefixes.tokens, prefixes.positions, RowsAttend(attend, prefixes.rows, prefixes.places),
            rope_length=tokens.shape[-1], at=prefixes.rows.flatten()[at],
        )  # fmt: skip
        routings = (tuple(each[prefixes.rows] for each in of) for of in (output.router_probs, output.router_choices))
        return ModelOutput(output.logits, output.hidden, *routings)
    wishes = {"embedding_noise": noise, "at": at}
    given = {name: tensor for name, tensor in wishes.items() if tensor is not None}
    return model(tokens, batch.positions, attend, **given)  # type: ignore[no-any-return]


def places(mask: Tensor) -> Tensor:
    """Where a mask ``[B, T]`` is set, in its flattened form, ``[n]`` int64: the other tokens need no logits.

    On tensors without values, and in a graph of fixed shapes, all places: the mask is then still to be heeded.
    """
    if torch.compiler.is_compiling() or is_fake(mask):  # in this order: the compiler does not know is_fake
        return torch.arange(mask.numel(), device=mask.device)
    return mask.flatten().nonzero()[:, 0]


def spread(values: Tensor, at: Tensor, like: Tensor) -> Tensor:
    """Values ``[n]`` of `places` in the shape of the mask ``like`` ``[B, T]``, 0 elsewhere."""
    return values.new_zeros(like.numel()).index_copy(0, at, values).view(like.shape)


def bare_model(model: Transformer) -> Transformer:
    """The model inside of a data parallel wrapper."""
    bare: Transformer = getattr(model, "module", model)
    return bare
