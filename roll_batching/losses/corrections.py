"""Importance weights for rollouts of an inference engine: w = p_trainer / p_engine, bounded.

The engine samples the tokens, and its kernels compute other probabilities than the trainer does with equal weights.
"""

from __future__ import annotations

import torch

from roll_batching.losses.contract import Metric
from roll_batching.losses.estimators import LOG_RATIO_BOUND, bounded
from roll_batching.losses.views import TokenView
from roll_batching.settings.losses import EngineCorrection


def engine_weights(
    tokens: TokenView, old: torch.Tensor, how: EngineCorrection, lowest: float, cap: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """[tokens] weights without gradient, from the log-probs `old` and the engine's, and their metrics."""
    log_ratio = (old - tokens["rollout_log_probs"]).detach()
    ratio = bounded(log_ratio).exp()
    compared = ratio
    if how == "mask_sequences":
        compared = tokens.expand(tokens.segment_mean(bounded(log_ratio))).exp()
    outside = (compared < lowest) | (compared > cap)
    weight = ratio.clamp(lowest, cap) if how == "truncate" else torch.where(outside, 0.0, ratio)
    return weight, {
        "engine_ratio": tokens.mean_metric(ratio),
        "engine_ratio_bounded": tokens.mean_metric((log_ratio.abs() > LOG_RATIO_BOUND).float()),
        "engine_ratio_outside": tokens.mean_metric(outside.float()),
    }
