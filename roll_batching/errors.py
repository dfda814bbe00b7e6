"""The errors a user can meet. Each message says what is wrong, where, and what to do.

All of them derive from `RollBatchingError`. Errors that a caller could have avoided by passing other
values are `ValueError`s too, so that generic code can catch them.
"""

from __future__ import annotations

import re


class RollBatchingError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(RollBatchingError, ValueError):
    """A configuration that cannot be honoured: unknown key, bad value, keys that contradict each other."""


class PlanError(RollBatchingError, ValueError):
    """Lengths and constraints for which no valid plan exists, or a plan that breaks an invariant."""


class DataError(RollBatchingError, ValueError):
    """Samples that cannot be trained on: empty rows, holes in a mask, malformed lines, missing fields."""


class LayoutError(RollBatchingError, ValueError):
    """A parallel layout, model or optimizer that the strategy cannot drive correctly."""


class LossError(RollBatchingError, ValueError):
    """A loss that breaks its contract: wrong shape, no gradient, not finite, undeclared mask."""


class CheckpointError(RollBatchingError, ValueError):
    """A checkpoint that cannot be written, found, or read into the model at hand."""


class DeviceMemoryError(RollBatchingError, RuntimeError):
    """A device ran out of memory: what it was computing, and what to lower."""


class EngineError(RollBatchingError, RuntimeError):
    """A rollout engine that cannot be reached, refuses a request, or answers what is no answer."""


class RankError(RollBatchingError, RuntimeError):
    """An error seen by at least one rank and raised, with the same message, on all of them."""


_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|failed to (recv|send), got"
    r"|remote process exited|failed to pass monitoredBarrier|has died",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say when the other end is gone."""


_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)


def waited_in_vain(error: BaseException) -> bool:
    """Whether `error`, of a collective, says that other ranks did not come in time."""
    return isinstance(error, RuntimeError) and bool(_LATE.search(str(error)))


def lost_a_peer(error: BaseException) -> bool:
    """Whether `error`, of a collective, may say no more than that another rank is gone."""
    return bool(_LOST.search(str(error)))
