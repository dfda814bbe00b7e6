"""Online batchers for samples that arrive one by one: each micro-batch has a row per data-parallel rank.

Rows are even in the sum of squared lengths. The batchers are TRL's: a fixed number of samples per micro-batch, or a
token budget per row. Differences: a micro-batch that closes is divided again, all of its samples at once; remaining
samples at the end are yielded too; a sample above the budget follows `oversize`; and the batcher of a budget can look
ahead over several micro-batches.
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
from roll_batching.jobs.streams.rows import LengthOf, divide_into_rows, even_rows, imbalance, row_lengths, tokens_of

S = TypeVar("S")
OversizePolicy = Literal["error", "alone"]

EVEN_ENOUGH = 0.02
"""Imbalance up to which no sample is given back for the next micro-batch."""
FULL_ENOUGH = 0.98
"""Share of the token budget at which a micro-batch closes: the rest is room to even out the rows."""
MIN_FILL = 0.95
"""Share of the tokens that would fit which a micro-batch keeps while samples are given back for evenness."""


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
        """Counts a micro-batch; `rows`: lengths by row, `held`: sum over samples of micro-batches waited through."""
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
    """Order of arrival."""
    sample: S
    length: int
    arrived_after: int
    """Micro-batches yielded before it arrived."""


class _Batcher(IterableDataset, Generic[S]):  # type: ignore[type-arg]
    """Base of the batchers: reads samples, yields micro-batches as `rows[rank]`, lists of samples.

    One process iterates, since a queue gives each sample once: with a DataLoader, `num_workers=0`.
    """

    def __init__(self, dataset: Iterable[S], num_processes: int, length_of: LengthOf) -> None:
        self.dataset = dataset
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
        for number, sample in enumerate(self.dataset):
            length = self.length_of(sample)
            if length < 1:
                raise DataError(f"Sample {number} has no tokens (length {length}): leave it out.")
            self._check_length(number, length)
            yield _Waiting(number, sample, length, self.metrics.micro_batches)

    def _check_length(self, number: int, length: int) -> None:
        """Raises DataError for a sample that no micro-batch can hold."""

    def _release(self, rows: list[list[_Waiting[S]]]) -> list[list[S]]:
        held = sum(self.metrics.micro_batches - entry.arrived_after for row in rows for entry in row)
        self.metrics.add([[entry.length for entry in row] for row in rows], held)
        return [[entry.sample for entry in row] for row in rows]


def _length(entry: _Waiting[Any]) -> int:
    return entry.length


class StridedBatcher(_Batcher[S]):
    """Micro-batches of `microbatch_size` samples dealt to the ranks in turn, without balancing: the baseline.

    Arguments and results are those of `FixedCountBatcher`.
    """

    def __init__(
        self, dataset: Iterable[S], num_processes: int, microbatch_size: int, *, length_of: LengthOf = tokens_of
    ) -> None:
        if num_processes < 1 or microbatch_size < num_processes:
            raise DataError(
                "Every rank needs a sample in each micro-batch, so 1 <= num_processes <= microbatch_size: "
                f"{num_processes=}, {microbatch_size=}."
            )
        super().__init__(dataset, num_processes, length_of)
        self.microbatch_size = microbatch_size

    def _micro_batches(self) -> Iterator[list[list[S]]]:
        waiting: list[_Waiting[S]] = []
        for entry in self._arriving():
            waiting.append(entry)
            if len(waiting) == self.microbatch_size:
                yield self._release(self._divide(waiting))
                waiting = []
        if waiting:
            yield self._release(self._divide(waiting))

    def _divide(self, waiting: list[_Waiting[S]]) -> list[list[_Waiting[S]]]:
        return [waiting[row :: self.num_processes] for row in range(self.num_processes)]


class FixedCountBatcher(StridedBatcher[S]):
    """Micro-batches of `microbatch_size` samples, divided into one row per rank by their squared lengths.

    Iterating yields `rows[rank]`, lists of samples, never less even than dealing longest-first. The last micro-batch
    holds the remaining samples; only there a row can be empty (`Plan.from_bins` puts a filler there).

    Args:
        dataset: any iterable of samples; read as far as needed.
        num_processes: data-parallel ranks.
        microbatch_size: samples per micro-batch, over all ranks; at least `num_processes`.
        length_of: tokens of a sample.

    Raises:
        DataError: for numbers below 1 or fewer samples than ranks; while iterating, for a sample without tokens.
    """

    def _divide(self, waiting: list[_Waiting[S]]) -> list[list[_Waiting[S]]]:
        return even_rows(waiting, self.num_processes, _length)


class TokenBudgetBatcher(_Batcher[S]):
    """Micro-batches of as many samples as fit: every row stays within `token_budget` tokens.

    Samples are taken in the order of their arrival while they fit; the last ones are given back where that makes rows
    more even, and the others divided all at once. Every row holds a sample; only in the last micro-batch, which holds
    the remaining samples, rows can be empty (`Plan.from_bins` puts fillers there).

    With `window` > 1 so many micro-batches are formed together: fuller and more even, but a sample waits for up to
    `window` - 1 others (`metrics` has the mean). A sample that is no longer fresh by then is dropped and counted, so
    that waiting never breaks a bound on staleness.

    Args:
        dataset: any iterable of samples; read as far as needed.
        num_processes: data-parallel ranks.
        token_budget: tokens per row.
        length_of: tokens of a sample.
        oversize: a sample longer than the budget is an "error", or is placed "alone" in a row above it.
        window: micro-batches that are formed together; 1: no look-ahead.
        is_fresh: whether a sample may still be trained on; called again before its micro-batch is yielded.

    Raises:
        DataError: for numbers below 1 or an unknown policy; while iterating, for a sample without tokens or,
            under "error", above the budget.
    """

    def __init__(
        self,
        dataset: Iterable[S],
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
        super().__init__(dataset, num_processes, length_of)
        self.token_budget = token_budget
        self.oversize = oversize
        self.window = window
        self.is_fresh = is_fresh

    def _check_length(self, number: int, length: int) -> None:
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
            formed = self._form_window(waiting) if full else self._form_rest(waiting)
            for k, rows in enumerate(formed):
                if not all(self._is_fresh(entry) for row in rows for entry in row):
                    # Back to the waiting samples, in the order of arrival; samples that are too old are dropped.
                    back = [sample for rows in formed[k:] for row in rows for sample in row]
                    fresh = [sample for sample in back if self._is_fresh(sample)]
                    self.metrics.stale_samples += len(back) - len(fresh)
                    waiting.extendleft(sorted(fresh, key=lambda sample: sample.number, reverse=True))
                    break
                yield self._release(rows)

    def _is_fresh(self, entry: _Waiting[S]) -> bool:
        return self.is_fresh is None or self.is_fresh(entry.sample)

    def _gather(self, arriving: Iterator[_Waiting[S]], waiting: deque[_Waiting[S]]) -> bool:
        """Reads samples until the window is full; returns False at the end of the samples."""
        room, needed = self._room, self.num_processes * self.window
        total = sum(map(self._row_tokens, waiting))
        while total < room and (total <= FULL_ENOUGH * room or len(waiting) < needed):
            entry = next(arriving, None)
            if entry is None:
                return False
            waiting.append(entry)
            total += self._row_tokens(entry)
        return True

    @property
    def _room(self) -> int:
        return self.num_processes * self.window * self.token_budget

    def _row_tokens(self, entry: _Waiting[S]) -> int:
        """Tokens of a row's budget that the sample takes; a longer sample takes the whole budget."""
        return min(entry.length, self.token_budget)

    def _form_window(self, waiting: deque[_Waiting[S]]) -> list[list[list[_Waiting[S]]]]:
        """Forms micro-batches from the oldest waiting samples, of fewer samples if that evens out the rows."""
        candidates = list(waiting)
        totals = list(accumulate(map(self._row_tokens, candidates)))
        best, best_imbalance, min_tokens = None, float("inf"), 0.0
        for count in range(bisect_right(totals, self._room), self.num_processes * self.window - 1, -1):
            if totals[count - 1] < min_tokens or best_imbalance <= EVEN_ENOUGH:
                break
            formed = self._divide_window(candidates[:count], self.window)
            if formed is None:
                continue
            min_tokens = min_tokens or MIN_FILL * totals[count - 1]
            mean_imbalance = sum(imbalance(row_lengths(rows, _length)) for rows in formed) / self.window
            if best is None or mean_imbalance < best_imbalance:
                best, best_imbalance, best_count = formed, mean_imbalance, count
        assert best is not None, "one sample per row always fits"
        for _ in range(best_count):
            waiting.popleft()
        return best

    def _form_rest(self, waiting: deque[_Waiting[S]]) -> list[list[list[_Waiting[S]]]]:
        """Forms micro-batches of all remaining samples, as few as can hold them."""
        remaining = list(waiting)
        waiting.clear()
        for count in range(1, len(remaining) + 1):
            formed = self._divide_window(remaining, count)
            if formed is not None:
                return formed
        raise AssertionError("one micro-batch per sample always fits")

    def _divide_window(self, samples: list[_Waiting[S]], micro_batches: int) -> list[list[list[_Waiting[S]]]] | None:
        return divide_into_rows(
            samples,
            self.num_processes,
            token_budget=self.token_budget,
            micro_batches=micro_batches,
            length_of=_length,
        )


def rollout_batcher(
    dataset: Iterable[S], num_processes: int, *, token_budget: int = 0, microbatch_size: int, **options: Any
) -> _Batcher[S]:
    """The batcher of TRL's settings: by `token_budget`, or by `microbatch_size` where the budget is 0 or less.

    `options` are those of `TokenBudgetBatcher`; a fixed count takes `length_of` only.
    """
    if token_budget > 0:
        return TokenBudgetBatcher(dataset, num_processes, token_budget, **options)
    return FixedCountBatcher(dataset, num_processes, microbatch_size, **options)
