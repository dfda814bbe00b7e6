"""How large micro-batches may be, and what else would make a job fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.rehearsal.job import Rehearsal
from roll_batching.rehearsal.variants import Cap, Change, caps_of, ladders

Rehearse = Callable[[JobConfig], Rehearsal]
_PROBES = 6


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Between which values of a cap a job stops to fit."""

    key: str
    value: int
    """As the job has it."""
    fits: int | None
    """The largest that was seen to fit; None: not even that of the longest sample."""
    too_large: int | None
    """The smallest that was seen not to fit; None: none was met."""
    need: float
    """Bytes that the phases which it bounds need with `fits`, else with the least value."""


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change, and what the job needs with it."""

    change: Change
    need: float
    """Bytes."""


@dataclass
class _Search:
    """Regula falsi over rehearsals: need grows almost linearly with a cap."""

    cap: Cap
    gpu_memory: float
    needs: dict[int, float] = field(default_factory=dict)
    """Bytes, by the cap's value."""

    @property
    def below(self) -> int | None:
        """The largest that fits."""
        return max((value for value, need in self.needs.items() if need <= self.gpu_memory), default=None)

    @property
    def above(self) -> int | None:
        """The smallest that does not."""
        return min((value for value, need in self.needs.items() if need > self.gpu_memory), default=None)

    def guess(self) -> int | None:
        """What to try; None where the bounds are a step apart, or nothing is left to try."""
        below, above, step = self.below, self.above, self.cap.step
        if above is None:
            assert below is not None
            return below * 2 if len(self.needs) < _PROBES - 1 else None
        if below is None:
            return self.cap.least if above > self.cap.least else None
        if above - below <= max(step, below // 50):
            return None
        share = (self.gpu_memory - self.needs[below]) / (self.needs[above] - self.needs[below])
        guess = int(below + share * (above - below)) // step * step
        return guess if below + step <= guess < above else below + step

    def limit(self) -> Limit:
        """What was found."""
        at = self.below if self.below is not None else min(self.needs)
        return Limit(key=self.cap.key, value=self.cap.value, fits=self.below, too_large=self.above, need=self.needs[at])


def limits_of(found: Rehearsal, gpu_memory: float, rehearse: Rehearse) -> list[Limit]:
    """From which values on the caps of phases that do not fit would let them; of a job that fits, that of training.

    A phase's memory follows from its own cap alone, so that all of them are searched at once.
    """
    searches = [
        _Search(cap, gpu_memory, {cap.value: need})
        for cap in caps_of(found.job, found.dims)
        if (need := found.need_in(cap.phases)) > gpu_memory
    ]
    if found.fits(gpu_memory):
        training = caps_of(found.job, found.dims)[0]
        searches = [_Search(training, gpu_memory, {training.value: found.need_in(training.phases)})]
    for _ in range(_PROBES):
        guesses = [(search, guess) for search in searches if (guess := search.guess()) is not None]
        if not guesses:
            break
        changed = Change(settings={search.cap.key: guess for search, guess in guesses})
        seen = rehearse(changed.of(found.job))
        for search, guess in guesses:
            search.needs[guess] = seen.need_in(search.cap.phases)
    return [search.limit() for search in searches]


def lowered(found: Rehearsal, limits: Sequence[Limit], gpu_memory: float) -> Change | None:
    """The largest caps with which a job fits; None where caps alone do not make it fit."""
    capped = {phase for cap in caps_of(found.job, found.dims) for phase in cap.phases}
    others = [phase for stage in found.stages for phase in stage.report.peaks if phase not in capped]
    if not limits or found.need_in(others) > gpu_memory:
        return None
    settings = {limit.key: limit.fits for limit in limits}
    return None if None in settings.values() else Change(settings=settings)


def ways_that_were_tried(
    found: Rehearsal, gpu_memory: float, rehearse: Rehearse, *, last_resort: bool = True
) -> list[WayOut]:
    """What the job would need with each change that saves memory; of each kind until one fits.

    Layouts that the model does not allow are left out. Where none fits, the one that comes nearest is tried with the
    least caps, as a `last_resort`.
    """
    tried: list[WayOut] = []
    for ladder in ladders(found.job, found.dims.world_size):
        for change in ladder:
            try:
                tried.append(WayOut(change=change, need=rehearse(change.of(found.job)).worst.need))
            except RollBatchingError:
                continue
            if tried[-1].need <= gpu_memory:
                break
    nearest = min(tried, key=lambda way: way.need, default=None)
    if nearest is None or nearest.need <= gpu_memory or not last_resort:
        return tried
    changed = nearest.change.of(found.job)
    dims = changed.actor_train.strategy_args.strategy_config.parallel_dims(found.dims.world_size)
    least = {cap.key: cap.least for cap in caps_of(changed, dims) if cap.least < cap.value}
    both = Change(settings={**nearest.change.settings, **least})
    return [*tried, WayOut(change=both, need=rehearse(both.of(found.job)).worst.need)] if least else tried
