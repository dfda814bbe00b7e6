"""Process groups of packs with their own context-parallel size: few, made once, in one order, ended with the world."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

HERE = "tests.distributed.test_context_groups:"
LAYOUTS = [{}, {"tp_size": 2, "sequence_parallel": True}]


def groups_of_a_rank(payload: tuple[dict[str, Any], str]) -> list[dict[str, Any]]:
    """Ranks of this rank's groups and numbers of communicators, in two worlds, one after the other."""
    from megatron.core import parallel_state
    from torch.distributed.distributed_c10d import _world

    from roll_batching.distributed.parallel_layout import context_groups, leave_processes, make_layout, start_processes
    from roll_batching.planning import ParallelDims

    (sizes, folder), worlds, rank = payload, [], int(os.environ["RANK"])
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=4)
        device = start_processes()
        layout = make_layout(ParallelDims.of_world(4, **sizes), device)
        largest = layout.dp_size
        before = len(_world.pg_map)
        made, counts = {}, []
        # A plan with the largest size, one with all sizes, and again; ranks name the sizes in different orders.
        every = [size for size in (2, 4) if size <= largest]
        for wanted in ([largest], every if dist.get_rank() % 2 else every[::-1], every):
            made = context_groups(layout, wanted)
            counts.append(len(_world.pg_map) - before)
        sums = {}
        for size, group in made.items():
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            sums[size] = int(total)
        worlds.append(
            {
                "ranks": {size: dist.get_process_group_ranks(group) for size, group in made.items()},
                "data_parallel": dist.get_process_group_ranks(layout.dp_group),
                "names": [group.group_desc for group in made.values()],
                "counts": counts,
                "sums": sums,
            }
        )
        parallel_state.destroy_model_parallel()
        leave_processes()
        assert not dist.is_initialized() and not _world.pg_map
    return worlds


def test_groups_are_aligned_blocks_made_once_and_end_with_the_world(tmp_path: Path) -> None:
    for number, sizes in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank, worlds in enumerate(run_ranks(4, HERE + "groups_of_a_rank", (sizes, str(folder)))):
            for world in worlds:
                peers = world["data_parallel"]
                for size, ranks in world["ranks"].items():
                    first = peers.index(rank) // size * size
                    assert ranks == peers[first : first + size] and world["sums"][size] == size
                # One communicator per size that plans used; the second and third plan with it make none.
                assert world["counts"] == ([1, 2, 2] if len(peers) == 4 else [1, 1, 1])
                assert [int(name.rpartition("_")[2]) for name in world["names"]] == list(world["ranks"])
