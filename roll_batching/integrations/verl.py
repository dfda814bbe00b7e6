"""verl with our planner: its micro-batches and the balance of its data-parallel ranks.

Importing this module replaces `rearrange_micro_batches` and `get_seqlen_balanced_partitions`; through them
`prepare_dynamic_batch` and `_balance_batch`. verl imports it by itself when its YAML says so:

    actor_rollout_ref: {model: {external_lib: roll_batching.integrations.verl}}

or with VERL_USE_EXTERNAL_MODULES=roll_batching.integrations.verl in the environment. Kept of verl: the batch stays on
its rank, all ranks have the same count, a multiple of `num_batches_divided_by`; no micro-batch is empty; indices come
sorted in a micro-batch; a sample longer than the cap is an AssertionError. A rank that cannot read its lengths is an
AssertionError on all ranks.

Source: verl/utils/seqlen_balancing.py of verl 0.9.1 and of main at 1dda039.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll_batching.integrations.host_plans import (
    HostSamples,
    Lengths,
    balanced_partitions,
    gather_samples,
    joined_prefixes,
    pipeline_size,
    plan_on_home_ranks,
)
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import PlanConstraints, SharedPrefixes


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """The micro-batches of this rank's `batch` (TensorDict), and the indices of each in it.

    Collective over `dp_group` where it is given and `same_micro_num_in_dp`. `use_dynamic_bsz_balance` is not read: the
    order of micro-batches follows the pipeline either way. Raises AssertionError and PlanError, the same on all ranks.
    """
    from verl.utils import tensordict_utils

    samples, rank = gather_samples(lambda: _samples(batch), dp_group if same_micro_num_in_dp else None)
    parts = [part.lengths for part in samples]
    longest = max(int(part.max(initial=0)) for part in parts)
    if longest > max_token_len:
        raise AssertionError(
            f"max_token_len must be greater than the sequence length. Got {max_token_len=}, {longest=}"
        )
    if any(len(part) % force_group_size for part in parts):
        sizes = [len(part) for part in parts]
        raise AssertionError(f"Batch sizes {sizes} must be divisible by force_group_size {force_group_size}")
    bins = plan_bins(
        parts,
        max_token_len,
        multiple=num_batches_divided_by or 1,
        least=min_num_micro_batch or 1,
        group_size=force_group_size,
        prefixes=joined_prefixes(samples),
    )[rank]
    return [tensordict_utils.index_select_tensor_dict(batch, indices) for indices in bins], bins


def plan_bins(
    parts: Sequence[Lengths],
    max_tokens: int,
    *,
    multiple: int = 1,
    least: int = 1,
    group_size: int = 1,
    prefixes: SharedPrefixes | None = None,
) -> list[list[list[int]]]:
    """Indices into each rank's `parts`, by rank and micro-batch; samples stay on their rank.

    `group_size` and `prefixes` are those of `plan_on_home_ranks`. Raises PlanError when samples are too few.
    """
    pp_size = pipeline_size()
    constraints = PlanConstraints(
        dp_size=len(parts),
        max_tokens=int(max_tokens),
        pp_size=pp_size,
        num_micro_batches_multiple=int(multiple),
        min_num_micro_batches=int(least),
        fillers=False,
        oversize="alone",
        # FSDP gathers parameters layer by layer: ranks meet at every micro-batch.
        objective="auto" if pp_size > 1 else "lockstep",
    )
    return plan_on_home_ranks(parts, constraints, group_size=group_size, prefixes=prefixes)


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Parts of near-equal sums, items sorted in each; with `equal_size` of equal numbers of items.

    Raises AssertionError for fewer items than parts, for numbers that do not divide, and for empty parts.
    """
    return balanced_partitions(seqlen_list, k_partitions, equal_size)


def _samples(batch: Any) -> HostSamples:
    """The samples of a batch of jagged or padded rows."""
    ids = batch["input_ids"]
    if ids.is_nested:
        return HostSamples.of(ids.offsets().diff().cpu().numpy(), "verl", lambda: ids.values().cpu().numpy())
    mask = batch["attention_mask"]
    return HostSamples.of(mask.sum(dim=1).cpu().numpy(), "verl", lambda: ids[mask.bool()].cpu().numpy())


_REPLACEMENTS = (
    Replacement(
        module="verl.utils.seqlen_balancing",
        name="rearrange_micro_batches",
        by=rearrange_micro_batches,
    ),
    Replacement(
        module="verl.utils.seqlen_balancing",
        name="get_seqlen_balanced_partitions",
        by=get_seqlen_balanced_partitions,
    ),
)

_VERL = Integration("verl", *_REPLACEMENTS, package="verl", distribution="verl", tried=("0.9.1", "main at 1dda039"))
patch, unpatch = _VERL.patch, _VERL.unpatch
patch()
