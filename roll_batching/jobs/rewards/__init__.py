"""Rewards: functions that a user can replace, called with what the model answered, in processes of their own."""

from roll_batching.jobs.rewards.contract import (
    Completion,
    RewardFunction,
    Score,
    Scored,
    exact_match,
    final_answer,
    load_reward,
)

__all__ = ["Completion", "RewardFunction", "Score", "Scored", "exact_match", "final_answer", "load_reward"]
