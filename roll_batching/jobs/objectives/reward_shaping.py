"""Rewards as advantages read them: scaled, and with a penalty for long responses.

Source: NeMo-RL, `scale_rewards` and `apply_reward_shaping`; DAPO (arXiv 2503.14476), soft overlong punishment.
"""

from __future__ import annotations

import numpy as np

from roll_batching.jobs.config import JobConfig


def shape_rewards(config: JobConfig, rewards: np.ndarray, response_tokens: np.ndarray) -> np.ndarray:
    """`rewards` after `reward_scaling`, then `overlong_buffer`: float64 [n]."""
    scaling, buffer = config.reward_scaling, config.overlong_buffer
    if scaling is not None:
        share = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
            scaling.source_max - scaling.source_min
        )
        rewards = scaling.target_min + share * (scaling.target_max - scaling.target_min)
    if buffer is not None:
        longest = buffer.response_length or config.response_length
        assert longest is not None  # the loader resolves response_length
        excess = np.maximum(response_tokens - (longest - buffer.length), 0)
        rewards = rewards - buffer.penalty * excess / buffer.length
    return rewards
