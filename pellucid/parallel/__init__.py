"""Who holds which part of weights, gradients and optimizer state, and every byte that moves."""

from pellucid.parallel import modes, zero  # noqa: F401 - they register themselves
from pellucid.parallel.ddp import DDP
from pellucid.parallel.executor import Executor, create_executor
from pellucid.parallel.loop_objects import OptimizerProtocol, SchedulerProtocol
from pellucid.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DDP", "Executor", "OptimizerProtocol", "SchedulerProtocol", "ShardedOptimizer", "create_executor"]
