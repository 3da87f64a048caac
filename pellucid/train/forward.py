"""One forward of the model over the rows of a batch, as strategies and references run it."""

from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.data.records import PreferenceBatch, RolloutBatch
from pellucid.model import ModelOutput, Transformer

WRITTEN_OUT_TOKENS = 256
"""Longest row whose bfloat16 attention is written out as two products on the CPU, uncompiled too: forward and backward of
`small` then took 0.87 of the time of the fused kernel (one thread, Zen 4). Longer rows would keep large score matrices."""


def predict(
    model: Transformer, batch: Batch | PreferenceBatch | RolloutBatch, noise: Tensor | None = None
) -> ModelOutput:
    """The model's output for the rows of a batch, documents apart.

    Args:
        noise: added to the embeddings, ``[B, T, D]``.
    """
    tokens = batch.tokens
    short = tokens.device.type == "cpu" and tokens.shape[-1] <= WRITTEN_OUT_TOKENS
    documents = batch.document_ids if batch.packed else None
    attend = bare_model(model).make_attend(documents, written_out=True if short else None)
    if noise is None:
        return model(tokens, batch.positions, attend)  # type: ignore[no-any-return]
    return model(tokens, batch.positions, attend, embedding_noise=noise)  # type: ignore[no-any-return]


def bare_model(model: Transformer) -> Transformer:
    """The model inside of a data parallel wrapper."""
    bare: Transformer = getattr(model, "module", model)
    return bare
