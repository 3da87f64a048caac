"""Deliberately wrong versions of the parallel modes that tests of several rooms must catch. Each takes a ``monkeypatch``."""

from pellucid.parallel.bucket import Reducer
from pellucid.parallel.ddp import DDP
from pellucid.parallel.zero import Zero1Executor


def nothing_is_reduced(patch):
    patch.setattr(Reducer, "_hook", lambda self, bucket, i: lambda parameter: None)
    patch.setattr(DDP, "finish_gradient_sync", lambda self: None)


def buffer_is_the_gradient_of_a_lone_tensor(patch):
    """Where a bucket holds one tensor the copy is saved, and what is sent is no longer what is filled."""
    fill = Reducer._fill

    def aliased(bucket, i):
        view = bucket.views[i]
        if view.untyped_storage().nbytes() == view.nbytes:
            view.set_(bucket.parameters[i].grad)
        else:
            fill(bucket, i)

    patch.setattr(Reducer, "_fill", staticmethod(aliased))


def rates_do_not_arrive(patch):
    hand_over = Zero1Executor._hand_over

    def into_one_of_its_own(self):
        hand_over(self)
        self.optimizer = type(self.optimizer)([dict(group) for group in self.optimizer.param_groups])

    patch.setattr(Zero1Executor, "_hand_over", into_one_of_its_own)


def a_shard_is_forgotten(patch):
    """The last rank never steps its last slice."""
    hand_over = Zero1Executor._hand_over

    def all_but_one(self):
        hand_over(self)
        if self.rank == self.world_size - 1:
            for group in self.optimizer.param_groups:
                group["params"] = group["params"][:-1]

    patch.setattr(Zero1Executor, "_hand_over", all_but_one)
