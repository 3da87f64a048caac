"""From token ids to token ids: sampling, the key/value cache, and generation."""

from pellucid.inference.generate import generate, stream
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

__all__ = [
    "FinishReason",
    "Request",
    "Result",
    "SamplingParams",
    "TokenEvent",
    "check_request",
    "generate",
    "stream",
    "update_params",
    "window_of",
]
