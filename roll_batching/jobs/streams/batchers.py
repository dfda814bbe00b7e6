"""Online batchers for samples that arrive one by one: micro-batches of one row per data-parallel rank, even in L^2.

They are TRL's: a fixed number of samples per micro-batch, or a budget of tokens per row. What differs: the samples of a
micro-batch that closes are divided again, all of them at once; what is left at the end is handed out too; a sample
above the budget follows a stated policy; and a budget's batcher can look ahead over several micro-batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar, get_args

from torch.utils.data import IterableDataset, get_worker_info

from roll_batching.errors import DataError
from roll_batching.jobs.streams.rows import LengthOf, divide, even_rows, imbalance, lengths_in, tokens_of

S = TypeVar("S")
OversizePolicy = Literal["error", "alone"]

EVEN = 0.02
"""Rows this uneven are good enough to take no sample back."""
FULL = 0.98
"""A micro-batch is closed at this part of what its rows may hold: the rest is what makes rows even."""
YIELD = 0.95
"""To be even it may fall to this part of the tokens that would have fitted."""


@dataclass
class BatcherMetrics:
    """Micro-batches that a batcher has yielded so far."""

    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    rows: int = 0
    stale_samples: int = 0
    """Samples dropped because they became too old while they waited in the batcher."""
    _imbalance: float = 0.0
    _held: int = 0

    def add(self, rows: Sequence[Sequence[int]], held: int) -> None:
        """A micro-batch of rows of lengths, which `held` micro-batches have overtaken, summed over its samples."""
        self.micro_batches += 1
        self.samples += sum(map(len, rows))
        self.tokens += sum(map(sum, rows))
        self.rows += len(rows)
        self._imbalance += imbalance(rows)
        self._held += held

    def to_dict(self) -> dict[str, float]:
        """Columns for metrics: means over micro-batches, rows and samples."""
        return {
            "tokens_per_row": self.tokens / max(self.rows, 1),
            "row_imbalance": self._imbalance / max(self.micro_batches, 1),
            "held_micro_batches": self._held / max(self.samples, 1),
            "stale_samples": self.stale_samples,
        }


@dataclass
class _Waiting(Generic[S]):
    number: int
    """In the order of arrival."""
    sample: S
    length: int
    since: int
    """Micro-batches that had been handed out when it came."""


class _Batcher(IterableDataset, Generic[S]):  # type: ignore[type-arg]
    """What batchers share: they read samples, and hand out `rows[rank]`, lists of samples.

    One process iterates, since what is read from a queue is gone from it: with a DataLoader `num_workers=0`.
    """

    def __init__(self, samples: Iterable[S], num_processes: int, length_of: LengthOf) -> None:
        self.samples = samples
        self.num_processes = num_processes
        self.length_of = length_of
        self.metrics = BatcherMetrics()

    def __iter__(self) -> Iterator[list[list[S]]]:
        if get_worker_info() is not None:
            raise DataError(
                f"{type(self).__name__} balances over all ranks, so one process must iterate it: num_workers=0"
            )
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[list[list[S]]]:
        raise NotImplementedError

    def _arriving(self) -> Iterator[_Waiting[S]]:
        for number, sample in enumerate(self.samples):
            length = self.length_of(sample)
            if length < 1:
                raise DataError(f"Sample {number} has no tokens (length {length}).")
            self._admit(number, length)
            yield _Waiting(number, sample, length, self.metrics.micro_batches)

    def _admit(self, number: int, length: int) -> None:
        """Raises DataError for a sample that must not be there."""

    def _handed_out(self, rows: list[list[_Waiting[S]]]) -> list[list[S]]:
        held = sum(self.metrics.micro_batches - one.since for row in rows for one in row)
        self.metrics.add([[one.length for one in row] for row in rows], held)
        return [[one.sample for one in row] for row in rows]


def _length(one: _Waiting[Any]) -> int:
    return one.length


class StridedBatcher(_Batcher[S]):
    """Micro-batches of `microbatch_size` samples dealt round the ranks, whatever their lengths: the baseline.

    Takes and yields what `FixedCountBatcher` does.
    """

    def __init__(
        self, samples: Iterable[S], num_processes: int, microbatch_size: int, *, length_of: LengthOf = tokens_of
    ) -> None:
        if num_processes < 1 or microbatch_size < num_processes:
            raise DataError(
                "Every rank needs a sample in each micro-batch, so 1 <= num_processes <= microbatch_size: "
                f"{num_processes=}, {microbatch_size=}."
            )
        super().__init__(samples, num_processes, length_of)
        self.microbatch_size = microbatch_size

    def _micro_batches(self) -> Iterator[list[list[S]]]:
        waiting: list[_Waiting[S]] = []
        for one in self._arriving():
            waiting.append(one)
            if len(waiting) == self.microbatch_size:
                yield self._handed_out(self._divided(waiting))
                waiting = []
        if waiting:
            yield self._handed_out(self._divided(waiting))

    def _divided(self, waiting: list[_Waiting[S]]) -> list[list[_Waiting[S]]]:
        return [waiting[row :: self.num_processes] for row in range(self.num_processes)]


class FixedCountBatcher(StridedBatcher[S]):
    """Micro-batches of `microbatch_size` samples, divided into one row per rank by their squared lengths.

    Iterating yields `rows[rank]`, lists of samples, never less even than dealing longest-first. The last micro-batch
    holds what is left; only there a row can be empty (a plan made by `Plan.from_bins` puts a filler there).

    Args:
        samples: any iterable; read as far as needed.
        num_processes: data-parallel ranks.
        microbatch_size: samples per micro-batch, over all ranks; at least `num_processes`.
        length_of: tokens of a sample.

    Raises:
        DataError: for numbers below 1 or fewer samples than ranks; while iterating, for a sample without tokens.
    """

    def _divided(self, waiting: list[_Waiting[S]]) -> list[list[_Waiting[S]]]:
        return even_rows(waiting, self.num_processes, _length)


class TokenBudgetBatcher(_Batcher[S]):
    """Micro-batches of as many samples as fit: every row stays within `token_budget` tokens.

    Samples are taken in the order of their arrival while they fit, as many as make even rows, and divided at once.
    Those that were taken back begin the next micro-batch. Every row holds a sample; only in the last micro-batch,
    which holds what is left, rows can be empty (a plan made by `Plan.from_bins` puts fillers there).

    With `window` > 1 so many micro-batches are formed of what arrives for all of them: fuller and more even, of samples
    that wait for up to `window` - 1 others. `metrics` holds how long. What has grown too old meanwhile is left
    out and counted, so that no bound on the age of samples is broken by waiting.

    Args:
        samples: any iterable; read as far as needed.
        num_processes: data-parallel ranks.
        token_budget: tokens per row.
        length_of: tokens of a sample.
        oversize: a sample longer than the budget is an "error", or is placed "alone" in a row above it.
        window: micro-batches that are formed together; 1 looks no further than the next.
        is_fresh: whether a sample may still be trained on; asked again before its micro-batch is handed out.

    Raises:
        DataError: for numbers below 1 or an unknown policy; while iterating, for a sample without tokens or,
            under "error", above the budget.
    """

    def __init__(
        self,
        samples: Iterable[S],
        num_processes: int,
        token_budget: int,
        *,
        length_of: LengthOf = tokens_of,
        oversize: OversizePolicy = "error",
        window: int = 1,
        is_fresh: Callable[[S], bool] | None = None,
    ) -> None:
        if num_processes < 1 or token_budget < 1 or window < 1:
            raise DataError(
                f"num_processes, token_budget and window are at least 1: {num_processes=}, {token_budget=}, {window=}."
            )
        if oversize not in get_args(OversizePolicy):
            raise DataError(f"oversize is one of {', '.join(get_args(OversizePolicy))}; got {oversize!r}.")
        super().__init__(samples, num_processes, length_of)
        self.token_budget = token_budget
        self.oversize = oversize
        self.window = window
        self.is_fresh = is_fresh

    def _admit(self, number: int, length: int) -> None:
        if length > self.token_budget and self.oversize == "error":
            raise DataError(
                f"Sample {number} has {length} tokens, more than token_budget={self.token_budget}: raise the "
                'budget, shorten the sample, or pass oversize="alone".'
            )

    def _micro_batches(self) -> Iterator[list[list[S]]]:
        arriving, waiting = self._arriving(), deque[_Waiting[S]]()
        while True:
            full = self._gather(arriving, waiting)
            if not waiting:
                return
            formed = self._formed(waiting) if full else self._rest(waiting)
            for k, rows in enumerate(formed):
                if not all(self._fresh(one) for row in rows for one in row):
                    self._put_back(formed[k:], waiting)
                    break
                yield self._handed_out(rows)

    def _put_back(self, formed: list[list[list[_Waiting[S]]]], waiting: deque[_Waiting[S]]) -> None:
        """What is not yet handed out waits again, in the order of its arrival, less what is too old."""
        back = [one for rows in formed for row in rows for one in row]
        fresh = [one for one in back if self._fresh(one)]
        self.metrics.stale_samples += len(back) - len(fresh)
        waiting.extendleft(sorted(fresh, key=lambda one: one.number, reverse=True))

    def _fresh(self, one: _Waiting[S]) -> bool:
        return self.is_fresh is None or self.is_fresh(one.sample)

    def _gather(self, arriving: Iterator[_Waiting[S]], waiting: deque[_Waiting[S]]) -> bool:
        """Reads until the window is full; False when nothing more arrives."""
        room, needed = self._room, self.num_processes * self.window
        total = sum(map(self._taken, waiting))
        while total < room and (total <= FULL * room or len(waiting) < needed):
            one = next(arriving, None)
            if one is None:
                return False
            waiting.append(one)
            total += self._taken(one)
        return True

    @property
    def _room(self) -> int:
        return self.num_processes * self.window * self.token_budget

    def _taken(self, one: _Waiting[S]) -> int:
        """Of a row's budget: all of it where the sample is above."""
        return min(one.length, self.token_budget)

    def _formed(self, waiting: deque[_Waiting[S]]) -> list[list[list[_Waiting[S]]]]:
        """A window of micro-batches of the first that wait, as many as make even rows; the others go on waiting."""
        some = list(waiting)
        totals = list(accumulate(map(self._taken, some)))
        best, found, enough = None, float("inf"), 0.0
        for count in range(bisect_right(totals, self._room), self.num_processes * self.window - 1, -1):
            if totals[count - 1] < enough or found <= EVEN:
                break
            formed = self._divided(some[:count], self.window)
            if formed is None:
                continue
            enough = enough or YIELD * totals[count - 1]
            uneven = sum(imbalance(lengths_in(rows, _length)) for rows in formed) / self.window
            if best is None or uneven < found:
                best, found, taken = formed, uneven, count
        assert best is not None, "one sample for every row fits"
        for _ in range(taken):
            waiting.popleft()
        return best

    def _rest(self, waiting: deque[_Waiting[S]]) -> list[list[list[_Waiting[S]]]]:
        """All that is left, in as few micro-batches as hold it."""
        some = list(waiting)
        waiting.clear()
        for count in range(1, len(some) + 1):
            formed = self._divided(some, count)
            if formed is not None:
                return formed
        raise AssertionError("a row for every sample holds them all")

    def _divided(self, samples: list[_Waiting[S]], micro_batches: int) -> list[list[list[_Waiting[S]]]] | None:
        return divide(
            samples,
            self.num_processes,
            token_budget=self.token_budget,
            micro_batches=micro_batches,
            length_of=_length,
        )


def rollout_batcher(
    samples: Iterable[S], num_processes: int, *, token_budget: int, microbatch_size: int, **options: Any
) -> _Batcher[S]:
    """The batcher that TRL's settings name: by `token_budget`, or where it is 0 or less by `microbatch_size`.

    `options` are those of `TokenBudgetBatcher`; of a fixed count, `length_of` alone.
    """
    if token_budget > 0:
        return TokenBudgetBatcher(samples, num_processes, token_budget, **options)
    return FixedCountBatcher(samples, num_processes, microbatch_size, **options)
