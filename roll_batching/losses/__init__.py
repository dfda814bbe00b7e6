"""Losses and what they see: contract, views, log-probs, objectives."""

from roll_batching.losses.contract import LossOutput, Max, Mean, Min, Sum, loss_spec
from roll_batching.losses.counts import StepCounts
from roll_batching.losses.objectives import PolicyLoss, SFTLoss
from roll_batching.losses.views import TokenView
from roll_batching.losses.vocab_parallel import token_log_probs

__all__ = [
    "LossOutput",
    "Max",
    "Mean",
    "Min",
    "PolicyLoss",
    "SFTLoss",
    "StepCounts",
    "Sum",
    "TokenView",
    "loss_spec",
    "token_log_probs",
]
