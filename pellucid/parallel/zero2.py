"""ZeRO stage 2: every rank holds the weights, and a part of gradients and optimizer state.

W ranks. As stage 1, but each micro-batch's gradients are reduce-scattered at once, through a buffer that is there only
until its bucket has arrived.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.errors import ConfigError
from pellucid.parallel import comm
from pellucid.parallel.bucket import Bucket
from pellucid.parallel.ddp import refuse_late
from pellucid.parallel.layout import Layout
from pellucid.parallel.zero import Zero1Executor
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero2Options:
    """Optimizer state and gradients are cut into one part a rank; each micro-batch's gradients are reduce-scattered."""

    bucket_size_mb: float | None = None
    """MiB of gradients that travel together; "none": parallel.bucket_size_mb, 25 unless that is set."""

    def __post_init__(self) -> None:
        if self.bucket_size_mb is not None and not self.bucket_size_mb > 0:
            raise ConfigError(f"parallel.zero2.bucket_size_mb must be positive, got {self.bucket_size_mb}")


class ScratchBucket(Bucket):
    """A bucket whose buffer is there from its first gradient until its sum has arrived; the rank's own part stays."""

    keeps_gradients = False

    def __init__(self, layout: Layout, parameters: Mapping[str, nn.Parameter], rank: int, num_ranks: int) -> None:
        super().__init__(layout, dict(parameters))
        part = layout.numel // num_ranks
        self.own = self.flat[rank * part : (rank + 1) * part]
        self.shard = torch.zeros(part, dtype=layout.dtype, device=self.flat.device)
        """This rank's part of the gradients, summed over ranks and micro-batches."""
        self.holds_sum = False
        """Whether `shard` has gradients of the window under way."""
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self.close()

    def open(self) -> None:
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._num_bytes)

    def close(self) -> None:
        """Give the buffer's memory back."""
        self.flat.untyped_storage().resize_(0)

    def take(self) -> None:
        """Add what has arrived to this rank's part."""
        if self.holds_sum:
            self.shard.add_(self.own)
        else:
            self.shard.copy_(self.own)
        self.holds_sum = True
        self.close()


@register("mode", "zero2", config=Zero2Options)
class Zero2Executor(Zero1Executor):
    """ZeRO-2; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2. At most two buckets' buffers are there at a time, unless
    gradients arrive out of order."""

    buckets: list[ScratchBucket]  # type: ignore[assignment]
    _came: list[bool] | None = None
    """Which parameters had a gradient in this window, in bucket order; None before the first backward."""

    def _bucket(self, layout: Layout) -> Bucket:
        return ScratchBucket(layout, self.parameters, self.rank, self.world_size)

    def _own_gradients(self, bucket: Bucket) -> Tensor:
        assert isinstance(bucket, ScratchBucket)
        return bucket.shard

    @property
    def _reduces(self) -> bool:
        return True

    def _launch(self, bucket: Bucket) -> comm.Pending:
        assert isinstance(bucket, ScratchBucket)
        for earlier in self.buckets[: bucket.layout.index]:
            if earlier.pending is not None:
                earlier.pending.wait()
        return super()._launch(bucket).then(bucket.take)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._collect()

    def _collect(self) -> None:
        """Send what backward has not sent, and wait: this micro-batch's gradients are in the shards then."""
        comm.enter("backward")
        came = self.reducer.fill_missing()
        self.reducer.wait()
        comm.enter("other")
        self._came = came if self._came is None else [a or b for a, b in zip(self._came, came, strict=True)]

    def _finish(self) -> None:
        if self.reducer.outstanding:  # a backward has ended in an error
            self._collect()
        if self._came is None:
            return
        assert self.model is not None
        refuse_late(self.model)
        came = torch.tensor(self._came, dtype=torch.uint8, device=self.buckets[0].shard.device)
        self._came = None
        comm.all_reduce_(came, tag="used", op="max").wait()
        self._hand_out(came)

    def _drop_grads(self) -> None:
        super()._drop_grads()
        self._came = None
        for bucket in self.buckets:
            bucket.holds_sum = False
