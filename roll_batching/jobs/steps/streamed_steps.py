"""Optimizer steps of a load-balanced stream: each rank forms micro-batches, and fillers make their numbers equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import LayoutError
from roll_batching.jobs.config.job_sections import TrainSection
from roll_batching.jobs.steps.planned_steps import Encoder
from roll_batching.jobs.streams import LoadBalancedDataset, StepBatches
from roll_batching.jobs.texts.texts import TextDataset
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pipeline.schedule import legal_count
from roll_batching.samples import SampleBatch, gather_bins, gather_lengths, number_globally
from roll_batching.samples.length_table import LengthTable
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.roles import agree_on_plan


class StreamedSteps:
    """Steps of a `LoadBalancedDataset` on every data-parallel rank. Building it is collective.

    Args:
        texts: the whole dataset, the same on every rank.
        encoder: encodes texts as samples; a pair stays in one micro-batch.
        strategy: gives the plans' constraints.
        stream: the section `train` of the configuration.
        token_counts: of all texts, as `texts.fit.token_counts`; None: they are counted here.
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
        """Positions of all data-parallel ranks after the last step returned."""
        self._next_positions: list[dict[str, Any]] = []
        """Positions where the next step starts: `_positions`, or loaded ones; empty at the beginning of the data."""
        layout, policy, constraints = strategy.layout, stream.train_policy, strategy.constraints()
        encoded = _EncodedTexts(texts, encoder)
        self._example = encoder.encode(texts[:1])
        packed = stream.sequence_packing
        with consensus(layout.host_group, "the stream of texts"):
            _require_mode(strategy, packed)
        lengths = _gather_token_counts(encoded, token_counts, strategy)
        with consensus(layout.host_group, "the stream of texts"):
            self._dataset = LoadBalancedDataset(
                encoded,
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
            position = self._dataset.state_dict() if step is None else step.state
            if step is None and self._positions:
                position = self._positions[layout.dp_rank]
            return layout.dp_rank, step is None or step.last, position

        try:
            exchanged = exchange(layout.host_group, "drawing samples", draw)
        except Exception:  # the same on all ranks: the next call draws this step again, after the last one returned
            self._steps = None
            if self._next_positions:
                self._dataset.load_state_dict(self._next_positions, repartition=self.stream.train_policy.repartition)
            else:
                self._dataset.set_epoch(0)
            raise
        by_rank = {dp_rank: (ended, position) for dp_rank, ended, position in exchanged}
        self.ended = all(ended for ended, _ in by_rank.values())
        self._next_positions = self._positions = [by_rank[rank][1] for rank in range(layout.dp_size)]
        batches = [] if drawn[0] is None else list(drawn[0])
        local_batch = self.encoder.renumber_pairs(number_globally(self._to_samples(batches)))
        bins = gather_bins(local_batch, [len(batch) * self.encoder.samples_per_text for batch in batches])
        if self.stream.train_policy.load_balanced_across_ranks:
            table = self.strategy.gather_table(local_batch)
            group_ids = self.encoder.group_ids(table)
            return local_batch, agree_on_plan(self.strategy, lambda: self.strategy.plan(table, group_ids=group_ids))
        return local_batch, self._plan_bins(bins, gather_lengths(local_batch))

    def _loader(self) -> DataLoader[StepBatches]:
        workers = self.stream.train_policy.dataloader_num_workers
        # A DataLoader draws a base seed. From torch's default generator, that would change the dropout of training.
        generator = torch.Generator()
        return DataLoader(
            self._dataset, batch_size=None, num_workers=workers, collate_fn=_identity, generator=generator
        )

    def _to_samples(self, batches: list[list[Any]]) -> SampleBatch:
        texts = [text for batch in batches for text in batch]
        if not texts:
            return self._example.select([])
        samples = [sample for text in texts for sample in text] if self.encoder.pairs else texts
        columns = {name: [sample[name] for sample in samples] for name in self._example.fields}
        return SampleBatch.from_lists(columns, self._example.schema)

    def _plan_bins(self, bins: list[list[list[int]]], table: LengthTable) -> Plan:
        """Makes a plan of the micro-batches as they are, plus fillers where a rank has fewer than are needed."""
        constraints = self.strategy.constraints()
        count = legal_count(max(map(len, bins)), constraints)
        filled = [[*rank, *([] for _ in range(count - len(rank)))] for rank in bins]
        return Plan.from_bins(
            filled, table.lengths, constraints, cost=self.strategy.cost, ids=table.ids, location=table.location
        )

    def state_dict(self) -> dict[str, Any]:
        """The positions of all data-parallel ranks, after the last step returned."""
        return {"ranks": self._positions, "ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, with any number of loader processes.

        Raises DataError for other texts, another seed, or, without `repartition`, another number of ranks.
        """
        self.ended = bool(state["ended"])
        self._next_positions = state["ranks"]
        self._dataset.load_state_dict(self._next_positions, repartition=self.stream.train_policy.repartition)


class _EncodedTexts:
    """A dataset of samples, or of lists of two samples for pairs; each is encoded when it is read."""

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
        samples = [{name: values[i] for name, values in columns.items()} for i in range(len(batch))]
        return samples if self.encoder.pairs else samples[0]


def _identity(step: Any) -> Any:
    return step


def _require_mode(strategy: MegatronInferStrategy, packed: bool) -> None:
    """Raises LayoutError when the model takes another kind of micro-batches than the stream forms."""
    mode, required = strategy.batching.train.mode, "packed" if packed else "dynamic"
    if mode == required:
        return
    problem = f"train.sequence_packing is {str(packed).lower()}, and the model takes {mode} micro-batches"
    if packed and strategy.settings.rows_form:
        cure = "it was built for rows (rows_form): build it from packed_layer_spec(config), or set"
        raise LayoutError(f"{problem} and cannot take packs; {cure} train.sequence_packing: false")
    raise LayoutError(f"{problem}: build it with a BatchingConfig whose training mode is {required}")


def _gather_token_counts(texts: _EncodedTexts, token_counts: Ints | None, strategy: MegatronInferStrategy) -> Ints:
    """Gathers the tokens of every text, int64[n]; of pairs int64[n, 2]. Collective.

    Each data-parallel rank contributes every dp_size-th text, from `token_counts` or by counting.
    """
    layout, count = strategy.layout, len(texts)
    share = range(layout.dp_rank, count, layout.dp_size)

    def count_share() -> Ints:
        if token_counts is not None:
            return token_counts[share.start :: share.step]
        return texts.encoder.count_tokens([texts.texts[index] for index in share])

    parts = exchange(layout.host_group, "counting tokens", lambda: (layout.dp_rank, count_share()))
    lengths = np.zeros((count, 2) if texts.encoder.pairs else count, dtype=np.int64)
    for rank, part in parts:
        if len(part):
            lengths[rank :: layout.dp_size] = part
    return lengths
