"""How large a training micro-batch may be, and what else would make a job fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roll_batching.config import JobConfig
from roll_batching.errors import RollBatchingError
from roll_batching.rehearsal.job import Rehearsal
from roll_batching.rehearsal.lengths import longest_sample
from roll_batching.rehearsal.variants import Change, cap_of, ways_out

Rehearse = Callable[[JobConfig], Rehearsal]
_PROBES = 6
_STEP = 1024
"""Caps are told to this many tokens."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Between which values of a cap a job stops to fit."""

    key: str
    fits: int | None
    """The largest that was seen to fit; None: not even that of the longest sample."""
    too_large: int | None
    """The smallest that was seen not to fit; None: none was met."""


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change, and what the job needs with it."""

    change: Change
    need: float | None
    """Bytes; None where the changed job cannot run."""


def limit_of(found: Rehearsal, gpu_memory: float, rehearse: Rehearse) -> Limit:
    """From which cap on the job does not fit, by regula falsi over rehearsals: need grows almost linearly with it."""
    key, cap = cap_of(found.job)
    step = 1 if key.startswith("training_args") else _STEP
    least = 1 if step == 1 else -(-longest_sample(found.job) // step) * step
    needs = {cap: found.worst.need}
    for _ in range(_PROBES):
        below = max((one for one, need in needs.items() if need <= gpu_memory), default=None)
        above = min((one for one, need in needs.items() if need > gpu_memory), default=None)
        guess = _next(needs, below, above, gpu_memory, least, step)
        if guess is None or guess in needs:
            break
        needs[guess] = rehearse(Change(settings={key: guess}).of(found.job)).worst.need
    return Limit(
        key=f"actor_train.{key}",
        fits=max((one for one, need in needs.items() if need <= gpu_memory), default=None),
        too_large=min((one for one, need in needs.items() if need > gpu_memory), default=None),
    )


def _next(
    needs: dict[int, float], below: int | None, above: int | None, gpu_memory: float, least: int, step: int
) -> int | None:
    """The cap to try; None where the bounds are a step apart, or nothing is left to try."""
    if above is None:
        assert below is not None
        return below * 2 if len(needs) < _PROBES - 1 else None
    if below is None:
        return least if above > least else None
    if above - below <= max(step, below // 50):
        return None
    share = (gpu_memory - needs[below]) / (needs[above] - needs[below])
    guess = int(below + share * (above - below)) // step * step
    return min(max(guess, below + step), above - step)


def ways_that_were_tried(found: Rehearsal, rehearse: Rehearse) -> list[WayOut]:
    """What the job would need with each of `ways_out`."""
    tried = []
    for change in ways_out(found.job, found.dims.world_size):
        try:
            need: float | None = rehearse(change.of(found.job)).worst.need
        except RollBatchingError:  # a layout that this model does not allow
            need = None
        tried.append(WayOut(change=change, need=need))
    return tried
