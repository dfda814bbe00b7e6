"""Registry of the algorithms that form micro-batches, by mode and name.

A packer that is not registered is named by its dotted path, `package.module:function` (see `planning.packers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll_batching.registry import Entry, Registry

_HERE = "roll_batching.planning"


@dataclass(frozen=True, kw_only=True)
class Algorithm(Entry):
    """Algorithm that forms micro-batches."""

    forms: Literal["bins", "order", "placement"] = "bins"
    """Its result. "bins": sets of units, which the planner counts and places; "order": an order of the units, which all
    ranks cut at the same positions; "placement": bins with their number, ranks and indices."""
    keeps_order: bool = False
    """Samples keep the given order, in blocks from rank to rank."""

    @property
    def same_positions(self) -> bool:
        """Whether all ranks cut at the same positions, so that they can compute equal shapes."""
        return self.forms == "order"


ALGORITHMS: dict[str, Registry[Algorithm]] = {
    "packed": Registry(
        "packing algorithm",
        Algorithm(
            name="load_balance",
            target=f"{_HERE}.load_balance.planner:balance",
            summary="few packs under the cap, balanced for the parallel layout",
            forms="placement",
        ),
        Algorithm(
            name="none",
            target=f"{_HERE}.packers.bin_packing:concatenative",
            summary="samples in the given order, next-fit under the cap",
            keeps_order=True,
        ),
        *(
            Algorithm(name=name, target=f"{_HERE}.packers.bin_packing:{name}", summary=summary)
            for name, summary in (
                ("concatenative", "NeMo-RL's next-fit in the given order"),
                ("first_fit_decreasing", "NeMo-RL's first-fit by falling length"),
                ("first_fit_shuffle", "NeMo-RL's first-fit in an order drawn from the seed"),
                ("modified_first_fit_decreasing", "NeMo-RL's modified first-fit-decreasing (Johnson and Garey 1985)"),
            )
        ),
    ),
    "dynamic": Registry(
        "algorithm of dynamic batching",
        Algorithm(
            name="roll",
            target=f"{_HERE}.packers.rectangles:rising",
            summary="ROLL's: rows by rising length, cut at the same positions on all ranks",
            forms="order",
        ),
        Algorithm(
            name="nemo_rl",
            target=f"{_HERE}.packers.rectangles:falling",
            summary="NeMo-RL's: rows by falling length, cut at the same positions on all ranks",
            forms="order",
        ),
        Algorithm(
            name="prefer_closest",
            target=f"{_HERE}.packers.rectangles:closest",
            summary="cosmos-rl's: the oldest sample opens a rectangle, and samples that keep it smallest join",
        ),
        Algorithm(
            name="prefer_first",
            target=f"{_HERE}.packers.rectangles:first",
            summary="cosmos-rl's: as prefer_closest, but among equals the oldest sample joins",
        ),
    ),
    "padded": Registry(
        "algorithm of padded batching",
        Algorithm(
            name="none",
            target=f"{_HERE}.packers.rectangles:as_given",
            summary="rows in the given order, in blocks from rank to rank",
            forms="order",
            keeps_order=True,
        ),
    ),
}
"""Algorithms by mode. The first of a mode is its default."""


def algorithm_of(mode: str, name: str) -> Algorithm:
    """Entry of `name` in `mode`, or an entry for the packer at a dotted path; raises `ConfigError` for others."""
    entry = ALGORITHMS[mode].get(name)
    return Algorithm(name=name, target=name, summary="") if entry is None else entry
