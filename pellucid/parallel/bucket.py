"""Flat buckets of gradients, and when one may leave."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pellucid.errors import TrainingError
from pellucid.parallel.comm import Pending
from pellucid.parallel.layout import Layout


class Bucket:
    """The buffer of a layout, and which gradients are in it."""

    def __init__(self, layout: Layout, parameters: dict[str, nn.Parameter]) -> None:
        self.layout = layout
        self.parameters = [parameters[name] for name in layout.names]
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=self.parameters[0].device)
        self.views = [self.flat[slot.offset : slot.stop].view(slot.info.shape) for slot in layout.slots]
        self.ready = [False] * len(self.parameters)
        self.pending: Pending | None = None

    keeps_gradients = True
    """Whether ``.grad`` of its parameters are views of the buffer, where the types are equal."""

    def open(self) -> None:
        """The buffer is about to be filled."""


class Reducer:
    """Starts a bucket's reduction in backward as soon as its last gradient is there, buckets strictly in order.

    Order is that of construction on every rank, whatever the order in which gradients arrive. A parameter that the loss
    does not reach contributes zero. `finish` sends what is left and waits.

    Args:
        buckets: in the order of sending.
        launch: begins the reduction of a bucket whose buffer is filled.
    """

    def __init__(self, buckets: list[Bucket], launch: Callable[[Bucket], Pending]) -> None:
        self.buckets, self.launch = buckets, launch
        self.in_backward = True
        """Whether buckets leave as soon as they are full. Where other collectives are issued in backward it must be False: a rank
        may learn only after backward that a gradient does not come, and the order must be the same on all."""
        self.synchronizing = True
        """Whether the backward under way is the last of its accumulation window."""
        self.expected = False
        """A synchronised forward was seen, and `finish` has not run since."""
        self.outstanding = False
        """A synchronised backward has begun, and nobody has waited for its gradients, whether or not a bucket has left."""
        self.num_launched = 0
        for bucket in buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, i))

    def expect(self) -> None:
        """A micro-batch begins; `TrainingError` if the gradients of the backward before are still on their way."""
        if self.outstanding:
            raise TrainingError(
                "a forward while gradients of the last backward are still on the wire; call finish_gradient_sync() first"
            )
        self.expected = self.synchronizing

    def _hook(self, bucket: Bucket, i: int) -> Callable[[Tensor], None]:
        view, info = bucket.views[i], bucket.layout.slots[i].info

        owner = weakref.ref(self)  # the hook lives as long as the parameter, which another wrapper may want then

        def gradient_ready(parameter: Tensor) -> None:
            self = owner()
            if self is None:
                return
            if not self.synchronizing:
                if self.outstanding:
                    raise TrainingError(
                        f"a backward added to the gradient of {info.name} while it is on the wire; "
                        "call finish_gradient_sync() first"
                    )
                if parameter.grad is None:  # a `MicroBatchTree` keeps it
                    return
                if view.dtype == parameter.dtype:  # accumulate in the bucket, so that gradients are held once
                    self._fill(bucket, i)
                return
            if not self.expected:
                raise TrainingError(
                    f"the gradient of {info.name} arrived in a synchronised backward whose forward was not synchronised; "
                    "run forward and backward of a micro-batch inside the same no_sync() or accumulate()"
                )
            if bucket.ready[i]:
                raise TrainingError(
                    f"the gradient of {info.name} became ready twice in one synchronised backward; "
                    "call finish_gradient_sync() between two backwards, or put the first inside no_sync()"
                )
            self.outstanding = True
            self._fill(bucket, i)
            bucket.ready[i] = True
            if self.in_backward:
                self._launch_ready()

        return gradient_ready

    @staticmethod
    def _fill(bucket: Bucket, i: int) -> None:
        parameter, view = bucket.parameters[i], bucket.views[i]
        assert parameter.grad is not None
        bucket.open()
        if parameter.grad.data_ptr() == view.data_ptr():
            return
        view.copy_(parameter.grad)
        # from here on the gradient lives in the bucket, and autograd's own copy is freed
        parameter.grad = view if bucket.keeps_gradients and view.dtype == parameter.dtype else None

    def _launch_ready(self) -> None:
        while self.num_launched < len(self.buckets) and all(self.buckets[self.num_launched].ready):
            for earlier in self.buckets[: self.num_launched]:  # what has arrived can give its buffers back
                if earlier.pending is not None and earlier.pending.done():
                    earlier.pending.wait()
            bucket = self.buckets[self.num_launched]
            self.num_launched += 1  # first: if the launch raises, the bucket must not go out twice
            bucket.pending = self.launch(bucket)

    def fill_missing(self) -> list[bool]:
        """Send every bucket that has not left; returns which parameters have a gradient here, in bucket order.

        A gradient from earlier micro-batches of the window counts although the last one did not touch it; a parameter
        without any contributes zero.
        """
        came: list[bool] = []
        for bucket in self.buckets:
            for i, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                came.append(bucket.ready[i] or parameter.grad is not None)
                if bucket.ready[i]:
                    continue
                if parameter.grad is not None:
                    self._fill(bucket, i)
                else:
                    bucket.open()
                    view.zero_()
                bucket.ready[i] = True
        self._launch_ready()
        return came

    def wait(self, then: Callable[[Bucket], Pending] | None = None) -> None:
        """Until every bucket is reduced; the next window may begin.

        Args:
            then: begins what follows on a bucket's reduction; called in the order of buckets on every rank, and waited for.
        """
        following: list[Pending] = []
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
            bucket.ready = [False] * len(bucket.ready)
            if then is not None:
                following.append(then(bucket))
        for pending in following:
            pending.wait()
        self.num_launched, self.expected, self.outstanding = 0, False, False
