"""Optimizer steps out of a load-balanced stream: each rank forms its micro-batches, fillers make them a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from roll_batching.config.stream import TrainSection
from roll_batching.data import (
    LoadBalancedDataset,
    SampleBatch,
    StepBatches,
    gather_bins,
    gather_lengths,
    number_globally,
)
from roll_batching.data.table import LengthTable
from roll_batching.data.texts import TextDataset
from roll_batching.distributed import consensus, exchange
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pipeline.num_micro_batches import legal_count
from roll_batching.rl.steps import Encoder
from roll_batching.strategy import MegatronInferStrategy

logger = logging.getLogger(__name__)


class StreamedSteps:
    """Steps of a `LoadBalancedDataset` on every data-parallel rank. Building it is collective, and measures all texts.

    Args:
        texts: all of them, the same on every rank.
        encoder: turns them into samples; not for pairs.
        strategy: whose plans they are for.
        stream: how they are batched.
    """

    def __init__(
        self, texts: TextDataset[Any], encoder: Encoder, strategy: MegatronInferStrategy, stream: TrainSection
    ) -> None:
        self.strategy, self.encoder, self.stream = strategy, encoder, stream
        self.ended = False
        self._positions: list[dict[str, Any]] = []
        """Of all data-parallel ranks, behind the step that was given last."""
        layout, policy, constraints = strategy.layout, stream.train_policy, strategy.constraints()
        self._texts = _Encoded(texts, encoder)
        self._example = encoder.encode(texts[:1])
        packed = stream.sequence_packing
        lengths = _measured_together(self._texts, strategy)
        with consensus(layout.host_group, "the stream of texts"):
            self._dataset = LoadBalancedDataset(
                self._texts,
                pool_size=policy.load_balanced_pool_size,
                max_tokens_for_batch=constraints.usable_tokens,
                batching_strategy=policy.load_balanced_batching_strategy,
                seq_packing_enabled=packed,
                seed=policy.dataloader_seed,
                dp_rank=layout.dp_rank,
                dp_world_size=layout.dp_size,
                accumulate_steps=stream.batches_per_step,
                infinite_loop=policy.infinite_loop,
                lengths=lengths,
                sequence_multiple=constraints.sequence_alignment if packed else constraints.rectangle_alignment,
            )
        self._steps: Iterator[StepBatches] | None = None

    def __next__(self) -> tuple[SampleBatch, Plan]:
        layout = self.strategy.layout
        drawn: list[StepBatches | None] = []

        def draw() -> tuple[int, bool, dict[str, Any]]:
            if self._steps is None:
                self._steps = iter(self._loader())
            step = next(self._steps, None)
            drawn.append(step)
            state = self._dataset.state_dict() if step is None else step.state
            if step is None and self._positions:
                state = self._positions[layout.dp_rank]
            return layout.dp_rank, step is None or step.last, state

        said = {rank: (last, state) for rank, last, state in exchange(layout.host_group, "drawing samples", draw)}
        self.ended = all(last for last, _ in said.values())
        self._positions = [said[rank][1] for rank in range(layout.dp_size)]
        home = number_globally(self._batch(drawn[0]))
        bins = gather_bins(home, [] if drawn[0] is None else [len(batch) for batch in drawn[0]])
        table = gather_lengths(home)
        if self.stream.train_policy.load_balanced_across_ranks:
            return home, self.strategy.plan(table)
        return home, self._plan_of(bins, table)

    def _loader(self) -> DataLoader[StepBatches]:
        workers = self.stream.train_policy.dataloader_num_workers
        own = torch.Generator()  # a loader draws a seed: not from the generator that dropout draws from
        return DataLoader(self._dataset, batch_size=None, num_workers=workers, collate_fn=_as_it_is, generator=own)

    def _batch(self, step: StepBatches | None) -> SampleBatch:
        samples = [] if step is None else [sample for batch in step for sample in batch]
        if not samples:
            return self._example.select([])
        rows = {name: [sample[name] for sample in samples] for name in self._example.fields}
        return SampleBatch.from_lists(rows, self._example.schema)

    def _plan_of(self, bins: list[list[list[int]]], table: LengthTable) -> Plan:
        """The micro-batches as they were formed, and fillers where a rank has fewer, or the schedule asks for more."""
        constraints = self.strategy.constraints()
        count = legal_count(max(map(len, bins)), constraints)
        filled = [[*rank, *([] for _ in range(count - len(rank)))] for rank in bins]
        return Plan.from_bins(
            filled, table.lengths, constraints, cost=self.strategy.cost, ids=table.ids, location=table.location
        )

    def state_dict(self) -> dict[str, Any]:
        """The positions of all data-parallel ranks, behind the step that was given last."""
        return {"ranks": self._positions, "ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there at once, with any number of loader processes.

        Raises DataError for other texts, another seed, or, without `repartition`, another number of ranks.
        """
        self.ended = bool(state["ended"])
        self._dataset.load_state_dict(state["ranks"], repartition=self.stream.train_policy.repartition)


class _Encoded:
    """Texts as samples, encoded when they are asked for."""

    def __init__(self, texts: TextDataset[Any], encoder: Encoder) -> None:
        self.texts, self.encoder = texts, encoder

    @property
    def fingerprint(self) -> str:
        return self.texts.fingerprint

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, list[Any]]:
        batch = self.encoder.encode([self.texts[index]])
        return {name: batch[name].tolist() for name in batch.fields}


def _as_it_is(step: Any) -> Any:
    return step


def _measured_together(texts: _Encoded, strategy: MegatronInferStrategy) -> Ints:
    """int64[n]: the tokens of every text; each rank encodes its part. Collective."""
    layout = strategy.layout
    lengths = np.zeros(len(texts), dtype=np.int64)

    def measure() -> Ints:
        mine = range(layout.dp_rank, len(texts), layout.dp_size)
        return np.array([len(texts[index]["input_ids"]) for index in mine], dtype=np.int64)

    parts = exchange(layout.host_group, "measuring texts", lambda: (layout.dp_rank, measure()))
    for rank, part in parts:
        lengths[rank :: layout.dp_size] = part
    return lengths
