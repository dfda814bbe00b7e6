"""Reinforcement learning on top of the strategies: rollout, reward, advantages, mini-batches, training.

`run_job` runs the whole of it from a `JobConfig`; the modules beside it are its parts and can be used alone.
"""
