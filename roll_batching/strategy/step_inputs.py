"""Inputs of a pass: this rank's packs and loss denominators, with the checks on samples and plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.distributed import Facts
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.distributed.team import Team
from roll_batching.errors import DataError, LayoutError
from roll_batching.losses.contract import LossSpec, head_count
from roll_batching.losses.denominators import RolloutCounts, StepCounts, local_counts, truncated_lengths
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.layers import recurrent_layers
from roll_batching.packing.batch import StepPacks
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import ROUTED_EXPERTS
from roll_batching.samples.flatten import content_digest
from roll_batching.samples.length_table import require_batch
from roll_batching.samples.token_fields import check_shared_rows, inputs_of, token_place
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.pack_features import sharing_obstacle, slice_obstacle

SAME_BLOCK_SAMPLES = (
    "ranks that compute a pack together have different samples of it: pass the result of distribute(batch, plan)"
)
SAME_SAMPLES = "Give all tensor-, context- and pipeline-parallel ranks of a data-parallel rank the same samples"


def pack_inputs(
    state: ModelState, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None
) -> StepPacks:
    """This rank's micro-batches, checked now and packed when the schedule asks for them.

    Call it inside a consensus: `facts` receives what all ranks must agree on.

    Args:
        state: the model.
        facts: of the consensus around the call.
        local: this rank's samples.
        plan: the plan of all ranks.
        masks: names of the fields that say which tokens count; None: all tokens that predict.

    Raises:
        DataError: for samples or masks that cannot be packed, or that the model cannot take.
        LayoutError: for a plan of another layout.
    """
    require_batch("a pass", local)
    if isinstance(masks, str) or (masks is not None and not len(masks)):
        raise DataError(
            f"masks={masks!r} names no field that counts: give a tuple of names, or None for every position"
        )
    layout = state.layout
    _check_plan(plan, state)
    if plan.shared.any():
        check_shared_rows(local, plan, layout.dp_rank)
    replayed = _replay_options(local, plan, state) if ROUTED_EXPERTS in local else {}
    facts.equal("whether the batch has routed_experts", ROUTED_EXPERTS in local)
    images = None
    if state.vision is not None or any(spec.kind == "rows" for spec in local.schema.values()):
        from roll_batching.strategy.images import images_of  # few models take images

        images = images_of(local, state, plan)
    check_window(int(plan.used[plan.samples].max(initial=0)), state)
    facts.equal("the plan", plan.fingerprint, "Plan on all ranks from the same lengths and constraints")
    packs = StepPacks(
        local,
        plan,
        dp_rank=layout.dp_rank,
        cp_rank=layout.cp_rank,
        masks=masks,
        rotation_cp=(layout.cp_size, layout.cp_rank) if state.rotates_rows else None,
        is_first_stage=layout.pp_rank == 0,
        is_last_stage=layout.is_last_stage,
        heads=state.heads,
        images=images,
        **pack_options(state),
        **replayed,
    )
    check_tokens(local, state)
    check_positions(max((pack.longest_sequence for pack in packs.layouts), default=0), state)
    if plan.blocks is not None and local.origin is None:
        facts.balanced(_block_balance(local, plan, layout.dp_rank), SAME_BLOCK_SAMPLES)
    # Ranks of a replica with different samples of equal lengths would train on a mixture, without any error.
    if layout.tp_size * layout.cp_size * layout.pp_size > 1:
        content = local.origin or content_digest(local.ids, local.lengths, local.fields)
        facts.equal_in_replica("the batch of a replica", content, SAME_SAMPLES)
    return packs


def pack_options(state: ModelState) -> dict[str, Any]:
    """Arguments of `StepPacks` that are the same in all passes of a model."""
    config, options = gpt_of(state.chunks[0]).config, {"device": state.device, "attention": state.attention}
    if recurrent_layers(config) is None:
        return options
    from roll_batching.modeling.recurrent_packs import recurrent_packs  # few models need it

    return {**options, "recurrent": recurrent_packs(config, state.settings.recurrent_context_parallel)}


def _replay_options(local: SampleBatch, plan: Plan, state: ModelState) -> dict[str, Any]:
    """Checks the recorded expert choices of `local` and returns the `StepPacks` arguments that replay them."""
    from roll_batching.modeling.router_replay import check_experts, replay_options, require_replay  # few passes replay

    require_replay(state.chunks, plan, rows_form=state.settings.rows_form)
    inputs = inputs_of(local)
    check_experts(inputs, state.chunks)
    return replay_options(inputs, state.chunks, state.layout)


def _block_balance(local: SampleBatch, plan: Plan, dp_rank: int) -> int:
    """A number for `Facts.balanced`: its sum over all ranks is 0 if the ranks of each block hold the same samples."""
    balance = 0
    for mb in plan.micro_batches[dp_rank]:
        if mb.cp_size > 1:
            samples = local.select_ids(plan.ids[mb.samples])
            content = content_digest(samples.ids, samples.lengths, samples.fields) >> 30  # sums stay below 2^63
            balance += content * (mb.cp_size - 1) if mb.ranks.start == dp_rank else -content
    return balance


def check_tokens(batch: SampleBatch, state: ModelState) -> None:
    """Raises `DataError` for a token outside the model's vocabulary.

    Megatron does not: a vocabulary-parallel embedding reads zeros for such a token, and one without tensor parallelism
    fails on its rank alone while the others wait. As a label it has no logit.
    """
    if not batch.num_tokens or "input_ids" not in batch:  # a pipeline stage may lack fields that it does not read
        return
    ids, count = batch["input_ids"], state.vocab_size or gpt_of(state.chunks[0]).vocab_size
    lowest, largest = (int(x) for x in ids.aminmax())
    if 0 <= lowest and largest < count:
        return
    index = int(((ids < 0) | (ids >= count)).nonzero()[0])
    sample, position = token_place(batch, index)
    raise DataError(
        f"sample {sample} has the token {int(ids[index])} at position {position}, and the model the tokens 0 to "
        f"{count - 1}: encode with the tokenizer that belongs to the model, or give the model the vocab_size that the "
        "tokenizer has with its added tokens"
    )


def check_candidates(batch: SampleBatch, name: str | None, state: ModelState) -> None:
    """Raises `DataError` for ids in the field `name` of a loss's candidates that are no tokens of the model.

    They have no logit, and would get a log-prob all the same. A field that is missing is an error where it is read.
    """
    if name is None or name not in batch or not batch[name].numel():
        return
    ids, count = batch[name], state.vocab_size or gpt_of(state.chunks[0]).vocab_size
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise DataError(f"{name} has {ids.dtype}: give int32 or int64, the ids of tokens")
    with _disable_current_modes():  # a rehearsal computes on fake tensors, but its samples have values
        lowest, largest = (int(x) for x in ids.aminmax())
    if lowest < 0 or largest >= count:
        wrong = lowest if lowest < 0 else largest
        raise DataError(
            f"{name} has the token {wrong}, and the model the tokens 0 to {count - 1}: take a teacher with the "
            "student's vocabulary"
        )


def check_positions(longest: int, state: ModelState) -> None:
    """Raises `DataError` if `longest` positions, padding included, exceed the model's learned position embeddings.

    Without the check only the first pipeline stage would fail, on the rank with that sequence.
    """
    gpt = gpt_of(state.chunks[0])
    if gpt.position_embedding_type == "learned_absolute" and longest > gpt.max_sequence_length:
        raise DataError(
            f"a sequence takes {longest} positions, alignment and padding included, and the model has learned "
            f"{gpt.max_sequence_length} (max_sequence_length): leave longer samples out, cut them (oversize: "
            "truncate, with a cap), lower padded_length or max_new_tokens, or build the model with more"
        )


def _check_plan(plan: Plan, state: ModelState) -> None:
    """Raises `LayoutError` for a plan of another layout, or of packs that the model cannot compute."""
    layout = state.layout
    if not isinstance(plan, Plan):
        raise LayoutError(f"plan is a {type(plan).__name__}: pass what strategy.plan(table) or plan_step returns")
    planned = plan.constraints
    for name in ("dp_size", "tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "sequence_parallel"):
        if getattr(planned, name) != getattr(layout, name):
            raise LayoutError(
                f"the plan was made for {name}={getattr(planned, name)} and this job runs {getattr(layout, name)}: "
                "plan with strategy.plan(...) or with the constraints of this layout"
            )
    if plan.blocks is not None:
        from roll_batching.strategy.pack_features import context_size_obstacle  # only such plans need it

        if (obstacle := context_size_obstacle(state)) is not None:
            raise LayoutError(f"packs have different context-parallel sizes, but {obstacle}; or plan with one size")
    if plan.slices is not None and (obstacle := slice_obstacle(state)) is not None:
        raise LayoutError(f"packs of the plan are cut into slices, but {obstacle}; or plan with pipeline_slices=1")
    if plan.shared.any() and (obstacle := sharing_obstacle(state)) is not None:
        raise LayoutError(f"samples of the plan share prefixes, but {obstacle}; or plan without prefixes")


def check_window(longest: int, state: ModelState) -> None:
    """Raises `LayoutError` if `longest` tokens exceed a sliding window that the attention core ignores."""
    window = _ignored_window(state)
    if window is not None and longest > window:
        raise LayoutError(
            f"a sample has {longest} tokens and the model a sliding window of {window}: attention is full here, which "
            "is the same up to that length alone. Leave longer samples out, or lower max_new_tokens"
        )


def _ignored_window(state: ModelState) -> int | None:
    """Size of the model's sliding window in tokens, if its attention core attends to all tokens; else None."""
    applies_window = getattr(state.attention, "windows", False)
    if state.architecture is not None:
        return None if applies_window else state.architecture.sliding_window
    config = gpt_of(state.chunks[0]).config
    applies_window = state.attention is None or applies_window
    if applies_window or config.window_size is None or config.window_size[0] < 0:
        return None
    return int(config.window_size[0]) + 1  # Megatron counts the tokens to the left


