"""Batches formed from streams of samples: pool batcher, rollout queue, online batchers with one row per rank."""

from __future__ import annotations

from roll_batching.jobs.streams.batchers import FixedCountBatcher, StridedBatcher, TokenBudgetBatcher, rollout_batcher
from roll_batching.jobs.streams.load_balanced import LoadBalancedDataset, ShardedIterableDataset, StepBatches
from roll_batching.jobs.streams.pool_batcher import PoolBatcher
from roll_batching.jobs.streams.rollout_queue import (
    DataCollatorForRollout,
    RolloutQueueDataset,
    RolloutSample,
    rollout_step,
)
from roll_batching.jobs.streams.rows import balance_by_squared_length, serpentine

__all__ = [
    "DataCollatorForRollout",
    "FixedCountBatcher",
    "LoadBalancedDataset",
    "PoolBatcher",
    "RolloutQueueDataset",
    "RolloutSample",
    "ShardedIterableDataset",
    "StepBatches",
    "StridedBatcher",
    "TokenBudgetBatcher",
    "balance_by_squared_length",
    "rollout_batcher",
    "rollout_step",
    "serpentine",
]
