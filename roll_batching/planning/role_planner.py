"""Planner for the steps of one role; makes equal plans on ranks and on a driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import CostModel
from roll_batching.planning.partition import batch_balance
from roll_batching.planning.plan import Plan
from roll_batching.planning.planner import plan_step
from roll_batching.planning.prefixes import SharedPrefixes

if TYPE_CHECKING:
    from roll_batching.planning.pack_times import PackTimes

SMALLEST_SAVING = 0.05
"""Share of the tokens below which "auto" shares nothing: more runs of keys and uneven parts cost about as much."""


class Table(Protocol):
    """Ids, lengths and locations of samples, such as `samples.LengthTable`."""

    @property
    def ids(self) -> Ints:
        """int64 `[n]`: global ids."""
        ...

    @property
    def lengths(self) -> Ints:
        """int64 `[n]`: tokens per sample."""
        ...

    @property
    def location(self) -> Ints:
        """int64 `[n]`: DP rank that holds each sample."""
        ...

    @property
    def prefixes(self) -> SharedPrefixes | None:
        """What the samples share; None: nothing is shared."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolePlanner:
    """Planner with the settings of a role and the cost model of its model; can be pickled."""

    train: PlanConstraints
    """Constraints of passes with gradients."""
    infer: PlanConstraints
    """Constraints of passes without gradients."""
    cost: CostModel
    share_prefixes: bool | Literal["auto"] = False
    """Whether packs share the prefixes that the table names; "auto": where that saves at least 5% of the tokens."""
    times: PackTimes | None = None
    """Predicted times of packs, for constraints with a context-parallel size per pack."""

    def plan(self, table: Table, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """Plan the samples of `table`; `forward`: for a pass without gradients. See `plan_step`.

        Raises `PlanError` if `table` is not a length table.
        """
        constraints = self.infer if forward else self.train
        return plan_step(
            _checked(table).lengths,
            constraints,
            cost=self.cost,
            ids=table.ids,
            group_ids=group_ids,
            home_rank=home_rank,
            location=table.location,
            prefixes=self._prefixes(table) if constraints.mode == "packed" else None,
            times=self.times,
        )

    def _prefixes(self, table: Table) -> SharedPrefixes | None:
        prefixes = table.prefixes
        if prefixes is None or not self.share_prefixes:
            return None
        pays = int(prefixes.shared.sum()) >= SMALLEST_SAVING * int(table.lengths.sum())
        return prefixes if pays or self.share_prefixes is True else None

    def balanced_homes(self, table: Table) -> Ints:
        """`home_rank` for `plan`, as in ROLL: see `batch_balance`."""
        return batch_balance(_checked(table).lengths, self.train.dp_size, cost=self.cost)


def _checked(table: Table) -> Table:
    """`table`; raises `PlanError` if it is not a length table."""
    if not all(hasattr(table, name) for name in ("ids", "lengths", "location", "prefixes")):
        raise PlanError(f"table is a {type(table).__name__}: pass a LengthTable, as gather_lengths(batch) returns it")
    return table
