"""Megatron-LM with our planner: packed fine-tuning with `--sequence-packing-scheduler`, and a size per pack.

A line in `pretrain_gpt.py`, or another script that calls Megatron's `pretrain`, switches it on:

    import roll_batching.integrations.megatron_lm

Importing this module replaces the schedules of `dp_balanced` and, where Megatron has it, of `default_dynamic_cp`.
Reading, rerouting, packing, model and loss stay Megatron's. Kept of Megatron: every rank has the same count of
micro-batches, a multiple of `microbatch_group_size_per_vp_stage` under VPP, none is empty, and of `dp_balanced` that a
sample above the cap is alone.

Source: megatron/core/datasets/data_schedule.py of main at d98e8a6 and of dev at d48bd6b; releases up to 0.19 have none.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from roll_batching.errors import IntegrationError
from roll_batching.integrations.host_plans import plan_level_totals
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.modeling.cost import model_cost
from roll_batching.planning import ParallelDims, Plan, PlanConstraints, plan_step
from roll_batching.planning.pack_times import PackTimes

logger = logging.getLogger(__name__)

Samples = Sequence[tuple[int, int]]
"""(id, tokens with Megatron's padding) of each sample of a step."""
Groups = list[list[list[int]]]
"""Ids by micro-batch and data- and context-parallel rank; the ranks of a pack have the same."""

_planned_for: ContextVar[Any] = ContextVar("_planned_for")
"""The TransformerConfig of the step that is being planned."""


def wrap_data_iterator(data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None) -> Any:
    """Megatron's function of this name, whose schedules are planned for the model of `config`."""
    token = _planned_for.set(config)
    try:
        return _MEGATRON.original(_WRAP)(data_iterator, config, num_microbatches, pg_collection)
    finally:
        _planned_for.reset(token)


def one_size(self: Any, sample_id_seqlens: Samples) -> Groups:
    """The schedule of `dp_balanced`: packs of the layout's context-parallel size. Raises `PlanError`."""
    _require_no_count(self)
    config = _planned_for.get()
    constraints = PlanConstraints(
        dp_size=self.dp_size,
        max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
        pp_size=config.pipeline_model_parallel_size,
        num_micro_batches_multiple=self.microbatch_group_size_per_vp_stage or 1,
        fillers=False,
        oversize="alone",
        # Experts are exchanged in every layer: ranks meet at every micro-batch, otherwise once per step.
        objective="lockstep" if config.expert_model_parallel_size > 1 else "auto",
    )
    lengths = [tokens for _, tokens in sample_id_seqlens]
    return _groups(sample_id_seqlens, plan_level_totals(lengths, constraints, _cost(config)), self.cp_size)


def size_per_pack(self: Any, sample_id_seqlens: Samples) -> Groups:
    """The schedule of `default_dynamic_cp`: packs of a context-parallel size each. Raises `PlanError`.

    A step whose samples are too few for all ranks of every micro-batch keeps Megatron's schedule, which widens packs.
    """
    _require_no_count(self)
    if self.min_cp_size > 1:
        raise IntegrationError(
            f"min_dynamic_context_parallel_size={self.min_cp_size} under roll-batching: leave it 1, as plans choose "
            "the size of each pack by its time"
        )
    config, ranks = _planned_for.get(), self.dp_size * self.cp_size
    tp_size, pp_size = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    group_size = self.microbatch_group_size_per_vp_stage
    constraints = PlanConstraints(
        dp_size=ranks,
        tp_size=tp_size,
        pp_size=pp_size,
        vpp_size=config.virtual_pipeline_model_parallel_size or 1,
        group_size=group_size if group_size not in (None, pp_size) else None,
        max_tokens=self.max_seqlen_per_dp_cp_rank,
        max_cp_size=ranks & -ranks,
        # Megatron's schedule lists the packs of all ranks by index.
        objective="lockstep",
    )
    times = PackTimes.of_model(
        _cost(config),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        kv_channels=config.kv_channels,
        tp_size=tp_size,
        pp_size=pp_size,
    )
    plan = plan_step([tokens for _, tokens in sample_id_seqlens], constraints, times=times)
    if any(pack.is_filler for of_rank in plan.micro_batches for pack in of_rank):
        logger.warning(
            "roll-batching: %d samples are too few for %d ranks at every micro-batch; the step keeps Megatron's plan",
            len(sample_id_seqlens),
            ranks,
        )
        groups: Groups = _MEGATRON.original(_SIZE_PER_PACK)(self, sample_id_seqlens)
        return groups
    return _groups(sample_id_seqlens, plan, 1)


def _cost(config: Any) -> Any:
    """FLOPs of a sequence per tensor-parallel rank, without the output layer, whose size the config does not say."""
    return model_cost(config, 1, ParallelDims(tp_size=config.tensor_model_parallel_size))


def _require_no_count(scheduler: Any) -> None:
    if getattr(scheduler, "max_num_seqs", None) is not None:
        raise IntegrationError(
            f"thd_max_packed_sequences, at most {scheduler.max_num_seqs} samples in a pack, under roll-batching: leave "
            "it out, as plans count tokens"
        )


def _groups(samples: Samples, plan: Plan, repeats: int) -> Groups:
    """Ids by micro-batch and rank; each data-parallel rank of the plan stands for `repeats` ranks."""
    ids = np.array([number for number, _ in samples])
    return [
        [ids[of_rank[index].samples].tolist() for of_rank in plan.micro_batches for _ in range(repeats)]
        for index in range(plan.num_micro_batches)
    ]


_MODULE = "megatron.core.datasets.data_schedule"
_WRAP = Replacement(module=_MODULE, name="wrap_data_iterator", by=wrap_data_iterator)
_ONE_SIZE = Replacement(module=_MODULE, name="DpBalancedScheduler.get_groups_and_subsamples", by=one_size)
_SIZE_PER_PACK = Replacement(
    module=_MODULE, name="DefaultDynamicCPScheduler.get_groups_and_subsamples", by=size_per_pack
)
_HAS_SIZES = hasattr(importlib.import_module(_MODULE), "DefaultDynamicCPScheduler")
_MEGATRON = Integration(
    "Megatron-LM",
    *(_WRAP, _ONE_SIZE, *([_SIZE_PER_PACK] if _HAS_SIZES else [])),
    package="megatron",
    distribution="megatron-core",
    tried=("main at d98e8a6", "dev at d48bd6b"),
)
patch, unpatch = _MEGATRON.patch, _MEGATRON.unpatch
patch()
