"""ROLL with our planner: its sequence packing and the balance of its data-parallel ranks.

ROLL imports a role's worker class by its dotted path, on the driver and on the workers, so one key of its YAML
switches our planner on:

    actor_train: {worker_cls: roll_batching.integrations.roll.RLVRActorWorker}

Importing this module replaces three functions:

- `make_micro_batch_iter_for_sequence_packing` of the packer `load_balance`: micro-batches are those of one plan.
- `get_seqlen_balanced_partitions`: `batch_balance` and others get more even parts.
- `dynamic_batching_shard`: micro-batches are cut by `cut_rectangles`. Shards and the order of samples stay ROLL's.

As in ROLL, samples stay on their rank in a step, all ranks have the same number of micro-batches, a multiple of
`vp_size`, and none is empty; the order of samples is returned in `partition_indices_list`. If one rank cannot read its
lengths, all raise AssertionError.

Source: roll/utils/sequence_packing.py, roll/utils/dynamic_batching.py, roll/utils/functionals.py at 8eb27cc.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.integrations.host_plans import (
    HostSamples,
    Lengths,
    balanced_partitions,
    cut_rectangles,
    gather_samples,
    joined_prefixes,
    pipeline_size,
    plan_on_home_ranks,
)
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import PlanConstraints, SharedPrefixes


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
    samples, rank = gather_samples(lambda: _samples(mini_batch), dp_group)
    samples = samples[::cp_size]  # context-parallel ranks are neighbours in the group and hold the same samples
    which = "train" if is_train else "forward"
    bins = plan_bins(
        [part.lengths for part in samples],
        getattr(self.config, f"max_packed_sequence_length_{which}"),
        tp_size=tp_size,
        cp_size=cp_size,
        vp_size=vp_size,
        least=getattr(self.config, f"min_num_micro_batches_{which}"),
        sequence_multiple=self.get_pad_factor(cp_size, tp_size),
        prefixes=joined_prefixes(samples),
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
    prefixes: SharedPrefixes | None = None,
) -> list[list[list[int]]]:
    """Indices into each rank's `parts`, by rank and micro-batch; samples stay on their rank.

    `sequence_multiple`: ROLL pads every sequence of a pack to it. `prefixes` as in `plan_on_home_ranks`. Raises
    AssertionError where a sequence is longer than the cap, or samples are too few.
    """
    pp_size = pipeline_size()
    try:
        constraints = PlanConstraints(
            dp_size=len(parts),
            max_tokens=max_tokens,
            tp_size=tp_size,
            cp_size=cp_size,
            pp_size=pp_size,
            num_micro_batches_multiple=int(np.lcm(vp_size, pp_size)) if vp_size > 1 else 1,
            min_num_micro_batches=least,
            sequence_multiple=sequence_multiple,
            fillers=False,
            # Samples stay on their rank, so that its total is fixed: what a plan can lower is the waiting where ranks
            # meet at every micro-batch.
            objective="auto" if pp_size > 1 else "lockstep",
        )
        return plan_on_home_ranks(parts, constraints, prefixes=prefixes)
    except PlanError as error:
        raise AssertionError(str(error)) from None


def dynamic_batching_shard(
    origin_batch: Any,
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    log_prefix: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """ROLL's shards and metrics of dynamic batching, with our cuts. Raises AssertionError as ROLL's.

    ROLL's order of samples stays. All ranks cut it at the same positions: into the fewest micro-batches, and of these
    into those with the fewest tokens.
    """
    interleaved = pipeline_model_parallel_size > 1 and bool(virtual_pipeline_model_parallel_size)
    # Without interleaving in ROLL's own call: its rounding may fail where ours finds a split.
    batch, metrics = _ROLL.original(_DYNAMIC_BATCHING_SHARD)(
        origin_batch,
        dp_size,
        max_tokens_per_microbatch,
        sequence_length_round,
        pipeline_model_parallel_size,
        None,
        log_prefix,
    )
    lengths = np.maximum(_lengths(batch).reshape(dp_size, -1).max(axis=0), 1)
    widths = -(-lengths // sequence_length_round) * sequence_length_round
    multiple = pipeline_model_parallel_size if interleaved else 1
    cuts = cut_rectangles(widths, max_tokens_per_microbatch, multiple)
    indices = [list(cut) for cut in cuts]
    columns = [int(widths[first:end].max()) for first, end in cuts]
    batch.meta_info |= {
        "global_micro_batch_indices": indices,
        "global_micro_batch_lengths": columns,
        "micro_batch_indices": indices,
        "micro_batch_lengths": columns,
        "num_micro_batchs": len(cuts),
    }
    tokens = dp_size * sum((end - first) * width for (first, end), width in zip(cuts, columns, strict=True))
    prefix = f"dynamic_batching/{log_prefix}" if log_prefix else "dynamic_batching"
    padded = metrics[f"{prefix}/actual_tokens_origin"]
    metrics |= {
        f"{prefix}/actual_tokens": tokens,
        f"{prefix}/removed_padding_tokens": padded - tokens,
        f"{prefix}/removed_padding_ratio": (padded - tokens) / padded,
    }
    return batch, metrics


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divides items into parts of near-equal sums; `equal_size`: of equal numbers. Raises AssertionError as ROLL."""
    return balanced_partitions(seqlen_list, k_partitions, equal_size)


