"""Reinforcement learning: the phase of rollouts, rewards, advantages and training steps."""
