"""A step to simulate: lengths, layout, model and cluster; and variations of it on the same devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roll_batching.errors import LayoutError, PlanError
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model_cost import architecture_cost
from roll_batching.tools.simulation.models import architecture_times, check_layout
from roll_batching.tools.simulation.step import SimulatedStep, simulate_plan

DYNAMIC = "dynamic"
"""Value of `cp` that gives each pack its own context-parallel size."""
SIZES = ("max_tokens", "cp", "tp", "pp", "vpp")
"""What `Scenario.vary` changes."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One optimizer step on a cluster."""

    lengths: Ints
    constraints: PlanConstraints
    architecture: ArchitectureConfig
    cluster: Cluster = field(default_factory=Cluster)
    group_ids: Ints | None = None
    """Samples with equal values share a micro-batch."""
    recompute: int | None = None
    """Layers of a model chunk that are recomputed in the backward pass; None: none, 0: all."""
    overlapped_exchange: bool = False
    """Whether keys and values travel behind attention; see `PackTimes`."""
    largest_cp_size: int | None = None
    """Largest context-parallel size where each pack has its own; None: as many ranks as share the data."""

    @property
    def times(self) -> PackTimes:
        """Predicted times of packs."""
        return architecture_times(
            self.architecture, self.constraints, self.cluster, overlapped_exchange=self.overlapped_exchange
        )

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that are recomputed."""
        if self.recompute is None:
            return 0.0
        layers = self.architecture.num_layers // (self.constraints.pp_size * self.constraints.vpp_size)
        return min(1.0, self.recompute / layers) if self.recompute else 1.0

    def plan(self) -> Plan:
        """The plan that a job makes of these lengths."""
        constraints = self.constraints
        return plan_step(
            self.lengths,
            constraints,
            cost=architecture_cost(self.architecture, tp_size=constraints.tp_size, cp_size=constraints.cp_size),
            group_ids=self.group_ids,
            times=self.times if constraints.has_cp_per_pack else None,
        )

    def simulate(self) -> SimulatedStep:
        """The step of its plan. Raises `PlanError` where the layout, the model or the lengths do not allow one."""
        check_layout(self.architecture, self.constraints)
        head = 6.0 * self.architecture.hidden_size * self.architecture.vocab_size
        return simulate_plan(self.plan(), self.times, recomputed=self.recomputed_share, head=head)

    def vary(self, changes: Mapping[str, Any]) -> Scenario:
        """This step with other sizes (keys of `SIZES`) on the same number of devices.

        Data-parallel ranks follow from the other sizes. Raises `PlanError` for impossible ones.
        """
        base = self.constraints
        own_cp: Any = DYNAMIC if base.has_cp_per_pack else base.cp_size
        cp = changes.get("cp", own_cp)
        sizes = {name: int(changes.get(name, getattr(base, f"{name}_size"))) for name in ("tp", "pp", "vpp")}
        cp_size = 1 if cp == DYNAMIC else int(cp)
        replica = sizes["tp"] * sizes["pp"] * cp_size
        if base.world_size % replica:
            raise PlanError(
                f"{base.world_size} devices do not divide into replicas of tp {sizes['tp']} x pp {sizes['pp']} x cp "
                f"{cp_size} = {replica}"
            )
        ranks = base.world_size // replica
        same_tensor_parts = base.etp_size == base.tp_size
        try:
            constraints = replace(
                base,
                dp_size=ranks,
                tp_size=sizes["tp"],
                pp_size=sizes["pp"],
                vpp_size=sizes["vpp"],
                cp_size=cp_size,
                etp_size=sizes["tp"] if same_tensor_parts else base.etp_size,
                max_tokens=changes.get("max_tokens", base.max_tokens),
                max_cp_size=self._max_cp_size(ranks) if cp == DYNAMIC else 1,
                group_size=base.group_size if sizes["vpp"] > 1 else None,
            )
        except LayoutError as error:
            raise PlanError(str(error)) from None
        return replace(self, constraints=constraints)

    def _max_cp_size(self, ranks: int) -> int:
        largest = ranks & -ranks
        return largest if self.largest_cp_size is None else min(self.largest_cp_size, largest)

    def single_sizes(self) -> dict[int, Scenario]:
        """The same step with each single context-parallel size, by size, for packs with sizes of their own.

        A rank's cap of tokens stays: packs of size n hold n times as many.
        """
        base = self.constraints
        return {
            size: self.vary({"cp": size, "max_tokens": (base.max_tokens or 0) * size}) for size in base.legal_cp_sizes
        }


def simulate_single_sizes(scenario: Scenario) -> tuple[dict[int, SimulatedStep], dict[int, str]]:
    """(Steps by single context-parallel size, reasons why other sizes have none)."""
    steps: dict[int, SimulatedStep] = {}
    reasons: dict[int, str] = {}
    for size, single in scenario.single_sizes().items():
        try:
            steps[size] = single.simulate()
        except PlanError as error:
            reasons[size] = str(error)
    return steps, reasons
