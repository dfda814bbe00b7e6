"""One optimizer step, skipped on all ranks if the gradient norm is not finite, and its result.

A result is the loss, metrics and gradient norm over all ranks, or one error on all.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LossError
from roll_batching.losses.contract import HostMetric, as_numbers, join_parts, to_host
from roll_batching.losses.runner import LossRunner, MicroBatchRecord
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import unpack_results
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.settings import MegatronConfig, TrainingArgs
from roll_batching.settings.training import rate_problem
from roll_batching.strategy.fault_messages import describe_weights
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.schedule import Packs, layouts_of
from roll_batching.strategy.step_clock import Phase

_MAX_GRAD_SQUARE = torch.finfo(torch.float32).max / 2
"""Megatron adds the squares in fp32: below this its norm is finite in any order of summation."""

_LAYER_WISE_LISTS = ("dp_cp_params_list", "expt_dp_params_list")
"""Attributes of a layer-wise optimizer: parameters by the rank of the group that steps them; None: one rank."""


def grad_square_sum(chunks: Sequence[Any]) -> torch.Tensor:
    """The sum of squares of the gradients of `chunks`: fp64 scalar on their device, without a host read.

    Call it after the schedule, when gradients are reduced.
    """
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in _gradients(chunks)]
    # A stage whose parameters are all frozen has no gradients.
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def step_optimizer(optimizer: Any, chunks: Sequence[Any], grad_square: float) -> float | None:
    """Steps a Megatron optimizer and returns the gradient norm before clipping; None for a skipped step. Collective.

    A skipped step leaves weights and moments untouched. Megatron's optimizers look for infinities only where they have
    a loss scale; without one they would step on NaN. With one, a dynamic scale still comes down, as in Megatron's loop.

    Args:
        optimizer: a Megatron optimizer over the parameters of `chunks`.
        chunks: this stage's model chunks, with reduced gradients.
        grad_square: `grad_square_sum`, added up over all ranks.
    """
    if not grad_square < _MAX_GRAD_SQUARE:  # NaN included
        if has_loss_scale(optimizer):
            # The optimizer's own overflow check lowers the scale. Each chained optimizer checks its own gradients over
            # its own group of ranks: infinities in all of them keep the scales equal.
            for gradient in _gradients(chunks):
                gradient.fill_(float("inf"))
            optimizer.step()
        return None
    stepped, norm, _ = optimizer.step()
    if not stepped:
        return None
    return float(norm) if norm is not None else float(optimizer.get_grad_norm())


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The members of a ChainedOptimizer (dense and expert parameters, say) and of chains in it, or the optimizer."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [part for link in optimizer.chained_optimizers for part in optimizer_parts(link)]


def layer_wise_chains(optimizer: Any) -> list[Any]:
    """Megatron's layer-wise distributed optimizers in `optimizer`: each DP rank steps some of their parameters."""
    if any(kind.__name__ == "LayerWiseDistributedOptimizer" for kind in type(optimizer).__mro__):
        return [optimizer]
    return [chain for link in getattr(optimizer, "chained_optimizers", ()) for chain in layer_wise_chains(link)]


def layer_wise_parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    """Parameters of the layer-wise optimizers that any DP rank steps; empty where one rank steps them all."""
    lists = [getattr(c, name) or () for c in layer_wise_chains(optimizer) for name in _LAYER_WISE_LISTS]
    return [parameter for of_ranks in lists for of_rank in of_ranks for parameter in of_rank]


