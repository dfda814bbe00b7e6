"""`LengthTable`: ids, lengths and locations of all ranks' samples, the input of planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from roll_batching.distributed import digest
from roll_batching.errors import DataError
from roll_batching.planning.prefixes import SharedPrefixes
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.exchange_group import ExchangeGroup
from roll_batching.samples.token_fields import inputs_of, token_codes


def require_batch(what: str, value: object, name: str = "batch") -> None:
    """Raises `DataError` unless `value`, the argument `name` of the operation `what`, is a SampleBatch."""
    if not isinstance(value, SampleBatch):
        raise DataError(f"{what} takes a SampleBatch as {name}; got {type(value).__name__}.")


@dataclass(frozen=True, eq=False)
class LengthTable:
    """One row per sample of all ranks: three int64 arrays of one length.

    Raises `DataError` for arrays of different lengths, or an id that occurs twice.
    """

    ids: np.ndarray
    """int64 `[n]`: global ids, unique."""

    lengths: np.ndarray
    """int64 `[n]`: tokens per sample."""

    location: np.ndarray
    """int64 `[n]`: the data-parallel rank that holds the sample now, not a constraint (`home_rank`) on the plan."""

    prefixes: SharedPrefixes | None = None
    """Prefixes that the samples share (`find_shared_prefixes`); None: plans share nothing."""

    def __post_init__(self) -> None:
        for name in ("ids", "lengths", "location"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        if not (self.ids.shape == self.lengths.shape == self.location.shape and self.ids.ndim == 1):
            shapes = self.ids.shape, self.lengths.shape, self.location.shape
            raise DataError(f"ids, lengths and location must be one-dimensional and of one length: {shapes}.")
        if self.prefixes is not None and len(self.prefixes) != self.ids.size:
            raise DataError(f"prefixes describe {len(self.prefixes)} samples: find those of all {self.ids.size}.")
        self._refuse_repeated_ids()

    def _refuse_repeated_ids(self) -> None:
        order = np.argsort(self.ids, kind="stable")
        ids = self.ids[order]
        repeated = np.flatnonzero(ids[1:] == ids[:-1])
        if repeated.size:
            first, second = order[repeated[0]], order[repeated[0] + 1]
            raise DataError(
                f"Sample id {self.ids[first]} is held twice, by data-parallel ranks "
                f"{self.location[first]} and {self.location[second]} ({repeated.size} such ids in all). "
                "Ids must be unique over all ranks: number_globally(batch) gives such ids."
            )

    @classmethod
    def of(cls, batch: SampleBatch, rank: int = 0) -> LengthTable:
        """The table of one batch, all of which `rank` holds. Not collective."""
        location = np.full(len(batch), rank, dtype=np.int64)
        return cls(batch.ids.numpy().copy(), batch.lengths.numpy().copy(), location)

    def __len__(self) -> int:
        return self.ids.size

    def select(self, index: Any) -> LengthTable:
        """The rows at `index` (a mini-batch, say), in that order."""
        index = np.asarray(index)
        if index.dtype != np.bool_:
            index = index.astype(np.int64)
        prefixes = None if self.prefixes is None else self.prefixes.select(np.arange(self.ids.size)[index])
        return LengthTable(self.ids[index], self.lengths[index], self.location[index], prefixes)


def gather_lengths(batch: SampleBatch, group: Any = None) -> LengthTable:
    """The length table of all ranks' samples, ordered by data-parallel rank, then row. Collective.

    Args:
        batch: this rank's samples; may be empty.
        group: by default Megatron's data-parallel group, else all processes, else this one alone.

    Raises:
        RankError: on all ranks alike (`DataError` in a single process): an id that two samples have,
            an argument that is not a `SampleBatch` on any rank, ranks of a replica with different samples.
    """
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("gather_lengths"):
        require_batch("gather_lengths", batch)
    counts = _gather_number(dp_group, len(batch))
    # all_gather needs one shape on all ranks: each is padded to the largest batch.
    rows = torch.zeros(2, int(counts.max()), dtype=torch.int64)
    rows[0, : len(batch)] = batch.ids
    rows[1, : len(batch)] = batch.lengths
    valid = torch.arange(rows.shape[1]) < counts[:, None]
    ids, lengths = dp_group.all_gather(rows).unbind(1)
    location = torch.arange(dp_group.size).repeat_interleave(counts)
    with dp_group.consensus("gather_lengths") as facts:
        table = LengthTable(ids[valid].numpy(), lengths[valid].numpy(), location.numpy())
        facts.equal(
            "the table of all samples",
            digest(table.ids.tobytes(), table.lengths.tobytes()),
            "Give all ranks of a replica the same samples",
        )
    return table


def find_shared_prefixes(batch: SampleBatch, table: LengthTable, group: Any = None) -> LengthTable:
    """`table` with the prefixes that its samples share: all inputs of the model agree in them. Collective.

    Every rank gets the `token_codes` of all samples: 4 bytes per token, or 8 where tokens have more than their ids.

    Args:
        batch: this rank's samples, with the field `input_ids` and all others of `MODEL_INPUTS` that a pass will get.
        table: `gather_lengths` of that batch, its rows in any order.
        group: as for `gather_lengths`.

    Raises:
        RankError: on all ranks alike (`DataError` in a single process): for a batch without token ids, or a table of
            other samples.
    """
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("find_shared_prefixes") as facts:
        require_batch("find_shared_prefixes", batch)
        if "input_ids" not in batch:
            raise DataError("find_shared_prefixes compares tokens: the batch has no field input_ids, which it needs.")
        facts.equal("the fields that the model reads", sorted(inputs_of(batch).fields), "Give all ranks the same")
        codes = torch.from_numpy(token_codes(batch))
    counts, samples = _gather_number(dp_group, codes.numel()), _gather_number(dp_group, len(batch))
    tokens = dp_group.all_gather(torch.nn.functional.pad(codes, (0, int(counts.max()) - codes.numel())))
    rows = torch.zeros(2, int(samples.max()), dtype=torch.int64)
    rows[0, : len(batch)], rows[1, : len(batch)] = batch.ids, batch.lengths
    gathered = dp_group.all_gather(rows)
    by_id: dict[int, np.ndarray] = {}
    for rank_tokens, (rank_ids, lengths), count in zip(tokens, gathered, samples.tolist(), strict=True):
        parts = np.split(rank_tokens.numpy(), np.cumsum(lengths[:count].numpy()))
        by_id.update(zip(rank_ids[:count].tolist(), parts, strict=False))
    with dp_group.consensus("find_shared_prefixes"):
        missing = [sample for sample in table.ids.tolist() if sample not in by_id]
        if missing:
            raise DataError(f"No rank's batch holds samples {missing[:8]} of the table: gather it from these batches.")
    flat = np.concatenate([by_id[sample] for sample in table.ids.tolist()]) if len(table) else np.zeros(0, np.int32)
    if flat.dtype != np.int32:  # digests: small numbers instead
        flat = np.unique(flat, return_inverse=True)[1]
    return replace(table, prefixes=SharedPrefixes.of(flat, table.lengths))


def number_globally(batch: SampleBatch, group: Any = None) -> SampleBatch:
    """The same samples with ids 0, 1, 2, ... over all ranks, by data-parallel rank, then row. Collective."""
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("number_globally"):
        require_batch("number_globally", batch)
    counts = _gather_number(dp_group, len(batch))
    first = int(counts[: dp_group.rank].sum())
    return batch.with_ids(torch.arange(first, first + len(batch)))


def gather_bins(batch: SampleBatch, sizes: Sequence[int], group: Any = None) -> list[list[list[int]]]:
    """The bins of `Plan.from_bins` for micro-batches that each rank has formed itself. Collective.

    Args:
        batch: this rank's samples, micro-batch after micro-batch.
        sizes: samples of each micro-batch of this rank.
        group: as for `gather_lengths`.

    Returns:
        `bins[dp_rank][k]`, row numbers of the table that `gather_lengths(batch)` gives. Ranks with fewer
        micro-batches than others get empty ones.

    Raises:
        RankError: on all ranks alike (`DataError` in a single process): when any rank's sizes are not those
            of its batch.
    """
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("gather_bins"):
        require_batch("gather_bins", batch)
        local = torch.tensor(list(sizes), dtype=torch.int64)
        if bool((local < 0).any()) or int(local.sum()) != len(batch):
            raise DataError(f"Micro-batches of {list(sizes)} samples must add up to the batch's {len(batch)}.")
    counts = _gather_number(dp_group, local.numel())
    per_rank = dp_group.all_gather(torch.nn.functional.pad(local, (0, int(counts.max()) - local.numel())))
    ends = per_rank.flatten().cumsum(0).view_as(per_rank)
    return [
        [list(range(end - size, end)) for size, end in zip(rank_sizes.tolist(), rank_ends.tolist(), strict=True)]
        for rank_sizes, rank_ends in zip(per_rank, ends, strict=True)
    ]


def _gather_number(dp_group: ExchangeGroup, number: int) -> torch.Tensor:
    """int64 `[size]` on the host: every rank's `number`."""
    return dp_group.all_gather(torch.tensor(number))