def count_local(layout: ParallelLayout, local: SampleBatch, plan: Plan | None, spec: LossSpec) -> StepCounts:
    """Loss denominators over this rank's planned samples, or over all of `local` if `plan` is None.

    Pipeline stages before the last may lack the loss's fields: they contribute nothing, the last stage counts.
    """
    if plan is None:
        return local_counts(local, spec.masks, spec.sums, heads=spec.heads, rollouts=spec.rollouts)
    if local.origin is not None and not layout.is_last_stage:
        names = [*spec.masks, *map(head_count, range(1, spec.heads + 1))]
        return StepCounts(
            tokens=dict.fromkeys(names, 0),
            sequences=dict.fromkeys(names, 0),
            # `Team.agree` takes the maximum of the int64 bits within a replica: those of -0.0 are the lowest.
            sums=dict.fromkeys(spec.sums, -0.0),
            rollouts=dict.fromkeys(spec.masks if spec.rollouts else (), RolloutCounts(*np.zeros((3, 0), np.int64))),
        )
    rows = local.rows_of(plan.ids[plan.counted_samples(layout.dp_rank)])
    used = truncated_lengths(plan, layout.dp_rank)
    return local_counts(local, spec.masks, spec.sums, used, rows, spec.heads, spec.rollouts)


def count_all(team: Team, local: StepCounts, total: torch.Tensor) -> StepCounts:
    """The counts of all ranks, from this rank's and the reduced vector of all. Collective for counts of rollouts."""
    counts = local.with_vector(total)
    if not counts.rollouts:
        return counts
    # Ranks of a replica count the same samples, but for early pipeline stages, which may count none.
    parts = team.join("counts", lambda: counts.rollouts, lambda of_ranks: max(of_ranks, key=_tokens))
    joined = {name: RolloutCounts.join([part[name] for part in parts]) for name in counts.rollouts}
    return dataclasses.replace(counts, rollouts=joined)


def _tokens(rollouts: Mapping[str, RolloutCounts]) -> int:
    return sum(int(counts.tokens.sum()) for counts in rollouts.values())
