"""Optimizer steps out of a load-balanced stream: each rank forms its micro-batches, fillers make them a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import LayoutError
from roll_batching.jobs.config.stream import TrainSection
from roll_batching.jobs.steps.agreed_plans import agreed
from roll_batching.jobs.steps.steps import Encoder
from roll_batching.jobs.streams import LoadBalancedDataset, StepBatches
from roll_batching.jobs.texts.texts import TextDataset
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pipeline.num_micro_batches import legal_count
from roll_batching.samples import SampleBatch, gather_bins, gather_lengths, number_globally
from roll_batching.samples.table import LengthTable
from roll_batching.strategy import MegatronInferStrategy

logger = logging.getLogger(__name__)


class StreamedSteps:
    """Steps of a `LoadBalancedDataset` on every data-parallel rank. Building it is collective.

    Args:
        texts: all of them, the same on every rank.
        encoder: turns them into samples; a pair stays in one micro-batch.
        strategy: whose plans they are for.
        stream: how they are batched.
        token_counts: of all texts, where they are known: `data.fit.token_counts`.
    """

    def __init__(
        self,
        texts: TextDataset[Any],
        encoder: Encoder,
        strategy: MegatronInferStrategy,
        stream: TrainSection,
        *,
        token_counts: Ints | None = None,
    ) -> None:
        self.strategy, self.encoder, self.stream = strategy, encoder, stream
        self.ended = False
        self._positions: list[dict[str, Any]] = []
        """Of all data-parallel ranks, behind the step that was given last."""
        self._begin: list[dict[str, Any]] = []
        """Where the next step begins: those, or what was loaded; empty at the beginning of the data."""
        layout, policy, constraints = strategy.layout, stream.train_policy, strategy.constraints()
        self._texts = _Encoded(texts, encoder)
        self._example = encoder.encode(texts[:1])
        packed = stream.sequence_packing
        with consensus(layout.host_group, "the stream of texts"):
            _require_mode(strategy, packed)
        lengths = _counted_together(self._texts, token_counts, strategy)
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

        try:
            everyone = exchange(layout.host_group, "drawing samples", draw)
        except Exception:  # the same on all ranks, which draw this step again when they are asked again
            self._go_back()
            raise
        said = {rank: (last, state) for rank, last, state in everyone}
        self.ended = all(last for last, _ in said.values())
        self._begin = self._positions = [said[rank][1] for rank in range(layout.dp_size)]
        home = self.encoder.numbered(number_globally(self._batch(drawn[0])))
        of_each = self.encoder.samples_of_each
        bins = gather_bins(home, [] if drawn[0] is None else [len(batch) * of_each for batch in drawn[0]])
        table = gather_lengths(home)
        if self.stream.train_policy.load_balanced_across_ranks:
            groups = self.encoder.groups_of(table)
            return home, agreed(self.strategy, lambda: self.strategy.plan(table, group_ids=groups))
        return home, self._plan_of(bins, table)

    def _go_back(self) -> None:
        """The next step is the one behind the last that was given."""
        self._steps = None
        if self._begin:
            self._dataset.load_state_dict(self._begin, repartition=self.stream.train_policy.repartition)
        else:
            self._dataset.set_epoch(0)

    def _loader(self) -> DataLoader[StepBatches]:
        workers = self.stream.train_policy.dataloader_num_workers
        own = torch.Generator()  # a loader draws a seed: not from the generator that dropout draws from
        return DataLoader(self._dataset, batch_size=None, num_workers=workers, collate_fn=_as_it_is, generator=own)

    def _batch(self, step: StepBatches | None) -> SampleBatch:
        texts = [] if step is None else [text for batch in step for text in batch]
        if not texts:
            return self._example.select([])
        samples = [sample for text in texts for sample in text] if self.encoder.pairs else texts
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
        self._begin = state["ranks"]
        self._dataset.load_state_dict(self._begin, repartition=self.stream.train_policy.repartition)


class _Encoded:
    """Texts as samples, pairs as two, encoded when they are asked for."""

    def __init__(self, texts: TextDataset[Any], encoder: Encoder) -> None:
        self.texts, self.encoder = texts, encoder

    @property
    def fingerprint(self) -> str:
        return self.texts.fingerprint

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        batch = self.encoder.encode([self.texts[index]])
        columns = {name: [value.tolist() for value in batch.to_lists(name)] for name in batch.fields}
        samples = [{name: values[row] for name, values in columns.items()} for row in range(len(batch))]
        return samples if self.encoder.pairs else samples[0]


def _as_it_is(step: Any) -> Any:
    return step


def _require_mode(strategy: MegatronInferStrategy, packed: bool) -> None:
    """Raises LayoutError where the model takes other micro-batches than the stream is to form."""
    mode, wanted = strategy.batching.train.mode, "packed" if packed else "dynamic"
    if mode == wanted:
        return
    text = f"train.sequence_packing is {str(packed).lower()}, and the model takes {mode} micro-batches"
    if packed and strategy.settings.rows_form:
        cure = "it was built for rows (rows_form): build it from packed_layer_spec(config), or set"
        raise LayoutError(f"{text} and cannot take packs; {cure} train.sequence_packing: false")
    raise LayoutError(f"{text}: make it with a BatchingConfig whose training is {wanted}")


def _counted_together(texts: _Encoded, kept: Ints | None, strategy: MegatronInferStrategy) -> Ints:
    """int64[n]: the tokens of every text; int64[n, 2] of pairs. Collective.

    Each rank says those of its part, which it counts where nobody has kept them.
    """
    layout, count = strategy.layout, len(texts)
    mine = range(layout.dp_rank, count, layout.dp_size)

    def say() -> Ints:
        if kept is not None:
            return kept[mine.start :: mine.step]
        return texts.encoder.count([texts.texts[index] for index in mine])

    parts = exchange(layout.host_group, "counting tokens", lambda: (layout.dp_rank, say()))
    lengths = np.zeros((count, 2) if texts.encoder.pairs else count, dtype=np.int64)
    for rank, part in parts:
        if len(part):
            lengths[rank :: layout.dp_size] = part
    return lengths
