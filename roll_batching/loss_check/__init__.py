"""A check of losses: one step on a tiny model under several layouts and partitions, which must all agree."""

from __future__ import annotations

from roll_batching.loss_check.check import check_loss
from roll_batching.loss_check.report import Comparison, LossCheck

__all__ = ["Comparison", "LossCheck", "check_loss"]
