"""One call of Megatron's forward-backward schedule over the micro-batches of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.parallel import ParallelLayout
from roll_batching.packing.batch import PackedBatch
from roll_batching.planning import Plan
from roll_batching.strategy.pipeline import PlannedP2P

LossBinder = Callable[[PackedBatch, Any], Callable[..., Any]]


def receive_shape(pack: PackedBatch, layout: ParallelLayout, hidden_size: int) -> tuple[int, int, int]:
    """Shape of a stage's input for this pack: [tokens / cp (/ tp with sequence parallelism), 1, hidden]."""
    split = layout.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
    return pack.layout.tokens // split, 1, hidden_size


def run_schedule(
    plan: Plan,
    packs: Sequence[PackedBatch],
    chunks: Sequence[Any],
    bind_loss: LossBinder,
    layout: ParallelLayout,
    *,
    forward_only: bool = False,
    collect: bool = False,
    pipeline_shapes: str = "planned",
) -> list[Any]:
    """Runs forward (and backward) over `packs`, each with its own length also under a pipeline.

    Args:
        plan: the plan that the packs come from; its `group_size` orders interleaved schedules.
        packs: this rank's micro-batches; every pipeline stage passes the same.
        chunks: this stage's model chunks.
        bind_loss: (pack, chunk) -> the loss function that Megatron calls with the chunk's output.
        layout: the parallel layout.
        forward_only: no backward pass.
        collect: hand back whatever the loss function returns instead of a loss.
        pipeline_shapes: "planned" (no exchange), or "exchanged" (Megatron's own, which waits for the device
            at every transfer and hangs or mis-pairs in some layouts).

    Returns:
        One entry per micro-batch on the last stage, an empty list elsewhere.

    Raises:
        LayoutError: when plan and packs, or plan and schedule, disagree.
    """
    if len(packs) != plan.num_micro_batches:
        raise LayoutError(f"the plan has {plan.num_micro_batches} micro-batches and {len(packs)} were packed")
    config = gpt_of(chunks[0]).config
    pads_matter = config.num_moe_experts is not None and _accepts_padding_mask(gpt_of(chunks[0]))

    def forward_step(iterator: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
        pack = next(iterator)
        extra = {"padding_mask": pack.padding_mask} if pads_matter else {}
        output = chunk(
            input_ids=pack.input_ids,
            position_ids=pack.params.positions[None],
            attention_mask=None,
            packed_seq_params=pack.params,
            **extra,
        )
        return output, bind_loss(pack, chunk)

    communicator, options = None, {}
    if layout.vpp_size > 1:
        config.microbatch_group_size_per_vp_stage = plan.group_size
    if layout.pp_size > 1 and pipeline_shapes == "planned":
        shapes = [receive_shape(pack, layout, config.hidden_size) for pack in packs]
        communicator = PlannedP2P(layout.pp_group, config, shapes, layout.vpp_size, plan.group_size)
        options = {
            "p2p_communicator": communicator,
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }
    interleaved = layout.vpp_size > 1
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(packs) for _ in chunks] if interleaved else iter(packs),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(packs),
        seq_length=max(pack.layout.tokens for pack in packs),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=collect,
        **options,
    )
    if communicator is not None:
        communicator.check_exhausted(forward_only)
    return results


def _accepts_padding_mask(gpt: Any) -> bool:
    return "padding_mask" in inspect.signature(gpt.forward).parameters
