"""One optimizer step, skipped on all ranks if the gradient norm is not finite."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from roll_batching.distributed import consensus
from roll_batching.errors import LossError
from roll_batching.settings import MegatronConfig, TrainingArgs
from roll_batching.settings.training import rate_problem
from roll_batching.strategy.model_state import ModelState

_MAX_GRAD_SQUARE = torch.finfo(torch.float32).max / 2
"""Megatron adds the squares in fp32: below this its norm is finite in any order of summation."""


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
    """The members of a ChainedOptimizer (dense and expert parameters, say), or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def has_loss_scale(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by a loss scale (fp16, or bf16 with a constant one)."""
    return any(getattr(part, "grad_scaler", None) is not None for part in optimizer_parts(optimizer))


def free_optimizer_memory(chunks: Sequence[Any]) -> None:
    """Frees what an optimizer without references has left on the parameters of `chunks`."""
    for chunk in chunks:
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


def check_training_args(state: ModelState, training: TrainingArgs) -> None:
    """Raises `LossError`, on all ranks, for a schedule that cannot be built. Collective."""
    with consensus(state.layout.host_group, "start_phase") as facts:
        if training.max_steps < 1 and training.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise LossError(
                f"lr_scheduler_type {training.lr_scheduler_type!r} needs training_args.max_steps, the optimizer steps "
                "that it spans"
            )
        if (problem := rate_problem(training)) is not None:
            raise LossError(f"training_args.{' '.join(problem)}")
        facts.equal("training_args", training)