def has_loss_scale(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by a loss scale (fp16, or bf16 with a constant one)."""
    return any(getattr(part, "grad_scaler", None) is not None for part in optimizer_parts(optimizer))


def free_optimizer_memory(chunks: Sequence[Any]) -> None:
    """Frees the memory that a deleted optimizer has left on the parameters of `chunks`."""
    for chunk in chunks:
        gpt_of(chunk).config.grad_scale_func = None  # a method of the optimizer
        for parameter in chunk.parameters():
            if hasattr(parameter, "main_param"):  # its fp32 copy
                del parameter.main_param
    gc.collect()  # Megatron's optimizers are reference cycles


def _gradients(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """The gradients of `chunks`: DDP's flat buffers, or those of each parameter without DDP."""
    gradients: list[torch.Tensor] = []
    for chunk in chunks:
        if hasattr(chunk, "buffers") and hasattr(chunk, "expert_parallel_buffers"):
            gradients += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        else:
            gradients += [p.grad for p in chunk.parameters() if p.grad is not None]
    return gradients


def with_optimizer(state: ModelState, training: TrainingArgs, megatron: MegatronConfig) -> ModelState:
    """`state` with a newly built optimizer and learning-rate schedule."""
    from roll_batching.modeling.builder import build_optimizer, build_scheduler  # as in `initialize`

    optimizer = build_optimizer(list(state.chunks), training, megatron, state.dtype)
    scheduler = build_scheduler(optimizer, training, max(training.max_steps, 1))
    assert state.training is not None  # set by _prepare
    return replace(state, training=replace(state.training, optimizer=optimizer, scheduler=scheduler))


def check_training_args(state: ModelState, training: TrainingArgs, optimizer: str) -> None:
    """Raises `LossError`, on all ranks, for another `optimizer` than the model's, or a bad schedule. Collective."""
    with consensus(state.layout.host_group, "start_phase") as facts:
        if training.optimizer != optimizer:
            raise LossError(
                f"training_args.optimizer is {training.optimizer}, and the model was wrapped for {optimizer}, whose "
                f"gradients may be shards: set {optimizer}, or build another strategy"
            )
        if training.max_steps < 1 and training.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise LossError(
                f"lr_scheduler_type {training.lr_scheduler_type!r} needs training_args.max_steps, the optimizer steps "
                "that it spans"
            )
        if (problem := rate_problem(training)) is not None:
            raise LossError(f"training_args.{' '.join(problem)}")
        facts.equal("training_args", training)


# ---- results


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Loss, metrics, timing and FLOPs of one optimizer step; all but the times are equal on every rank."""

    loss: float
    """The loss over the whole mini-batch."""
    joined_metrics: dict[str, HostMetric]
    """Metrics of the loss over all micro-batches and ranks, with their kinds, so that steps can be joined too."""
    grad_norm: float
    """Gradient norm before clipping; NaN when it caused a skip, 0 when no token counted."""
    lr: float
    """Learning rate of the step."""
    loss_scale: float | None
    """Factor of the loss in backward, by which gradients were divided again; None without one."""
    skipped: bool
    """Whether the optimizer did not step: the gradient norm is not finite, or no mask of the loss counts a token."""
    seconds: float
    """Duration of the step on this rank, from packing to the updated weights; the device has finished them by then."""
    tokens: int
    """Real tokens of all ranks."""
    phases: dict[Phase, float]
    """Seconds of each phase on this rank: see `PHASES`."""
    flops: float | None
    """Forward and backward FLOPs of all ranks' real tokens, by `modeling.cost`, common prefixes of a pack once; None if
    the cost model has another unit."""
    unshared_flops: float | None
    """FLOPs if every sample computed all its tokens, common prefixes included."""
    ranks: int
    """World size."""
    device_rate: float | None
    """Peak FLOP per second of one device, from its datasheet; None for an unknown device."""
    predicted_over_measured: float | None
    """Predicted / measured seconds of the passes by `StepPrediction`, on rank 0; None without a file of rates."""

    @property
    def metrics(self) -> dict[str, float]:
        """The loss's metrics as numbers."""
        return as_numbers(self.joined_metrics)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs per second and rank."""
        return None if self.flops is None else self.flops / self.seconds / self.ranks

    @property
    def unshared_flops_per_second(self) -> float | None:
        """`flops_per_second` of an equally long step that computes every sample by itself."""
        return None if self.unshared_flops is None else self.unshared_flops / self.seconds / self.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: `flops_per_second` / `device_rate`."""
        rate = self.flops_per_second
        return None if rate is None or self.device_rate is None else rate / self.device_rate


@dataclass(frozen=True, kw_only=True)
class _RankResult:
    """Loss, metrics and errors of a pass on one rank, or joined over several."""

    loss: float
    metrics: Sequence[dict[str, HostMetric]]
    """One entry per reporting rank."""
    grad_square: float
    """Sum of squares of the gradients, replicas included; 0 in passes without gradient."""
    problems: tuple[str, ...]
    """Errors of the loss, such as a value that is not finite; empty: none."""
    infinite: bool
    """Whether a loss is not finite."""

    @classmethod
    def join(cls, results: Sequence[_RankResult]) -> _RankResult:
        return cls(
            loss=sum(result.loss for result in results),
            metrics=[metrics for result in results for metrics in result.metrics],
            grad_square=sum(result.grad_square for result in results),
            problems=tuple(dict.fromkeys(problem for result in results for problem in result.problems)),
            infinite=any(result.infinite for result in results),
        )


def join_results(
    state: ModelState,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    grad_square: Callable[[], torch.Tensor] | None = None,
) -> tuple[float, dict[str, HostMetric], float]:
    """(loss, metrics, sum of squares of the gradients) of a pass over all ranks. Collective.

    One exchange, right after the first host read of the step, carries loss, metrics and errors together: a rank that
    found a bad loss cannot leave the others waiting in a later collective.

    Args:
        state: the model.
        records: this rank's loss and metrics per micro-batch.
        runner: the loss; its `error` is an error of the loss on this rank.
        grad_square: computes the sum of squares of this rank's gradients, on the device; None: no gradient.

    Raises:
        LossError: on all ranks, where a loss is not finite or broke its contract on any; names the samples.
    """
    layout = state.layout
    results = layout.team.join(
        "the step's loss", lambda: _rank_result(layout, records, runner, grad_square), _RankResult.join
    )
    total = _RankResult.join(results)
    if total.problems:
        weights = f". {describe_weights(state)}" if total.infinite else ""
        raise LossError("; ".join(total.problems) + weights) from runner.error
    return total.loss, join_parts(total.metrics), total.grad_square


def _rank_result(
    layout: ParallelLayout,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    grad_square: Callable[[], torch.Tensor] | None,
) -> _RankResult:
    # Queued on the device before the host read below, so that one wait covers both.
    square = None if grad_square is None else grad_square()
    losses, metrics = to_host([r.loss for r in records], [r.metrics for r in records if r.is_counted])
    problem = None if runner.error is None else str(runner.error)
    bad = [r for r, value in zip(records, losses, strict=True) if not math.isfinite(value)]
    if problem is None and bad:
        samples = sorted({sample for record in bad for sample in record.nonfinite_samples()})
        value = losses[records.index(bad[0])]
        problem = (
            f"the loss is {value} for sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:16]))}: "
            "look at these samples' fields and at what the loss computes from them. The optimizer made no step"
        )
    # Tensor-parallel ranks compute the same loss: one reports it. Context-parallel ranks report records that count.
    is_reporting = layout.is_last_stage and layout.tp_rank == 0
    counted = sum(value for record, value in zip(records, losses, strict=True) if record.is_counted)
    return _RankResult(
        loss=counted if is_reporting else 0.0,
        metrics=[metrics] if is_reporting and metrics else [],
        grad_square=0.0 if square is None else float(square),
        problems=() if problem is None else (problem,),
        infinite=bool(bad),
    )


def share_outputs(
    state: ModelState, local: SampleBatch, plan: Plan, packs: Packs, results: Sequence[torch.Tensor], names: list[str]
) -> SampleBatch:
    """The outputs `names` of a forward pass, [tokens, names] per pack, as fields of `local` on the host. Collective.

    Only the last stage has them; all ranks of the replica return them.
    """
    outputs = share_columns(state, local, plan, packs, results, len(names))
    fields = {name: outputs[:, i].contiguous() for i, name in enumerate(names)}
    return SampleBatch(local.ids, local.lengths, fields, dict.fromkeys(names, FieldSpec("next_token")))


def share_columns(
    state: ModelState, local: SampleBatch, plan: Plan, packs: Packs, results: Sequence[torch.Tensor], columns: int
) -> torch.Tensor:
    """Outputs of a forward pass, [tokens, columns] per pack, in the order of `local`, on the host. Collective."""
    layout = state.layout
    outputs = torch.zeros(local.num_tokens, columns, dtype=state.result_dtype, device=layout.device)
    if layout.is_last_stage and len(local):
        outputs = unpack_results(local, plan, layouts_of(packs), results, dp_rank=layout.dp_rank).to(outputs.dtype)
    if layout.pp_size > 1:
        last = dist.get_global_rank(layout.pp_group, layout.pp_size - 1)
        dist.broadcast(outputs, last, group=layout.pp_group)
    return outputs.cpu()
