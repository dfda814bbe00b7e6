"""Process groups for a second layout on the same ranks, in addition to Megatron's parallel state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from roll_batching.distributed.groups import divided_group
from roll_batching.planning import ParallelDims

_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default order of ranks, as in `initialize_model_parallel`."""

Ranks = list[list[int]]


def role_groups(dims: ParallelDims) -> Any:
    """A ProcessGroupCollection for `dims` over all ranks; None if it is that of Megatron's parallel state. Collective.

    Groups over equal ranks are created once per process and shared by roles. Ranks are ordered as by Megatron
    (`megatron/core/parallel_state.py`, RankGenerator). The parallel state must be initialised and does not change:
    layers that are built with a collection read only that.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    ranks = _ranks(dims)
    shared = ProcessGroupCollection.use_mpu_process_groups()
    # All ranks get one answer: the groups of every rank come from one layout.
    if all(
        sorted(dist.get_process_group_ranks(getattr(shared, name))) in [sorted(part) for part in ranks[name]]
        for name in ("tp", "cp", "pp", "dp", "ep", "expt_tp")
    ):
        return None
    stages: Ranks = ranks["pp"]
    embedding: Callable[[list[int]], list[int]] = parallel_state.default_embedding_ranks
    first: Callable[[list[int]], list[int]] = parallel_state.default_position_embedding_ranks
    ranks |= {"embd": [embedding(stage) for stage in stages], "pos_embd": [first(one) for one in stages]}
    groups = {name: divided_group(division) for name, division in ranks.items()}
    aliases = {
        "intra_dp_cp": "dp_cp",
        "intra_expt_dp": "expt_dp",
        # 0.19 adds groups of ranks that share a layer's weights, which are not used here.
        "dp_cp_gtp_remat": "dp_cp",
        "expt_dp_gtp_remat": "expt_dp",
        "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
    }
    groups |= {name: groups[other] for name, other in aliases.items()}
    names = [field.name for field in dataclasses.fields(ProcessGroupCollection)]
    return ProcessGroupCollection(**{name: groups.get(name) for name in names})


def _ranks(dims: ParallelDims) -> dict[str, Ranks]:
    """The division of ranks for each group of a ProcessGroupCollection, by the group's name."""
    from megatron.core.parallel_state import RankGenerator

    sizes = {"pp": dims.pp_size, "order": _ORDER}
    dense = RankGenerator(tp=dims.tp_size, ep=1, dp=dims.dp_size, cp=dims.cp_size, **sizes)
    outside = dims.world_size // (dims.etp_size * dims.ep_size * dims.pp_size)
    experts = RankGenerator(tp=dims.etp_size, ep=dims.ep_size, dp=outside, cp=1, **sizes)
    of_layers = {
        "tp": "tp",
        "cp": "cp",
        "pp": "pp",
        "dp": "dp",
        "mp": "tp-pp",
        "tp_cp": "tp-cp",
        "dp_cp": "dp-cp",
        "tp_dp_cp": "tp-dp-cp",
    }
    of_experts = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp"}
    return {name: dense.get_ranks(token) for name, token in of_layers.items()} | {
        name: experts.get_ranks(token) for name, token in of_experts.items()
    }
