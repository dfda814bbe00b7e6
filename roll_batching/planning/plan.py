"""The plan: which rank computes which samples in which micro-batch. All later steps read it.

A plan keeps flat arrays (one entry per placed sample, or per micro-batch in rank-major order). It makes `MicroBatch`
objects of a rank on first use, so that a plan of a million samples costs no more than its arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, as_ints, kind_of
from roll_batching.planning.assemble import assemble_bins
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.invariants import check_plan
from roll_batching.planning.plan_arrays import ARRAYS, DroppedSample, PackBlocks, PackSlices, PlanArrays
from roll_batching.planning.prefixes import SharedPrefixes
from roll_batching.planning.problem import build_problem
from roll_batching.planning.report import PlanReport, make_report

NO_CUTS: Ints = np.zeros(0, dtype=np.int64)
NO_CUTS.setflags(write=False)
FORMAT = 3
"""Version of the format of `Plan.to_dict`."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of one forward and backward pass of one DP rank, or of a block of ranks."""

    samples: Ints
    """Indices into the plan's `lengths`, in pack order; empty for a filler."""
    lengths: Ints
    """Tokens used of each sample (fewer than its length when truncated)."""
    shared: Ints
    """Leading positions of each sample that it takes from the sample before it; 0: none."""
    slots: Ints
    """Tokens that each sample occupies: its aligned length without shared positions, or the row length of the
    rectangle."""
    tokens: int
    """Tokens that the micro-batch computes, tail filler included, before CP divides them."""
    rows: int
    """Rows of a rectangle; 1 for a pack."""
    cp_size: int
    """Context-parallel size."""
    ranks: range
    """DP ranks that compute it together: one, or with a context-parallel size per pack `cp_size` ranks."""
    cuts: Ints
    """First token of each of its slices but the first, counted in the pack; empty: computed as a whole."""
    is_filler: bool
    """Whether it holds no sample: computed so that all ranks have the same number, never passed to a loss."""

    @property
    def padded_length(self) -> int:
        """Tokens of one row: `tokens / rows`."""
        return self.tokens // self.rows

    def __len__(self) -> int:
        return len(self.samples)


