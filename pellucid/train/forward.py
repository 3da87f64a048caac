"""One forward of the model over the rows of a batch, as strategies and references run it."""

from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.data.records import PreferenceBatch, RolloutBatch
from pellucid.model import ModelOutput, Transformer


def predict(
    model: Transformer, batch: Batch | PreferenceBatch | RolloutBatch, noise: Tensor | None = None
) -> ModelOutput:
    """The model's output for the rows of a batch, documents apart.

    Args:
        noise: added to the embeddings, ``[B, T, D]``.
    """
    attend = bare_model(model).make_attend(batch.document_ids if batch.packed else None)
    if noise is None:
        return model(batch.tokens, batch.positions, attend)  # type: ignore[no-any-return]
    return model(batch.tokens, batch.positions, attend, embedding_noise=noise)  # type: ignore[no-any-return]


def bare_model(model: Transformer) -> Transformer:
    """The model inside of a data parallel wrapper."""
    bare: Transformer = getattr(model, "module", model)
    return bare
