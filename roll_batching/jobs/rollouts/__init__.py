"""Rollouts: prompts, sampled answers, their rewards and rows of metrics; the interface of rollout functions."""

from roll_batching.jobs.rollouts.contract import Generation, RolloutClient, RolloutPrompt, RolloutSample

__all__ = ["Generation", "RolloutClient", "RolloutPrompt", "RolloutSample"]
