"""The loss scale of fp16: its value, and the end of a training whose gradients overflow at the smallest scale.

Megatron's optimizer holds the scale (megatron/core/optimizer/grad_scaler.py), halves it after overflows and doubles it
after `loss_scale_window` steps without one. Its training loop never ends by itself where the scale cannot fall.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from roll_batching.errors import LossError
from roll_batching.strategy.model_state import TrainingState
from roll_batching.strategy.optimizer_step import has_loss_scale, optimizer_parts

logger = logging.getLogger(__name__)

MOST_STUCK_STEPS = 10
"""Steps in a row that may overflow at a loss scale that cannot fall."""


def loss_scale(optimizer: Any) -> float | None:
    """The factor of the loss in the next backward; None for an optimizer without loss scale."""
    return float(_scaler(optimizer).scale) if has_loss_scale(optimizer) else None


def smallest_loss_scale(optimizer: Any) -> float:
    """The loss scale below which that of `optimizer` does not fall; a constant one is its own."""
    scaler = _scaler(optimizer)
    return float(getattr(scaler, "min_scale", scaler.scale))


def _scaler(optimizer: Any) -> Any:
    """The loss scale of the first part with parameters; that of a stub never changes."""
    parts = [part for part in optimizer_parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    return min(parts, key=lambda part: bool(getattr(part, "is_stub_optimizer", False))).grad_scaler


def count_step(training: TrainingState, scale: float | None, *, skipped: bool, overflowed: bool) -> TrainingState:
    """`training` with its counters after a step, warning on rank 0 of an overflow at the smallest loss scale.

    Args:
        training: the state before the step.
        scale: the loss scale of the step; None without one.
        skipped: whether the optimizer did not step.
        overflowed: whether a gradient was not finite.

    Raises:
        LossError: on all ranks, after `MOST_STUCK_STEPS` such steps in a row: no later step would change a weight.
    """
    stuck = 0
    if overflowed and scale is not None and scale <= smallest_loss_scale(training.optimizer):
        stuck = training.stuck_steps + 1
        place = f"overflow at a loss scale of {scale:g}, which cannot fall (min_loss_scale, or a constant loss_scale)"
        if stuck == MOST_STUCK_STEPS:
            raise LossError(
                f"the gradients of {stuck} steps in a row {place}: none of these steps changed a weight. Train with "
                "model_args.dtype: bf16, lower the scale, or look at the inputs of the loss that divide or exponentiate"
            )
        if stuck == 1 and dist.get_rank() == 0:
            logger.warning(
                "gradients %s: the step is skipped. After %d such steps in a row training stops",
                *(place, MOST_STUCK_STEPS),
            )
    return replace(training, skipped_steps=training.skipped_steps + skipped, stuck_steps=stuck)
