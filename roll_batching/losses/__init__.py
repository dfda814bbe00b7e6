"""Losses: their contract, the views passed to them, log-probs, aggregations and objectives.

Objectives and the view of whole sequences are imported on first use, as a strategy itself needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roll_batching.losses.contract import LossOutput, Max, Mean, Min, Sum, loss_spec
from roll_batching.losses.denominators import StepCounts
from roll_batching.losses.views import TokenView
from roll_batching.losses.vocab_parallel import token_log_probs

if TYPE_CHECKING:
    from roll_batching.losses.covariance import ClipCovLoss, KlCovLoss
    from roll_batching.losses.estimators import (
        constant_mean,
        constant_sum,
        k1,
        k2,
        k3,
        mask_overlong,
        rollout_mean,
        rollout_token_mean,
        sequence_mean,
        sequence_sum,
        token_mean,
    )
    from roll_batching.losses.fine_tuning import DPOLoss, IPOLoss, KTOLoss, SFTLoss, mismatched, reference_point
    from roll_batching.losses.host import HostLoss
    from roll_batching.losses.objectives import CISPOLoss, GMPOLoss, GPGLoss, PolicyLoss, SAPOLoss, TOPRLoss, ValueLoss
    from roll_batching.losses.sequences import SequenceView

_LAZY = {
    "covariance": ("ClipCovLoss", "KlCovLoss"),
    "estimators": (
        *("constant_mean", "constant_sum", "mask_overlong", "rollout_mean", "rollout_token_mean"),
        *("sequence_mean", "sequence_sum", "token_mean", "k1", "k2", "k3"),
    ),
    "fine_tuning": ("DPOLoss", "IPOLoss", "KTOLoss", "SFTLoss", "mismatched", "reference_point"),
    "host": ("HostLoss",),
    "objectives": ("CISPOLoss", "GMPOLoss", "GPGLoss", "PolicyLoss", "SAPOLoss", "TOPRLoss", "ValueLoss"),
    "sequences": ("SequenceView",),
}
"""Names by their module."""


def __getattr__(name: str) -> Any:
    if name == "check_loss":  # needs a model and processes: its room is above this one
        return import_module("roll_batching.loss_check").check_loss
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"roll_batching.losses.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "DPOLoss",
    "GMPOLoss",
    "GPGLoss",
    "HostLoss",
    "IPOLoss",
    "KTOLoss",
    "KlCovLoss",
    "LossOutput",
    "Max",
    "Mean",
    "Min",
    "PolicyLoss",
    "SAPOLoss",
    "SFTLoss",
    "SequenceView",
    "StepCounts",
    "Sum",
    "TOPRLoss",
    "TokenView",
    "ValueLoss",
    "check_loss",
    "constant_mean",
    "constant_sum",
    "k1",
    "k2",
    "k3",
    "loss_spec",
    "mask_overlong",
    "mismatched",
    "reference_point",
    "rollout_mean",
    "rollout_token_mean",
    "sequence_mean",
    "sequence_sum",
    "token_log_probs",
    "token_mean",
]
