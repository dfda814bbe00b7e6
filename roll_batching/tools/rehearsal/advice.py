"""Search for the largest caps, and for other settings, with which a job fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.tools.rehearsal.job import Rehearsal
from roll_batching.tools.rehearsal.variants import Cap, Change, candidate_changes, caps_of

Rehearse = Callable[[JobConfig], Rehearsal]
_PROBES = 6


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bounds on the largest value of a cap with which a job fits."""

    key: str
    value: int
    """Value in the job."""
    fits: int | None
    """Largest rehearsed value that fits; None: not even one longest sample fits."""
    too_large: int | None
    """Smallest rehearsed value that does not fit; None: every rehearsed value fits."""
    need: float
    """Bytes of the phases that the cap bounds, at `fits`, or at the smallest rehearsed value."""


@dataclass(frozen=True, kw_only=True)
class TriedChange:
    """A rehearsed change of settings."""

    change: Change
    need: float
    """Bytes that the changed job needs on its fullest rank."""


@dataclass
class _Search:
    """Regula falsi over rehearsals, because memory grows almost linearly with a cap."""

    cap: Cap
    gpu_memory: float
    needs: dict[int, float] = field(default_factory=dict)
    """Bytes by value of the cap."""

    @property
    def below(self) -> int | None:
        """Largest rehearsed value that fits."""
        return max((value for value, need in self.needs.items() if need <= self.gpu_memory), default=None)

    @property
    def above(self) -> int | None:
        """Smallest rehearsed value that does not fit."""
        return min((value for value, need in self.needs.items() if need > self.gpu_memory), default=None)

    def guess(self) -> int | None:
        """Next value to rehearse; None when the bounds are close enough or the search is exhausted."""
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
        """Bounds so far."""
        at = self.below if self.below is not None else min(self.needs)
        return Limit(key=self.cap.key, value=self.cap.value, fits=self.below, too_large=self.above, need=self.needs[at])


def find_limits(rehearsal: Rehearsal, gpu_memory: float, rehearse: Rehearse) -> list[Limit]:
    """Limits of the caps whose phases do not fit; for a job that fits, the limit of the training cap.

    The memory of a phase depends on its own cap only, so one rehearsal serves the searches of all caps.
    """
    searches = [
        _Search(cap, gpu_memory, {cap.value: need})
        for cap in caps_of(rehearsal.config, rehearsal.dims)
        if (need := rehearsal.need_in(cap.phases)) > gpu_memory
    ]
    if rehearsal.fits(gpu_memory):
        training = caps_of(rehearsal.config, rehearsal.dims)[0]
        searches = [_Search(training, gpu_memory, {training.value: rehearsal.need_in(training.phases)})]
    for _ in range(_PROBES):
        guesses = [(search, guess) for search in searches if (guess := search.guess()) is not None]
        if not guesses:
            break
        changed = Change(settings={search.cap.key: guess for search, guess in guesses})
        outcome = rehearse(changed.of(rehearsal.config))
        for search, guess in guesses:
            search.needs[guess] = outcome.need_in(search.cap.phases)
    return [search.limit() for search in searches]


def largest_fitting_caps(rehearsal: Rehearsal, limits: Sequence[Limit], gpu_memory: float) -> Change | None:
    """Largest caps with which a job fits; None when lower caps alone are not enough."""
    capped = {phase for cap in caps_of(rehearsal.config, rehearsal.dims) for phase in cap.phases}
    others = [phase for stage in rehearsal.stages for phase in stage.report.peaks if phase not in capped]
    if not limits or rehearsal.need_in(others) > gpu_memory:
        return None
    settings = {limit.key: limit.fits for limit in limits}
    return None if None in settings.values() else Change(settings=settings)


def try_changes(
    rehearsal: Rehearsal, gpu_memory: float, rehearse: Rehearse, *, last_resort: bool = True
) -> list[TriedChange]:
    """Rehearse changes that save memory; changes of one kind are tried until one fits.

    Layouts that the model does not support are skipped. If no change fits and `last_resort` is set, the change with the
    smallest need is rehearsed again with the smallest caps.
    """
    tried: list[TriedChange] = []
    for candidates in candidate_changes(rehearsal.config, rehearsal.dims.world_size):
        for change in candidates:
            try:
                tried.append(TriedChange(change=change, need=rehearse(change.of(rehearsal.config)).worst.need))
            except RollBatchingError:
                continue
            if tried[-1].need <= gpu_memory:
                break
    nearest = min(tried, key=lambda one: one.need, default=None)
    if nearest is None or nearest.need <= gpu_memory or not last_resort:
        return tried
    changed = nearest.change.of(rehearsal.config)
    dims = changed.actor_train.strategy_args.strategy_config.parallel_dims(rehearsal.dims.world_size)
    least = {cap.key: cap.least for cap in caps_of(changed, dims) if cap.least < cap.value}
    both = Change(settings={**nearest.change.settings, **least})
    return [*tried, TriedChange(change=both, need=rehearse(both.of(rehearsal.config)).worst.need)] if least else tried
