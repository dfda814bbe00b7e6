"""All that planning the steps of one role takes: the same plan wherever it is made, on a rank or on a driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import CostModel
from roll_batching.planning.partition import batch_balance
from roll_batching.planning.plan import Plan
from roll_batching.planning.planner import plan_step


class Table(Protocol):
    """What is known of samples; `data.LengthTable` is one."""

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
        """int64 `[n]`: who holds each sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolePlanner:
    """Plans by a role's settings and its model's cost. Pure: it can be sent to whoever is to plan."""

    train: PlanConstraints
    """The rules of passes with a gradient."""
    infer: PlanConstraints
    """The rules of passes without."""
    cost: CostModel

    def plan(self, table: Table, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """A plan over the samples of `table`; `forward` plans a pass without gradient. See `plan_step`.

        Raises PlanError where `table` is none.
        """
        return plan_step(
            _checked(table).lengths,
            self.infer if forward else self.train,
            cost=self.cost,
            ids=table.ids,
            group_ids=group_ids,
            home_rank=home_rank,
            location=table.location,
        )

    def balanced_homes(self, table: Table) -> Ints:
        """A `home_rank` for `plan`, ROLL's way: see `batch_balance`."""
        return batch_balance(_checked(table).lengths, self.train.dp_size, cost=self.cost)


def _checked(table: Table) -> Table:
    """`table`. Raises PlanError where it is something else, such as bare lengths."""
    if not all(hasattr(table, name) for name in ("ids", "lengths", "location")):
        raise PlanError(f"table is a {type(table).__name__}: pass a LengthTable, as gather_lengths(batch) returns it")
    return table
