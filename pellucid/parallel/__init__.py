"""Who holds which part of weights, gradients and optimizer state, and every byte that moves."""

from pellucid.parallel.executor import Executor, create_executor

__all__ = ["Executor", "create_executor"]
