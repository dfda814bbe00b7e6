"""Placement of ranks on machines: bundles of a placement group, and the numbers of the ranks in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Machine and bundle of one rank."""

    rank: int
    node: str
    """Ray's id of the machine."""
    bundle: int
    """Index of the placement group's bundle that holds the rank's devices."""
    local_rank: int
    local_size: int
    """Ranks on its machine."""


def bundle_size(tp_size: int, largest_machine: int) -> int:
    """Ranks per bundle: a tensor-parallel group, or where no machine holds one, its largest divisor that fits.

    A bundle lies on one machine. `largest_machine` is the number of ranks that fit on the largest one.
    """
    return max(size for size in range(1, tp_size + 1) if tp_size % size == 0 and size <= max(1, largest_machine))


def place_ranks(bundle_nodes: Sequence[str], size: int) -> list[RankPlacement]:
    """Placements of all ranks, `size` per bundle; `bundle_nodes` has the machine of each bundle.

    Consecutive ranks share a machine where possible: bundles are taken machine by machine.
    """
    order = {node: number for number, node in enumerate(dict.fromkeys(bundle_nodes))}
    bundles = sorted(range(len(bundle_nodes)), key=lambda bundle: (order[bundle_nodes[bundle]], bundle))
    slots = [(bundle_nodes[bundle], bundle) for bundle in bundles for _ in range(size)]
    local_sizes = {node: sum(other == node for other, _ in slots) for node in order}
    placements, local_ranks = [], dict.fromkeys(order, 0)
    for rank, (node, bundle) in enumerate(slots):
        local_rank = local_ranks[node]
        placements.append(
            RankPlacement(rank=rank, node=node, bundle=bundle, local_rank=local_rank, local_size=local_sizes[node])
        )
        local_ranks[node] += 1
    return placements
