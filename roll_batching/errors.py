"""Errors of this package. Each message has the problem, its place and the cure.

All of them derive from `RollBatchingError`. Errors that a caller could have avoided by passing other
values are `ValueError`s too, so that generic code can catch them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class RollBatchingError(Exception):
    """Base of all errors of this package."""


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
    """A checkpoint that cannot be written, found, or loaded into the model."""


class DeviceMemoryError(RollBatchingError, RuntimeError):
    """A device ran out of memory; the message has the micro-batch and the setting to lower."""


class IntegrationError(RollBatchingError, RuntimeError):
    """A host framework lacks the functions that the integration replaces."""


class EngineError(RollBatchingError, RuntimeError):
    """A rollout engine that cannot be reached, refuses a request, or sends an invalid reply."""


class RankError(RollBatchingError, RuntimeError):
    """An error of at least one rank, raised with the same message on all ranks."""


class CollectiveError(RollBatchingError, RuntimeError):
    """A failure of this rank alone inside a library's collectives. The others wait there until this process ends."""


def first_of(texts: Sequence[str], limit: int, separator: str = "; ") -> str:
    """The first `limit` of `texts` in one line, and how many more there are, for an error."""
    num_hidden = len(texts) - limit
    end = f"{separator.replace(', ', ' ')}and {num_hidden} more" if num_hidden > 0 else ""
    return separator.join(texts[:limit]) + end


_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|failed to (recv|send), got"
    r"|remote process exited|failed to pass monitoredBarrier|has died",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store after the other end is gone."""


_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)


def is_collective_timeout(error: BaseException) -> bool:
    """Whether `error` is the timeout of a collective that other ranks did not join."""
    return isinstance(error, RuntimeError) and bool(_LATE.search(str(error)))


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` of a collective is a lost connection to another rank, whose own error is the cause."""
    return bool(_LOST.search(str(error)))
