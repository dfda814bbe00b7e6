"""ROLL with our planner: its sequence packing and the balance of its data-parallel ranks.

ROLL imports a role's worker class by its dotted path, on the driver and on the workers, so one key of its YAML does it:

    actor_train: {worker_cls: roll_batching.integrations.roll.RLVRActorWorker}

Importing this module replaces `make_micro_batch_iter_for_sequence_packing` of the algorithm `load_balance` and
`get_seqlen_balanced_partitions`, through which `batch_balance` works. Kept of ROLL: samples stay on their rank in a
step; all ranks have the same count, a multiple of `vp_size`; no micro-batch is empty; `partition_indices_list` has the
order.

Source: roll/utils/sequence_packing.py, roll/utils/functionals.py at 8eb27cc.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.integrations.host_plans import WORKLOAD, Lengths, gather_lengths, pipeline_size, ranks_of
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import PlanConstraints, karmarkar_karp, plan_step


def make_micro_batch_iter_for_sequence_packing(
    self: Any,
    mini_batch: Any,
    tp_size: int,
    cp_size: int,
    vp_size: int,
    is_train: bool = False,
    dp_group: Any = None,
    micro_batch_size: int | None = None,
) -> Iterator[Any]:
    """The micro-batches of a rank's `mini_batch` (DataProto), whose order stands in its `meta_info`.

    Collective over `dp_group`, ROLL's data-parallel group with context-parallel ranks in it. `micro_batch_size` is not
    read, as in ROLL. Raises AssertionError, the same on all ranks.
    """
    lengths = np.asarray(mini_batch.batch["attention_mask"].sum(dim=1).cpu().numpy(), dtype=np.int64)
    parts, rank = gather_lengths(lengths, dp_group)
    which = "train" if is_train else "forward"
    bins = plan_bins(
        parts[::cp_size],  # context-parallel ranks are neighbours in the group and hold the same samples
        getattr(self.config, f"max_packed_sequence_length_{which}"),
        tp_size=tp_size,
        cp_size=cp_size,
        vp_size=vp_size,
        least=getattr(self.config, f"min_num_micro_batches_{which}"),
        sequence_multiple=self.get_pad_factor(cp_size, tp_size),
    )[rank // cp_size]
    mini_batch.meta_info["partition_indices_list"] = bins
    for number, indices in enumerate(bins):
        micro_batch = mini_batch.select_idxs(indices)
        micro_batch.meta_info = copy.deepcopy(mini_batch.meta_info) | {
            "micro_batch_idx": number,
            "is_padding_batch": False,
            "partition_indices": indices,
            "num_micro_batchs": len(bins),
            "mini_batch_size": mini_batch.batch.batch_size[0],
        }
        yield micro_batch


def plan_bins(
    parts: Sequence[Lengths],
    max_tokens: int,
    *,
    tp_size: int = 1,
    cp_size: int = 1,
    vp_size: int = 1,
    least: int = 1,
    sequence_multiple: int = 1,
) -> list[list[list[int]]]:
    """Indices into each rank's `parts`, by rank and micro-batch; samples stay on their rank.

    `sequence_multiple`: ROLL pads every sequence of a pack to it. Raises AssertionError where a sequence is longer than
    the cap, or samples are too few.
    """
    pp_size = pipeline_size()
    try:
        plan = plan_step(
            np.concatenate(parts),
            PlanConstraints(
                dp_size=len(parts),
                max_tokens=max_tokens,
                tp_size=tp_size,
                cp_size=cp_size,
                pp_size=pp_size,
                num_micro_batches_multiple=int(np.lcm(vp_size, pp_size)) if vp_size > 1 else 1,
                min_num_micro_batches=least,
                sequence_multiple=sequence_multiple,
                fillers=False,
            ),
            cost=WORKLOAD,
            home_rank=ranks_of(parts),
        )
    except PlanError as error:
        raise AssertionError(str(error)) from None
    firsts = np.cumsum([0, *(len(part) for part in parts)])
    return [
        [sorted((micro_batch.samples - first).tolist()) for micro_batch in micro_batches]
        for first, micro_batches in zip(firsts, plan.micro_batches, strict=False)
    ]


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Parts of near-equal sums; with `equal_size` of equal numbers of items. Raises AssertionError as ROLL's does."""
    weights = np.asarray([int(weight) for weight in seqlen_list], dtype=np.int64)
    if len(weights) < k_partitions:
        raise AssertionError(f"number of items:[{len(weights)}] < k_partitions:[{k_partitions}]")
    try:
        return [sorted(part) for part in karmarkar_karp(weights, k_partitions, equal_size=equal_size)]
    except PlanError as error:
        raise AssertionError(str(error)) from None


WORKERS = {
    "RLVRActorWorker": "roll.pipeline.rlvr.actor_worker:ActorWorker",
    "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker:ActorWorker",
    "DPOActorWorker": "roll.pipeline.dpo.actor_worker:ActorWorker",
    "BaseActorWorker": "roll.pipeline.base_worker:ActorWorker",
}
"""ROLL's worker classes of pipelines with log-probs, by their names here: pipelines have losses of their own."""


def worker_class(name: str, module: str) -> Any:
    """A subclass of ROLL's worker class, as the attribute `name` of `module`.

    Ray hands classes to workers by module and name: a subclass of our own makes them import `module`, which patches
    ROLL there. Made on demand, as importing ROLL's workers takes seconds. Raises AttributeError for a name outside of
    `WORKERS`.
    """
    if name not in WORKERS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; its workers are {', '.join(WORKERS)}")
    path, _, attribute = WORKERS[name].partition(":")
    base = getattr(importlib.import_module(path), attribute)
    made = type(name, (base,), {"__module__": module, "__doc__": f"ROLL's {path}.{attribute}."})
    vars(sys.modules[module])[name] = made
    return made


def __getattr__(name: str) -> Any:
    return worker_class(name, __name__)


_ROLL = Integration("ROLL", package="roll", distribution="roll", tried=("8eb27cc",))
_REPLACEMENTS = (
    Replacement(
        module="roll.utils.sequence_packing",
        name="LoadBalancePacker.make_micro_batch_iter_for_sequence_packing",
        parameters=(
            "self",
            "mini_batch",
            "tp_size",
            "cp_size",
            "vp_size",
            "is_train",
            "dp_group",
            "micro_batch_size",
        ),
        by=make_micro_batch_iter_for_sequence_packing,
    ),
    Replacement(
        module="roll.utils.functionals",
        name="get_seqlen_balanced_partitions",
        parameters=("seqlen_list", "k_partitions", "equal_size"),
        by=get_seqlen_balanced_partitions,
    ),
)


def patch() -> None:
    """Puts our planner behind ROLL's packing; importing this module does it. Raises IntegrationError."""
    _ROLL.patch(*_REPLACEMENTS)


def unpatch() -> None:
    """Gives ROLL its own functions back."""
    _ROLL.unpatch(*_REPLACEMENTS)


patch()
