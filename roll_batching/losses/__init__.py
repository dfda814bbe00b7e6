"""Losses and what they see: contract, views, log-probs, aggregations, objectives."""

from roll_batching.losses.aggregation import constant_mean, sequence_mean, sequence_sum, token_mean
from roll_batching.losses.contract import LossOutput, Max, Mean, Min, Sum, loss_spec
from roll_batching.losses.covariance import ClipCovLoss, KlCovLoss
from roll_batching.losses.denominators import StepCounts
from roll_batching.losses.estimators import k1, k2, k3
from roll_batching.losses.objectives import CISPOLoss, GMPOLoss, GPGLoss, PolicyLoss, SAPOLoss, TOPRLoss
from roll_batching.losses.overlong import mask_overlong
from roll_batching.losses.preference import DPOLoss, IPOLoss
from roll_batching.losses.sequences import SequenceView
from roll_batching.losses.supervised import SFTLoss
from roll_batching.losses.unpaired import KTOLoss, mismatched, reference_point
from roll_batching.losses.views import TokenView
from roll_batching.losses.vocab_parallel import token_log_probs

__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "DPOLoss",
    "GMPOLoss",
    "GPGLoss",
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
    "constant_mean",
    "k1",
    "k2",
    "k3",
    "loss_spec",
    "mask_overlong",
    "mismatched",
    "reference_point",
    "sequence_mean",
    "sequence_sum",
    "token_log_probs",
    "token_mean",
]
