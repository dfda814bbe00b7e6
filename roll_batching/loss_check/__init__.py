"""A check of losses: one step on a tiny model under several layouts and partitions, which must all agree.

Names are imported on first use: the process of a check hides warnings of Megatron's before anything imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_batching.loss_check.check import check_loss
    from roll_batching.loss_check.report import Comparison, LossCheck

_LAZY = {"check_loss": "check", "Comparison": "report", "LossCheck": "report"}
"""Modules by name."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"roll_batching.loss_check.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Comparison", "LossCheck", "check_loss"]
