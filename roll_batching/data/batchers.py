"""Online batchers for samples that arrive one by one: one row per data-parallel rank, balanced in L^2.

They are TRL's: a fixed number of samples per micro-batch, or a budget of tokens per row. What differs: what
is left at the end is handed out too, and a sample above the budget follows a stated policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar, get_args

from roll_batching.errors import DataError

S = TypeVar("S")
OversizePolicy = Literal["error", "alone"]


def balance_by_squared_length(
    samples: Sequence[S],
    rows: int,
    length_of: Callable[[S], int] = len,  # type: ignore[assignment]
) -> list[list[S]]:
    """Deal samples to `rows` rows, longest first, each to the row with the smallest sum of L^2.

    Equal lengths keep their order, equal rows are taken in order.
    """
    order = sorted(samples, key=length_of, reverse=True)
    result: list[list[S]] = [[] for _ in range(rows)]
    loads = [0] * rows
    for sample in order:
        row = min(range(rows), key=loads.__getitem__)
        result[row].append(sample)
        loads[row] += length_of(sample) ** 2
    return result


class FixedCountBatcher(Generic[S]):
    """Micro-batches of `microbatch_size` samples, dealt to one row per rank by their squared lengths.

    Iterating yields `rows[rank]`, lists of samples. The last micro-batch holds what is left; only there a row
    can be empty (a plan made by `Plan.from_bins` puts a filler there).

    Args:
        samples: any iterable; read as far as needed.
        num_ranks: data-parallel ranks.
        microbatch_size: samples per micro-batch, over all ranks; at least `num_ranks`.
        length_of: tokens of a sample.

    Raises:
        DataError: for numbers below 1 or fewer samples than ranks; while iterating, for a sample without tokens.
    """

    def __init__(
        self,
        samples: Iterable[S],
        *,
        num_ranks: int,
        microbatch_size: int,
        length_of: Callable[[S], int] = len,  # type: ignore[assignment]
    ) -> None:
        if num_ranks < 1 or microbatch_size < num_ranks:
            raise DataError(
                "Every rank needs a sample in each micro-batch, so 1 <= num_ranks <= microbatch_size: "
                f"{num_ranks=}, {microbatch_size=}."
            )
        self.samples = samples
        self.num_ranks = num_ranks
        self.microbatch_size = microbatch_size
        self.length_of = length_of

    def __iter__(self) -> Iterator[list[list[S]]]:
        waiting: list[S] = []
        for number, sample in enumerate(self.samples):
            _checked_length(number, sample, self.length_of)
            waiting.append(sample)
            if len(waiting) == self.microbatch_size:
                yield balance_by_squared_length(waiting, self.num_ranks, self.length_of)
                waiting = []
        if waiting:
            yield balance_by_squared_length(waiting, self.num_ranks, self.length_of)


class TokenBudgetBatcher(Generic[S]):
    """Micro-batches of as many samples as fit: every row stays within `token_budget` tokens.

    Each sample joins, as it arrives, the row with the smallest sum of L^2 among those with room (the first of
    equals). When no row has room, the micro-batch is handed out and the sample begins the next. Every row of
    it then holds a sample, since an empty row has room; only in the last micro-batch, which holds what is
    left, rows can be empty (a plan made by `Plan.from_bins` puts fillers there).

    Args:
        samples: any iterable; read as far as needed.
        num_ranks: data-parallel ranks.
        token_budget: tokens per row.
        length_of: tokens of a sample.
        oversize: a sample longer than the budget is an "error", or is placed "alone" in a row above it.

    Raises:
        DataError: for numbers below 1 or an unknown policy; while iterating, for a sample without tokens or,
            under "error", above the budget.
    """

    def __init__(
        self,
        samples: Iterable[S],
        *,
        num_ranks: int,
        token_budget: int,
        length_of: Callable[[S], int] = len,  # type: ignore[assignment]
        oversize: OversizePolicy = "error",
    ) -> None:
        if num_ranks < 1 or token_budget < 1:
            raise DataError(f"num_ranks and token_budget are at least 1: {num_ranks=}, {token_budget=}.")
        if oversize not in get_args(OversizePolicy):
            raise DataError(f"oversize is one of {', '.join(get_args(OversizePolicy))}; got {oversize!r}.")
        self.samples = samples
        self.num_ranks = num_ranks
        self.token_budget = token_budget
        self.length_of = length_of
        self.oversize = oversize

    def __iter__(self) -> Iterator[list[list[S]]]:
        rows: list[list[S]] = [[] for _ in range(self.num_ranks)]
        tokens, loads = [0] * self.num_ranks, [0] * self.num_ranks
        for number, sample in enumerate(self.samples):
            length = _checked_length(number, sample, self.length_of)
            if length > self.token_budget and self.oversize == "error":
                raise DataError(
                    f"Sample {number} has {length} tokens, more than token_budget={self.token_budget}: raise the "
                    'budget, shorten the sample, or pass oversize="alone".'
                )
            room = max(self.token_budget, length)  # above the budget only an empty row has room
            fits = [row for row in range(self.num_ranks) if tokens[row] + length <= room]
            if not fits:
                yield rows
                rows = [[] for _ in range(self.num_ranks)]
                tokens, loads = [0] * self.num_ranks, [0] * self.num_ranks
                fits = list(range(self.num_ranks))
            row = min(fits, key=loads.__getitem__)
            rows[row].append(sample)
            tokens[row] += length
            loads[row] += length * length
        if any(rows):
            yield rows


def _checked_length(number: int, sample: S, length_of: Callable[[S], int]) -> int:
    length = length_of(sample)
    if length < 1:
        raise DataError(f"Sample {number} has no tokens (length {length}).")
    return length
