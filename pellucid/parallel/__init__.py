"""Who holds which part of weights, gradients and optimizer state, and every byte that moves."""

from pellucid.parallel import fsdp2, modes, zero, zero2, zero3  # noqa: F401 - they register themselves
from pellucid.parallel.ddp import DDP
from pellucid.parallel.executor import Executor, create_executor
from pellucid.parallel.fsdp import FSDP
from pellucid.parallel.loop_objects import OptimizerProtocol, SchedulerProtocol
from pellucid.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DDP", "FSDP", "Executor", "OptimizerProtocol", "SchedulerProtocol", "ShardedOptimizer", "create_executor"]