class _Ranks(Sequence[tuple[MicroBatch, ...]]):
    """`micro_batches[dp_rank][k]`, made rank by rank on first use."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks: dict[int, tuple[MicroBatch, ...]] = {}

    def __len__(self) -> int:
        return self._plan.constraints.dp_size

    @overload
    def __getitem__(self, rank: int) -> tuple[MicroBatch, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[tuple[MicroBatch, ...]]: ...
    def __getitem__(self, rank: int | slice) -> tuple[MicroBatch, ...] | list[tuple[MicroBatch, ...]]:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(len(self)))]
        rank = range(len(self))[rank]
        if rank not in self._ranks:
            self._ranks[rank] = self._plan._micro_batches_of(rank)
        return self._ranks[rank]

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self[rank] for rank in range(len(self)))


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanArrays):
    """A valid plan, made and checked by `plan_step`, `Plan.from_bins` or `Plan.from_dict`."""

    @cached_property
    def micro_batches(self) -> Sequence[tuple[MicroBatch, ...]]:
        """`micro_batches[dp_rank][k]`; equal objects on every access."""
        return _Ranks(self)

    @cached_property
    def report(self) -> PlanReport:
        """Tokens before and after, fill of the cap, imbalance, fillers."""
        return make_report(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on (not `location` and costs), 32 hex digits."""
        digest = hashlib.sha256()
        digest.update(json.dumps([FORMAT, self.constraints.to_dict(), self.num_micro_batches]).encode())
        digest.update(str(self.group_size).encode())
        for array in (
            self.lengths,
            self.ids,
            self.used,
            self.samples,
            self.slots,
            self.offsets,
            self.tokens,
            self.rows,
        ):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        if self.blocks is not None:
            for array in (self.blocks.first_ranks, self.blocks.cp_sizes):
                digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        if self.slices is not None:
            for array in (self.slices.offsets, self.slices.cuts):
                digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        if self.shared.any():
            digest.update(np.ascontiguousarray(self.shared, dtype="<i8").tobytes())
        return digest.hexdigest()[:32]

    def __getstate__(self) -> dict[str, Any]:
        """Fields only, for pickling: cached properties are computed again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.samples)} samples, dp_size={self.constraints.dp_size}, "
            f"num_micro_batches={self.num_micro_batches}, mode={self.constraints.mode!r}, "
            f"fingerprint={self.fingerprint[:8]})"
        )

    def rank_samples(self, dp_rank: int) -> Ints:
        """int64: sample indices of one rank, by micro-batch, in pack order.

        With a context-parallel size per pack a sample is one of each rank that computes its pack.
        """
        rank = range(self.constraints.dp_size)[dp_rank]
        if self.blocks is not None:
            return self._samples_of(self.blocks.lists[rank])
        first = rank * self.num_micro_batches
        return self.samples[self.offsets[first] : self.offsets[first + self.num_micro_batches]]

    def counted_samples(self, dp_rank: int) -> Ints:
        """Samples of `rank_samples` that this rank counts (int64); each sample is counted on one rank.

        With a context-parallel size per pack, the first rank of a pack counts its samples.
        """
        if self.blocks is None:
            return self.rank_samples(dp_rank)
        rank = range(self.constraints.dp_size)[dp_rank]
        return self._samples_of([m for m in self.blocks.lists[rank] if self.blocks.first_ranks[m] == rank])

    def _samples_of(self, packs: list[int]) -> Ints:
        parts = [self.samples[self.offsets[m] : self.offsets[m + 1]] for m in packs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def shard(self, batch: Any, dp_rank: int) -> Any:
        """Samples of one rank, in plan order, from a batch with `select_ids`."""
        return batch.select_ids(self.ids[self.rank_samples(dp_rank)])

    def _micro_batches_of(self, rank: int) -> tuple[MicroBatch, ...]:
        """Objects for the micro-batches of `rank`, as views of the plan's arrays."""
        if self.blocks is None:
            first, sizes = rank * self.num_micro_batches, None
            packs: Sequence[int] = range(first, first + self.num_micro_batches)
        else:
            packs, sizes = self.blocks.lists[rank], self.blocks.cp_sizes
        micro_batches = []
        for m in packs:
            cp_size = self.constraints.cp_size if sizes is None else int(sizes[m])
            first_rank = rank if self.blocks is None else int(self.blocks.first_ranks[m])
            start, end = int(self.offsets[m]), int(self.offsets[m + 1])
            samples = self.samples[start:end]
            lengths = self.used[samples]
            lengths.setflags(write=False)
            micro_batches.append(
                MicroBatch(
                    samples=samples,
                    lengths=lengths,
                    shared=self.shared[start:end],
                    slots=self.slots[start:end],
                    tokens=int(self.tokens[m]),
                    rows=int(self.rows[m]),
                    cp_size=cp_size,
                    ranks=range(first_rank, first_rank + (1 if self.blocks is None else cp_size)),
                    cuts=NO_CUTS if self.slices is None else self.slices.of(m),
                    is_filler=start == end,
                )
            )
        return tuple(micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `Plan.from_dict` restores an equal plan."""
        return {
            "format": FORMAT,
            "constraints": self.constraints.to_dict(),
            "num_micro_batches": self.num_micro_batches,
            "group_size": self.group_size,
            "location": None if self.location is None else self.location.tolist(),
            "dropped": [[d.index, d.id, d.length, d.reason] for d in self.dropped],
            "fingerprint": self.fingerprint,
            "blocks": None if self.blocks is None else self.blocks.to_dict(),
            "slices": None if self.slices is None else self.slices.to_dict(),
            "chunk_shares": None if self.chunk_shares is None else list(self.chunk_shares),
            **{name: getattr(self, name).tolist() for name in ARRAYS},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Restore and check a plan; raises `PlanError` for a broken invariant or another fingerprint."""
        if not isinstance(values, dict):
            raise PlanError(f"Plan.from_dict got {kind_of(values)}: pass the dict that Plan.to_dict returns")
        if values.get("format") != FORMAT:
            raise PlanError(f"this plan has format {values.get('format')!r}; this version reads {FORMAT}")
        scalars = ("constraints", "num_micro_batches", "group_size", "location", "dropped", "fingerprint")
        missing = [name for name in (*ARRAYS, *scalars) if name not in values]
        if missing:
            raise PlanError(f"this plan lacks {', '.join(missing)}: pass the whole dict that Plan.to_dict returns")
        known = {field.name for field in fields(PlanConstraints)}
        if not isinstance(values["constraints"], dict) or not values["constraints"].keys() <= known:
            raise PlanError(
                f"the constraints of this plan are {values['constraints']!r}: pass keywords of PlanConstraints"
            )
        location, blocks, shares = values["location"], values.get("blocks"), values.get("chunk_shares")
        slices = values.get("slices")
        try:
            plan = cls(
                constraints=PlanConstraints(**values["constraints"]),
                num_micro_batches=int(values["num_micro_batches"]),
                group_size=values["group_size"],
                location=None if location is None else as_ints(location, "location", len(location)),
                dropped=tuple(DroppedSample(*entry) for entry in values["dropped"]),
                blocks=None if blocks is None else PackBlocks.from_dict(blocks),
                slices=None if slices is None else PackSlices.from_dict(slices),
                chunk_shares=None if shares is None else tuple(shares),
                **{name: as_ints(values[name], name, len(values[name])) for name in ARRAYS},
            )
        except (TypeError, OverflowError) as error:
            raise PlanError(f"this plan cannot be read: {error}") from error
        check_plan(plan)
        if plan.fingerprint != values["fingerprint"]:
            raise PlanError(
                f"the fingerprint of this plan is {plan.fingerprint}, recorded is {values['fingerprint']}: it was "
                "changed after it was made"
            )
        return plan

    @classmethod
    def from_bins(
        cls,
        bins: Sequence[Sequence[Sequence[int]]],
        lengths: ArrayLike,
        constraints: PlanConstraints,
        *,
        cost: Any = None,
        ids: ArrayLike | None = None,
        group_ids: ArrayLike | None = None,
        home_rank: ArrayLike | None = None,
        location: ArrayLike | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> Plan:
        """Plan from bins of another planner: `bins[dp_rank][k]` are sample indices in pack order.

        An empty bin becomes a filler. Other arguments as for `plan_step`; with `prefixes` the samples of a bin stand in
        their order. With `max_cp_size` ranks may have different numbers of bins, and consecutive ranks with one bin at
        the same index compute it together. Raises `PlanError` for a broken invariant: a
        sample missing or placed twice, ranks with different numbers of micro-batches, an illegal number, a
        micro-batch above the cap, a group in several micro-batches.
        """
        problem = build_problem(
            lengths,
            constraints,
            cost=DEFAULT_COST if cost is None else cost,
            ids=ids,
            group_ids=group_ids,
            home_rank=home_rank,
            location=location,
            prefixes=prefixes,
            largest_part=0,  # bins may cut trees anywhere
        )
        return cls.of(assemble_bins(problem, bins))

    @classmethod
    def of(cls, arrays: PlanArrays) -> Plan:
        """Plan from checked arrays."""
        return cls(**{field.name: getattr(arrays, field.name) for field in fields(PlanArrays)})
