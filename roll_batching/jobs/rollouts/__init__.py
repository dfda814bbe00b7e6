"""Rollouts: prompts, sampled answers, their rewards and rows of metrics."""
