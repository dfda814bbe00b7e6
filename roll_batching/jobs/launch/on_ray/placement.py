"""Where ranks go: bundles of a placement group, and from its machines the numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank lives."""

    rank: int
    node: str
    """Ray's id of the machine."""
    bundle: int
    """Which bundle of the placement group it takes its devices from."""
    local_rank: int
    """Its number among the ranks of its machine."""
    local_size: int
    """Ranks on its machine."""


def bundle_size(tp_size: int, roomiest: int) -> int:
    """Ranks per bundle: a bundle lies on one machine, so a tensor-parallel group is one wherever a machine has room.

    `roomiest` is the number of ranks that the roomiest machine can hold. Where no machine holds a whole group, the
    largest part of it that divides it.
    """
    return max(size for size in range(1, tp_size + 1) if tp_size % size == 0 and size <= max(1, roomiest))


def seats(bundle_nodes: Sequence[str], size: int) -> list[Seat]:
    """The seats of all ranks, `size` to a bundle, given the machine of each bundle.

    Ranks that follow each other share a machine as long as it lasts: bundles are taken machine by machine.
    """
    order = {node: number for number, node in enumerate(dict.fromkeys(bundle_nodes))}
    bundles = sorted(range(len(bundle_nodes)), key=lambda bundle: (order[bundle_nodes[bundle]], bundle))
    places = [(bundle_nodes[bundle], bundle) for bundle in bundles for _ in range(size)]
    found, sizes = [], {node: sum(other == node for other, _ in places) for node in order}
    seen = dict.fromkeys(order, 0)
    for rank, (node, bundle) in enumerate(places):
        found.append(Seat(rank=rank, node=node, bundle=bundle, local_rank=seen[node], local_size=sizes[node]))
        seen[node] += 1
    return found
