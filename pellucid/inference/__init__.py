"""From token ids to token ids: sampling, the paged key/value cache, and the engine."""

from pellucid.inference.async_engine import AsyncEngine
from pellucid.inference.constraints import Constraint, ConstraintState
from pellucid.inference.engine import Engine, EngineError
from pellucid.inference.generate import engine_for, generate, stream
from pellucid.inference.records import EngineStats, StepRecord
from pellucid.inference.request import (
    FinishReason,
    Request,
    Result,
    SamplingParams,
    TokenEvent,
    check_request,
    update_params,
    window_of,
)
from pellucid.inference.scheduler import QueueFullError

__all__ = [
    "AsyncEngine",
    "Constraint",
    "ConstraintState",
    "Engine",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "QueueFullError",
    "Request",
    "Result",
    "SamplingParams",
    "StepRecord",
    "TokenEvent",
    "check_request",
    "engine_for",
    "generate",
    "stream",
    "update_params",
    "window_of",
]
