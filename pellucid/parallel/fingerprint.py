"""One hash of all weights, the same for every mode and number of ranks that hold the same bits."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_sha256(weights: Iterable[tuple[str, Tensor | None]]) -> str:
    """SHA-256, in hexadecimal, of a list of all weights; of an empty one where no tensor is given.

    The list has a line a weight, ``NAME DTYPE SHAPE SHA256`` and a line feed, in the order of the names' UTF-8 bytes: the bare
    model's name, the type as in ``float32``, the shape as in ``8192x384`` (empty for a number), and the SHA-256 of the
    elements in row-major order, each little-endian. Only one tensor has to be in memory at a time.

    Args:
        weights: names and whole tensors in any order; None is skipped.
    """
    lines = {
        name.encode(): f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))} {_sha256(tensor)}"
        for name, tensor in weights
        if tensor is not None
    }
    return hashlib.sha256(b"".join(b"%s %s\n" % (name, lines[name].encode()) for name in sorted(lines))).hexdigest()


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()
