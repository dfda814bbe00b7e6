"""Batches formed while samples arrive: length-aware streams, queues of rollouts, and rows per data-parallel rank."""

from __future__ import annotations

from roll_batching.jobs.streams.batchers import FixedCountBatcher, StridedBatcher, TokenBudgetBatcher, rollout_batcher
from roll_batching.jobs.streams.former import PoolFormer
from roll_batching.jobs.streams.load_balanced import LoadBalancedDataset, ShardedIterableDataset, StepBatches
from roll_batching.jobs.streams.rollout_packer import DataCollatorForRollout, rollout_step
from roll_batching.jobs.streams.rollout_queue import RolloutQueueDataset, RolloutSample
from roll_batching.jobs.streams.rows import balance_by_squared_length, serpentine
from roll_batching.jobs.streams.stream import FormedBatch, LengthAwareStream

__all__ = [
    "FormedBatch",
    "LengthAwareStream",
    "DataCollatorForRollout",
    "FixedCountBatcher",
    "LoadBalancedDataset",
    "PoolFormer",
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
