"""What a pass takes: this rank's packs, checked against its model and against what other ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll_batching.distributed import Facts
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError, LayoutError
from roll_batching.losses.contract import LossSpec
from roll_batching.losses.denominators import StepCounts, local_counts, truncated_lengths
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import StepPacks
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.checks import content_digest
from roll_batching.samples.table import require_batch
from roll_batching.strategy.state import ModelState

SAME_SAMPLES = "Give all tensor-, context- and pipeline-parallel ranks of a data-parallel rank the same samples"


def pack_inputs(
    state: ModelState, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None
) -> StepPacks:
    """This rank's micro-batches; `facts` hears what other ranks must have as well. Inside a consensus.

    What can be wrong with them is found here; they are packed when the schedule asks for them.
    """
    require_batch("a pass", local)
    if isinstance(masks, str) or (masks is not None and not len(masks)):
        raise DataError(
            f"masks={masks!r} names no field that counts: give a tuple of names, or None for every position"
        )
    layout = state.layout
    _check_plan(plan, layout)
    check_window(int(plan.used[plan.samples].max(initial=0)), state)
    facts.equal("the plan", plan.fingerprint, "Plan on all ranks from the same lengths and constraints")
    packs = StepPacks(
        local,
        plan,
        dp_rank=layout.dp_rank,
        cp_rank=layout.cp_rank,
        device=state.device,
        masks=masks,
        tokens=int(plan.tokens.max()) if state.settings.pipeline_shapes == "shared" else None,
        attention=state.attention,
        is_first_stage=layout.pp_rank == 0,
        is_last_stage=layout.is_last_stage,
    )
    check_tokens(local, state)
    check_positions(max((int(pack.segments.max()) for pack in packs.layouts), default=0), state)
    if layout.tp_size * layout.cp_size * layout.pp_size > 1:
        content = local.origin or content_digest(local.ids, local.lengths, local.fields)
        facts.equal_in_replica("the batch of a replica", content, SAME_SAMPLES)
    return packs


def check_tokens(batch: SampleBatch, state: ModelState) -> None:
    """Raises `DataError` for a token outside the model's vocabulary.

    Nobody else would, on all ranks: an embedding fails on the rank that has the token alone, and one that is divided by
    tensor parallelism reads zeros; a label that no column stands for has the log-prob of nothing.
    """
    if not batch.num_tokens or "input_ids" not in batch:  # a stage that does not read them may have none
        return
    ids, count = batch["input_ids"], state.vocab_size or gpt_of(state.chunks[0]).vocab_size
    lowest, largest = (int(x) for x in ids.aminmax())
    if 0 <= lowest and largest < count:
        return
    at = int(((ids < 0) | (ids >= count)).nonzero()[0])
    row = int(torch.searchsorted(batch.offsets, at, right=True)) - 1
    raise DataError(
        f"sample {int(batch.ids[row])} has the token {int(ids[at])} at position {at - int(batch.offsets[row])}, and "
        f"the model the tokens 0 to {count - 1}: encode with the tokenizer that belongs to the model, or give the "
        "model the vocab_size that the tokenizer has with its added tokens"
    )


def check_positions(longest: int, state: ModelState) -> None:
    """Raises `DataError` where a sequence of `longest` positions, its padding among them, is longer than the model's
    table of learned positions: nobody but the pipeline's first stage would, and only on the ranks that have it.
    """
    gpt = gpt_of(state.chunks[0])
    if gpt.position_embedding_type == "learned_absolute" and longest > gpt.max_sequence_length:
        raise DataError(
            f"a sequence takes {longest} positions, alignment and padding included, and the model has learned "
            f"{gpt.max_sequence_length} (max_sequence_length): leave longer samples out, cut them (oversize: "
            "truncate, with a cap), lower padded_length or max_new_tokens, or build the model with more"
        )


def _check_plan(plan: Plan, layout: ParallelLayout) -> None:
    if not isinstance(plan, Plan):
        raise LayoutError(f"plan is a {type(plan).__name__}: pass what strategy.plan(table) or plan_step returns")
    planned = plan.constraints
    for name in ("dp_size", "tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "sequence_parallel"):
        if getattr(planned, name) != getattr(layout, name):
            raise LayoutError(
                f"the plan was made for {name}={getattr(planned, name)} and this job runs {getattr(layout, name)}: "
                "plan with strategy.plan(...) or with the constraints of this layout"
            )


def check_window(longest: int, state: ModelState) -> None:
    """Raises `LayoutError` where a sample of `longest` tokens reaches beyond a window that attention does not heed."""
    window = _unheeded_window(state)
    if window is not None and longest > window:
        raise LayoutError(
            f"a sample has {longest} tokens and the model a sliding window of {window}: attention is full here, which "
            "is the same up to that length alone. Leave longer samples out, or lower max_new_tokens"
        )


def _unheeded_window(state: ModelState) -> int | None:
    """Tokens that a position sees by the model's settings, itself included, where its attention is full."""
    if state.architecture is not None:
        return state.architecture.sliding_window
    config = gpt_of(state.chunks[0]).config
    heeds = state.attention is None or getattr(state.attention, "windows", False)
    if heeds or config.window_size is None or config.window_size[0] < 0:
        return None
    return int(config.window_size[0]) + 1


def counts_here(layout: ParallelLayout, local: SampleBatch, plan: Plan | None, spec: LossSpec) -> StepCounts:
    """Denominators over this rank's planned samples, or over all of `local` where `plan` is None.

    A stage that was handed less than its replica's last one leaves it to that to count.
    """
    if plan is None:
        return local_counts(local, spec.masks, spec.sums)
    if local.origin is not None and not layout.is_last_stage:
        return StepCounts(
            tokens=dict.fromkeys(spec.masks, 0),
            sequences=dict.fromkeys(spec.masks, 0),
            sums=dict.fromkeys(spec.sums, -0.0),  # below all that its last stage may say, as `Team.agree` compares
        )
    rows = local.rows_of(plan.ids[plan.rank_samples(layout.dp_rank)])
    return local_counts(local, spec.masks, spec.sums, truncated_lengths(plan, layout.dp_rank), rows)
