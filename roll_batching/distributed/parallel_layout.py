"""The parallel layout: sizes, this rank's coordinates and Megatron's process groups; groups of single packs' sizes."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed.groups import gather_objects, group_timeout, host_group
from roll_batching.distributed.team import Team
from roll_batching.errors import LayoutError
from roll_batching.planning import ParallelDims


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(ParallelDims):
    """Sizes of a parallel layout, this rank's coordinates in it, and Megatron's groups for it.

    `dp_group` joins the ranks with the same shard of the model in different replicas. `dims` holds the sizes only.
    """

    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: Any
    cp_group: Any
    pp_group: Any
    dp_group: Any
    host_group: Any
    """The gloo group of all ranks (`distributed.host_group`)."""
    team: Team
    """Host-side exchanges among the same ranks."""
    device: torch.device

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return bool(self.pp_rank == self.pp_size - 1)

    @property
    def is_replica_leader(self) -> bool:
        """Whether this rank reports for its replica: last stage, tensor rank 0, context rank 0."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def start_processes(timeout_minutes: float = 30.0) -> torch.device:
    """Joins the process group that torchrun's variables describe, or a group of one process. Returns the device.

    Uses NCCL and one CUDA device per local rank if CUDA is available, else gloo and the CPU platform. Raises
    `LayoutError` for a local rank without a GPU.
    """
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible. Start at most "
                "that many processes per machine"
            )
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        from roll_batching.megatron_patches import cpu_platform

        cpu_platform.install()
        device, backend = torch.device("cpu"), "gloo"
    if not dist.is_initialized():
        options: dict[str, Any] = {"timeout": datetime.timedelta(minutes=timeout_minutes)}
        if "RANK" not in os.environ:  # not under torchrun: a store inside the process needs no port
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **options)
    return device


def leave_processes() -> None:
    """Destroys the process group at the end of a successful job, before the interpreter exits.

    Not for use after a failure: it may wait for ranks that hang.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def make_layout(dims: ParallelDims, device: torch.device) -> ParallelLayout:
    """Initialises Megatron's parallel state for `dims`, once per process, and returns the layout.

    Raises `LayoutError` if the world size does not fit, or if the parallel state has another layout already: it is
    global, and belongs to the model that trains.
    """
    from megatron.core import parallel_state

    _check_world(dims)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            dims.tp_size,
            dims.pp_size,
            dims.vpp_size if dims.interleaved else None,
            context_parallel_size=dims.cp_size,
            expert_model_parallel_size=dims.ep_size,
            # Megatron's groups would otherwise have its default timeout instead of the one that the caller set.
            distributed_timeout_minutes=group_timeout(dist.group.WORLD) / datetime.timedelta(minutes=1),
        )
    running_vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    layout = describe_layout(vpp_size=running_vpp, sequence_parallel=dims.sequence_parallel, device=device)
    if layout.dims != dims:
        raise LayoutError(
            f"Megatron's parallel state has the layout {layout} already, and a process has one: a model cannot train "
            f"in {dims}. Build the model that trains first, and all models that train in one layout"
        )
    return layout


def join_layout(dims: ParallelDims, device: torch.device) -> tuple[ParallelLayout, Any]:
    """A layout for a model that does not train, and its ProcessGroupCollection. Collective.

    The collection is None if Megatron's parallel state already has such groups, or has none yet and takes this layout.
    Raises `LayoutError` if the world size does not fit.
    """
    from megatron.core import parallel_state

    from roll_batching.distributed.role_groups import role_groups  # only a second layout needs it

    if not parallel_state.model_parallel_is_initialized():
        return make_layout(dims, device), None
    _check_world(dims)
    groups = role_groups(dims)
    layout = describe_layout(
        vpp_size=dims.vpp_size, sequence_parallel=dims.sequence_parallel, device=device, groups=groups
    )
    return layout, groups


def _check_world(dims: ParallelDims) -> None:
    if dims.world_size != dist.get_world_size():
        raise LayoutError(f"{dims} is a layout of {dims.world_size} processes, but {dist.get_world_size()} run")


def describe_layout(
    *, vpp_size: int, sequence_parallel: bool, device: torch.device, groups: Any = None
) -> ParallelLayout:
    """The layout of existing process groups. Collective.

    `groups` is a ProcessGroupCollection; None stands for the groups of Megatron's parallel state.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if groups is None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
    expert_group = getattr(groups, "ep", None)
    expert_tensor_group = getattr(groups, "expt_tp", None)
    return ParallelLayout(
        tp_size=groups.tp.size(),
        cp_size=groups.cp.size(),
        pp_size=groups.pp.size(),
        vpp_size=vpp_size,
        ep_size=expert_group.size() if expert_group is not None else 1,
        etp_size=(groups.tp if expert_tensor_group is None else expert_tensor_group).size(),
        dp_size=groups.dp.size(),
        sequence_parallel=sequence_parallel,
        tp_rank=groups.tp.rank(),
        cp_rank=groups.cp.rank(),
        pp_rank=groups.pp.rank(),
        dp_rank=groups.dp.rank(),
        tp_group=groups.tp,
        cp_group=groups.cp,
        pp_group=groups.pp,
        dp_group=groups.dp,
        host_group=host_group(),
        team=Team.of(host_group(), groups.dp, groups.dp.rank()),
        device=device,
    )


# ---- context-parallel sizes of single packs


_groups: dict[tuple[Any, tuple[int, ...], int], Any] = {}
"""This rank's context-parallel groups, by `dist.group.WORLD`, the ranks of its data-parallel group, and size."""


def context_groups(layout: ParallelLayout, sizes: Sequence[int]) -> dict[int, Any]:
    """This rank's group of each context-parallel size: the aligned block of data-parallel ranks that contains it.

    Collective among all ranks, with the same `sizes` (powers of two above 1 that divide the data-parallel size). Groups
    are made when a size first occurs, smaller sizes first, and last as long as the process group of all ranks. A rank
    is a member of one group per size: of at most log2 of the data-parallel size.

    A block never uses the data-parallel group, even where it has the same ranks: that group reduces gradients while
    other ranks still compute packs, so that ranks would issue its collectives in different orders.
    """
    world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(layout.dp_group))
    missing = sorted(size for size in set(sizes) if (world, members, size) not in _groups)
    if missing:
        for stale in [key for key in _groups if key[0] is not world]:
            del _groups[stale]  # groups of a destroyed world
        everyone = gather_objects(members, layout.host_group)
        timeout = group_timeout(layout.dp_group)
        for size in missing:
            for ranks in sorted(set(everyone)):
                for first in range(0, len(ranks), size):
                    block = list(ranks[first : first + size])
                    group = dist.new_group(block, timeout, group_desc=f"CONTEXT_PARALLEL_GROUP_{size}")
                    if dist.get_rank() in block:
                        _groups[world, members, size] = group
    return {size: _groups[world, members, size] for size in sizes}
