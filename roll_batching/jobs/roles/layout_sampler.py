"""Rollouts by a copy of the policy in a parallel layout of its own, on the same ranks."""

from __future__ import annotations

import time

import numpy as np
import torch

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.layout_rules import samples_apart
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.planning import batch_balance
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch, gather_lengths
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.offload import Moved
from roll_batching.strategy.sampling import draws_of
from roll_batching.strategy.weights import Transfer

_DRAWS = "draws"
"""The field of random numbers that travel with a prompt, [group, max_new_tokens]."""


class LayoutSampler:
    """A second model that samples: it has the weights of `strategy`, and a parallel layout of its own.

    Prompts lie where `strategy` has them, and responses come back there: whoever asks need not know of the other
    layout. Random numbers travel with the prompts, so that the draws are those of `strategy` itself. Building it and
    every method is collective.

    Args:
        worker: settings of the second model.
        strategy: whose weights are sampled from; it trains.
        rests: its weights are on the device from `update` to `rest` only.
    """

    def __init__(self, worker: WorkerConfig, strategy: MegatronInferStrategy, *, rests: bool) -> None:
        self.strategy, self._rests = strategy, rests
        self.model = MegatronInferStrategy(worker, seed=strategy.seed, temperature=strategy.temperature)
        self.model.initialize(weights=False)
        self._crossing = LayoutExchange.of(strategy.layout.dp_rank, self.model.layout.dp_rank)
        self._version: int | None = None
        """Of the weights that it has."""
        self._took = Transfer()
        """Since it was last reported."""
        self._seconds = 0.0
        self.rest()

    @property
    def layout(self) -> ParallelLayout:
        """The ranks that ask."""
        return self.strategy.layout

    @property
    def moved(self) -> Moved:
        """What making room for its weights, and taking it again, took so far."""
        return self.model.moved

    def update(self, version: int) -> None:
        """From now on it samples with the strategy's weights, which are those of `version`.

        Raises RankError, the same on all ranks, where a rank has no room for them.
        """
        if version == self._version:
            return
        began = time.perf_counter()
        with consensus(self.layout.host_group, "room for the sampler's weights"):
            self.model.load_states("parameters")
        self._took += self.model.copy_weights_from(self.strategy)
        self._version = version
        self._seconds += time.perf_counter() - began

    def rest(self) -> None:
        """The policy is about to train: the sampler's weights, which the next update brings anew, make room."""
        if self._rests:
            self.model.offload_states("parameters", keep=False)
            self._version = None

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Responses to this data-parallel rank's prompts, as `MegatronInferStrategy.generate` gives them.

        The ids of `prompts` are unique over all ranks.
        """
        group, crossing = settings.num_return_sequences, self._crossing
        table = gather_lengths(prompts)
        plan = crossing.plan_of(crossing.seen(table), batch_balance(table.lengths, self.model.layout.dp_size))
        asked = crossing.distribute(self._with_draws(prompts, settings), plan, table)
        draws = asked[_DRAWS].flatten(0, 1) if _DRAWS in asked.schema else None
        found = self.model.generate(asked, settings, draws).with_ids(_numbered(asked.ids, group))
        answers = self._table_of(found)
        home = dict(zip(table.ids.tolist(), table.location.tolist(), strict=True))
        parts = np.array([home[number // group] for number in answers.ids.tolist()], dtype=np.int64)
        way = crossing.back
        back = way.distribute(found, way.plan_of(way.seen(answers), parts), answers)
        return back.select_ids(_numbered(prompts.ids, group)).with_ids(torch.arange(len(back)))

    def columns(self, home: SampleBatch) -> Row:
        """What weights took on their way since the last call: on this rank, and their bytes between all ranks."""
        received = exchange(self.layout.host_group, "figures of the sampler", lambda: self._took.bytes)
        row: Row = {"weights_seconds": self._seconds, "weights_bytes": sum(received)}
        self._took, self._seconds = Transfer(), 0.0
        return row

    def _with_draws(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """`prompts` with the random numbers that the strategy itself would answer them with."""
        if settings.greedy:
            return prompts
        state, group = self.strategy.state, settings.num_return_sequences
        draws = draws_of(
            settings,
            len(prompts) * group,
            part=state.layout.dp_rank,
            device=state.device,
            dtype=state.result_dtype,
        )
        draws = draws.view(len(prompts), group, settings.max_new_tokens).cpu()
        return prompts.with_fields({_DRAWS: draws}, {_DRAWS: FieldSpec("sample")})

    def _table_of(self, found: SampleBatch) -> LengthTable:
        """The responses of all replicas that sampled, and which of them holds each."""
        layout = self.model.layout
        held = exchange(
            layout.host_group,
            "responses of the sampler",
            lambda: (layout.dp_rank, found.ids.numpy(), found.lengths.numpy()) if layout.is_replica_leader else None,
        )
        parts = sorted((part for part in held if part is not None), key=lambda part: part[0])
        return LengthTable(
            np.concatenate([ids for _, ids, _ in parts]),
            np.concatenate([lengths for _, _, lengths in parts]),
            np.repeat([rank for rank, _, _ in parts], [len(ids) for _, ids, _ in parts]),
        )


def layout_sampler(config: JobConfig, strategy: MegatronInferStrategy) -> LayoutSampler | None:
    """The sampler of a job whose `actor_infer` has a layout of its own; None: the strategy samples itself."""
    if not samples_apart(config):
        return None
    worker = config.actor_train.model_copy(update={"strategy_args": config.actor_infer.strategy_args})
    return LayoutSampler(worker, strategy, rests=config.is_offload_states)


def _numbered(prompts: torch.Tensor, group: int) -> torch.Tensor:
    """The ids of the responses to these prompts."""
    return (prompts[:, None] * group + torch.arange(group)).flatten()
