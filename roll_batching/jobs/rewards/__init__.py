"""Reward functions, yours or registered ones, which score responses in worker processes."""

from roll_batching.jobs.rewards.contract import (
    Completion,
    PromptLine,
    RewardFunction,
    Score,
    Scored,
    exact_match,
    final_answer,
    load_reward,
)

__all__ = [
    "Completion",
    "PromptLine",
    "RewardFunction",
    "Score",
    "Scored",
    "exact_match",
    "final_answer",
    "load_reward",
]
