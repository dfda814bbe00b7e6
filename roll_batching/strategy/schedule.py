"""One call of Megatron's forward-backward schedule over the micro-batches of a plan."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LayoutError
from roll_batching.megatron_patches.layers import router_padding_masked
from roll_batching.megatron_patches.planned_p2p import PlannedP2P
from roll_batching.modeling.experts import fit_router_loss_log, routed_padding
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import PackedBatch, StepPacks
from roll_batching.packing.pack_layout import PackLayout
from roll_batching.packing.params import PackedParams
from roll_batching.planning import Plan
from roll_batching.strategy.fault_messages import MicroBatchTracker

Packs = Sequence[PackedBatch] | StepPacks
LossBinder = Callable[[PackedBatch, Any], Callable[..., Any]]


def receive_shape(
    pack: PackLayout, layout: ParallelLayout, hidden_size: int, rows_form: bool = False
) -> tuple[int, int, int]:
    """Shape of a stage's input: [tokens / cp (/ tp with sequence parallelism), 1, hidden].

    In rows form: [length / cp (/ tp), rows, hidden].
    """
    split = pack.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
    rows = pack.rectangle_rows if rows_form else 1
    return pack.tokens // rows // split, rows, hidden_size


def layouts_of(packs: Packs) -> list[PackLayout]:
    """The layouts of all packs, without packing them."""
    return packs.layouts if isinstance(packs, StepPacks) else [pack.layout for pack in packs]


def run_schedule(
    plan: Plan,
    packs: Packs,
    chunks: Sequence[Any],
    bind_loss: LossBinder,
    layout: ParallelLayout,
    *,
    forward_only: bool = False,
    collect: bool = False,
    rows_form: bool = False,
    pg_collection: Any = None,
    experts: Any = None,
) -> list[Any]:
    """Runs Megatron's forward-backward schedule over `packs` of different lengths, also under a pipeline.

    Args:
        plan: the plan that the packs come from; its `group_size` orders interleaved schedules.
        packs: this rank's micro-batches; every pipeline stage passes the same.
        chunks: this stage's model chunks.
        bind_loss: (pack, chunk) -> the `loss_func` that Megatron calls with the chunk's output.
        layout: the parallel layout.
        forward_only: no backward pass.
        collect: return the results of the loss function (Megatron's `collect_non_loss_data`).
        rows_form: pass rectangles to the model as [rows, length], without PackedSeqParams.
        pg_collection: Megatron's process groups; None: those of its parallel state.
        experts: `modeling.router_replay.PassExperts` of a pass that replays or records experts.

    Returns:
        One entry per micro-batch on the last stage, an empty list elsewhere.

    Raises:
        LayoutError: when plan and packs, or plan and schedule, do not match.
        DeviceMemoryError: on a rank whose device runs out of memory; names micro-batch and key.
    """
    planned = plan.num_micro_batches if plan.blocks is None else len(plan.blocks.lists[layout.dp_rank])
    if len(packs) != planned:
        raise LayoutError(f"the plan has {planned} micro-batches of this rank and {len(packs)} were packed")
    if plan.blocks is not None:
        _set_context_groups(plan, packs, layout)
    config, pack_layouts = gpt_of(chunks[0]).config, layouts_of(packs)
    masks_padding = _masks_padding(chunks[0], forward_only=forward_only, pg_collection=pg_collection)
    if config.num_moe_experts is not None and not forward_only:
        fit_router_loss_log(config)
    tracker = MicroBatchTracker(plan, planned, train=not forward_only)

    if plan.slices is not None:
        return _run_slices(
            packs, chunks[0], bind_loss, layout, tracker, masks_padding, forward_only, collect, pg_collection
        )

    def forward_step(iterator: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
        pack = next(iterator)
        micro_batch = tracker.start_forward(pack, chunk)
        rows = pack.layout.rectangle_rows if rows_form else 1
        if experts is not None:
            experts.start(pack, chunk)
        extra = {}
        if masks_padding:
            extra["padding_mask"] = routed_padding(pack.padding_mask.view(rows, -1), gpt_of(chunk), layout)
        output = chunk(
            input_ids=pack.input_ids.view(rows, -1),
            position_ids=pack.params.positions.view(rows, -1),
            attention_mask=None,
            packed_seq_params=None if rows_form else pack.params,
            **extra,
        )
        tracker.watch_backward(output, pack, micro_batch)
        _release_after_last_use(pack.params, output, chunk, chunks, forward_only)
        return output, bind_loss(pack, chunk)

    interleaved = layout.vpp_size > 1
    changes, options = _changes_and_options(plan, pack_layouts, layout, config, rows_form, pg_collection)
    padding_masked = router_padding_masked(chunks) if masks_padding else contextlib.nullcontext()
    with tracker.explain_out_of_memory(), changed_attributes(config, changes), padding_masked:
        results = get_forward_backward_func(layout.pp_size, layout.vpp_size if interleaved else None)(
            forward_step_func=forward_step,
            # Each virtual stage reads all micro-batches, at its own pace.
            data_iterator=list(itertools.tee(packs, len(chunks))) if interleaved else iter(packs),
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=len(packs),
            seq_length=max(pack.tokens for pack in pack_layouts),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=collect,
            **options,
        )
    if "p2p_communicator" in options:
        options["p2p_communicator"].check_exhausted(forward_only)
    return results


def _run_slices(
    packs: Packs,
    chunk: Any,
    bind_loss: LossBinder,
    layout: ParallelLayout,
    tracker: MicroBatchTracker,
    masks_padding: bool,
    forward_only: bool,
    collect: bool,
    pg_collection: Any,
) -> list[Any]:
    """`run_schedule` for a plan whose packs are cut into slices."""
    from roll_batching.strategy.sliced_schedule import SlicedSchedule  # few plans have slices

    def forward(pack: PackedBatch, params: PackedParams) -> Any:
        place = params.place
        assert place is not None
        if place.first == 0:
            micro_batch = tracker.start_forward(pack, chunk)
        rows, extra = slice(place.first, place.last), {}
        if masks_padding:
            extra["padding_mask"] = routed_padding(pack.padding_mask[:, rows], gpt_of(chunk), layout)
        output = chunk(
            input_ids=pack.input_ids[:, rows],
            position_ids=params.positions[None],
            attention_mask=None,
            packed_seq_params=params,
            **extra,
        )
        if place.first == 0:
            tracker.watch_backward(output, pack, micro_batch)
        _release_after_last_use(params, output, chunk, (chunk,), forward_only)
        return output

    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    padding_masked = router_padding_masked((chunk,)) if masks_padding else contextlib.nullcontext()
    with tracker.explain_out_of_memory(), padding_masked:
        return SlicedSchedule(
            layouts_of(packs), iter(packs), chunk, forward, bind_loss, layout,
            forward_only=forward_only, collect=collect, pg_collection=groups,
        ).run()  # fmt: skip


def _changes_and_options(
    plan: Plan,
    pack_layouts: Sequence[PackLayout],
    layout: ParallelLayout,
    config: Any,
    rows_form: bool,
    pg_collection: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(attributes of the model's config to change during the schedule, arguments of the schedule)."""
    changes: dict[str, Any] = {}
    if layout.vpp_size > 1:
        # Megatron reads the group size from the model's config in each call of the schedule.
        changes["microbatch_group_size_per_vp_stage"] = plan.group_size
    if layout.pp_size == 1:
        return changes, {} if pg_collection is None else {"pg_collection": pg_collection}
    changes["variable_seq_lengths"] = True
    shapes = [receive_shape(pack, layout, config.hidden_size, rows_form) for pack in pack_layouts]
    communicator = PlannedP2P(layout.pp_group, config, shapes, layout.vpp_size, plan.group_size or 1)
    # The schedules take a communicator only together with process groups.
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return changes, {"pg_collection": groups, "p2p_communicator": communicator}


def _set_context_groups(plan: Plan, packs: Packs, layout: ParallelLayout) -> None:
    """Gives each pack the group of its context-parallel ranks, for a plan with a size per pack."""
    from roll_batching.distributed.parallel_layout import context_groups  # only such plans need them

    assert plan.blocks is not None
    groups = context_groups(layout, plan.blocks.sizes)
    if isinstance(packs, StepPacks):
        packs.set_context_groups(groups)
    else:
        for pack in packs:
            pack.params.set_context_group(groups.get(pack.layout.cp_size))


def _masks_padding(chunk: Any, *, forward_only: bool, pg_collection: Any) -> bool:
    """Whether routers must know the padding: they count tokens for their auxiliary losses."""
    gpt = gpt_of(chunk)
    if forward_only and pg_collection is not None and gpt.config.sequence_parallel:
        # Megatron (0.16 to 0.19) splits the mask over the ranks of its parallel state, not of `pg_collection`. Without
        # a backward pass no loss reads it.
        return False
    return gpt.config.num_moe_experts is not None and "padding_mask" in inspect.signature(gpt.forward).parameters


def _release_after_last_use(
    params: PackedParams, output: Any, chunk: Any, chunks: Sequence[Any], forward_only: bool
) -> None:
    """Releases the tensors that layers cache in `params` after their last use on this stage.

    In a forward-only pass that is the last chunk's forward. In training it is the end of the first chunk's backward:
    until then recomputed layers read them again.
    """
    if forward_only or not output.requires_grad:
        if chunk is chunks[-1]:
            params.release()
    elif chunk is chunks[0]:
        # The hook runs at the start of the backward pass; the engine's callback at its end.
        engine = torch.autograd.Variable._execution_engine
        output.register_hook(lambda _: engine.queue_callback(params.release))


@contextlib.contextmanager
def changed_attributes(owner: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which attributes of `owner` have other values."""
    before = {name: getattr(owner, name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