def _samples(batch: Any) -> HostSamples:
    """The samples of a batch (DataProto) of padded rows."""
    rows = batch.batch
    mask = rows["attention_mask"].reshape(len(rows["attention_mask"]), -1).bool()
    return HostSamples.of(_lengths(batch), "ROLL", lambda: rows["input_ids"].reshape(mask.shape)[mask].cpu().numpy())


def _lengths(batch: Any) -> Lengths:
    """Tokens of each sample of a batch (DataProto) of padded rows."""
    mask = batch.batch["attention_mask"]
    measured: Lengths = mask.reshape(len(mask), -1).sum(dim=1).cpu().numpy()
    return measured


WORKERS = {
    "RLVRActorWorker": "roll.pipeline.rlvr.actor_worker:ActorWorker",
    "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker:ActorWorker",
    "DPOActorWorker": "roll.pipeline.dpo.actor_worker:ActorWorker",
    "BaseActorWorker": "roll.pipeline.base_worker:ActorWorker",
}
"""ROLL's worker classes of pipelines with log-probs, by their names here: pipelines have losses of their own."""


def keep_packing(strategy: Any) -> None:
    """Lets a Megatron strategy of ROLL's pack a text model, where its role says so.

    transformers gives a text model's tokenizer for its processor, which ROLL takes for one of images: it switches
    packing off.
    """
    if not hasattr(strategy.processor, "image_processor"):
        strategy.is_multimodal, strategy.use_sequence_packing = False, strategy.worker_config.use_sequence_packing


def worker_class(name: str, module: str) -> Any:
    """Makes a subclass of ROLL's worker class and sets it as the attribute `name` of `module`.

    Ray hands classes to workers by module and name: a subclass of our own makes them import `module`, which patches
    ROLL there. It is made on demand, as importing ROLL's workers takes seconds. Raises AttributeError for a name that
    is not in `WORKERS`.
    """
    if name not in WORKERS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; its workers are {', '.join(WORKERS)}")
    path, _, attribute = WORKERS[name].partition(":")
    base = getattr(importlib.import_module(path), attribute)
    subclass = type(name, (base,), {"__module__": module, "__doc__": f"ROLL's {path}.{attribute}."})
    vars(sys.modules[module])[name] = subclass
    return subclass


def __getattr__(name: str) -> Any:
    return worker_class(name, __name__)


_DYNAMIC_BATCHING_SHARD = Replacement(
    module="roll.utils.dynamic_batching",
    name="dynamic_batching_shard",
    by=dynamic_batching_shard,
)
_REPLACEMENTS = (
    _DYNAMIC_BATCHING_SHARD,
    Replacement(
        module="roll.utils.sequence_packing",
        name="LoadBalancePacker.make_micro_batch_iter_for_sequence_packing",
        by=make_micro_batch_iter_for_sequence_packing,
    ),
    Replacement(
        module="roll.utils.functionals",
        name="get_seqlen_balanced_partitions",
        by=get_seqlen_balanced_partitions,
    ),
)

_ROLL = Integration("ROLL", *_REPLACEMENTS, package="roll", distribution="roll", tried=("8eb27cc",))
patch, unpatch = _ROLL.patch, _ROLL.unpatch
patch()
