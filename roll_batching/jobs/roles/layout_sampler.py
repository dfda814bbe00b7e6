"""Samples rollouts by a copy of the policy in another parallel layout, on the same ranks."""

from __future__ import annotations

import time

import numpy as np
import torch

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.layout_rules import samples_apart
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.planning import batch_balance
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch, gather_lengths
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.offload import OffloadStats
from roll_batching.strategy.sampling import uniform_draws
from roll_batching.strategy.weights import Transfer

_DRAWS = "draws"
"""Field of a prompt's random numbers, [group, max_new_tokens]."""


class LayoutSampler:
    """A second model that generates rollouts, with the weights of `strategy` and a separate parallel layout.

    Prompts and responses are on the ranks where `strategy` would have them. Random numbers are sent with the prompts,
    so that the responses equal those of `strategy`. `__init__` and all methods are collective.

    Args:
        role: settings of the second model.
        strategy: the model in training.
        releases_memory: the second model's weights are on the device from `update` to `release_memory` only.
    """

    def __init__(self, role: WorkerConfig, strategy: MegatronInferStrategy, *, releases_memory: bool) -> None:
        self.strategy, self._releases_memory = strategy, releases_memory
        self.model = MegatronInferStrategy(role, seed=strategy.seed, temperature=strategy.temperature)
        self.model.initialize(weights=False)
        self._exchange = LayoutExchange.of(strategy.layout.dp_rank, self.model.layout.dp_rank)
        self._version: int | None = None
        """Version of the second model's weights; None: it has none."""
        self._transfer = Transfer()
        """Weight transfers since the last call of `metrics`."""
        self._seconds = 0.0
        self.release_memory()

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the strategy, in which prompts come and responses go."""
        return self.strategy.layout

    @property
    def offload_stats(self) -> OffloadStats:
        """Offloading and reloading of its weights so far."""
        return self.model.offload_stats

    def update(self, version: int) -> None:
        """Copies the strategy's weights, which are those of `version`.

        Raises RankError, the same on all ranks, when a rank has no memory for them.
        """
        if version == self._version:
            return
        started = time.perf_counter()
        with consensus(self.layout.host_group, "room for the sampler's weights"):
            self.model.load_states("parameters")
        self._transfer += self.model.copy_weights_from(self.strategy)
        self._version = version
        self._seconds += time.perf_counter() - started

    def release_memory(self) -> None:
        """Frees the weights before training, if `releases_memory`; the next `update` copies them again."""
        if self._releases_memory:
            self.model.offload_states("parameters", keep=False)
            self._version = None

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Generates responses to this data-parallel rank's prompts, as `MegatronInferStrategy.generate` does.

        Prompts go to the ranks of the second model's layout, and responses back to the ranks of their prompts. The ids
        of `prompts` are unique over all ranks.
        """
        group, to_sampler = settings.num_return_sequences, self._exchange
        table = gather_lengths(prompts)
        plan = to_sampler.transfer_plan(
            to_sampler.in_target(table), batch_balance(table.lengths, self.model.layout.dp_size)
        )
        requests = to_sampler.distribute(self._with_draws(prompts, settings), plan, table)
        draws = requests[_DRAWS].flatten(0, 1) if _DRAWS in requests.schema else None
        generated = self.model.generate(requests, settings, draws)
        generated = generated.with_ids(_response_ids(requests.ids, group))
        response_table = self._length_table(generated)
        prompt_rank = dict(zip(table.ids.tolist(), table.location.tolist(), strict=True))
        # `_response_ids` made the ids: id // group is the prompt's.
        ranks = np.array([prompt_rank[i // group] for i in response_table.ids.tolist()], dtype=np.int64)
        to_trainer = to_sampler.inverse
        plan = to_trainer.transfer_plan(to_trainer.in_target(response_table), ranks)
        responses = to_trainer.distribute(generated, plan, response_table)
        return responses.select_ids(_response_ids(prompts.ids, group)).with_ids(torch.arange(len(responses)))

    def metrics(self, local_batch: SampleBatch) -> Metrics:
        """Returns metrics since the last call: seconds of weight transfer on this rank, bytes over all ranks."""
        received = exchange(self.layout.host_group, "metrics of the sampler", lambda: self._transfer.bytes)
        metrics: Metrics = {"weights_seconds": self._seconds, "weights_bytes": sum(received)}
        self._transfer, self._seconds = Transfer(), 0.0
        return metrics

    def _with_draws(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """`prompts` with the random numbers that the strategy itself would use."""
        if settings.greedy:
            return prompts
        state, group = self.strategy.state, settings.num_return_sequences
        draws = uniform_draws(
            settings,
            len(prompts) * group,
            dp_rank=state.layout.dp_rank,
            device=state.device,
            dtype=state.result_dtype,
        )
        draws = draws.view(len(prompts), group, settings.max_new_tokens).cpu()
        return prompts.with_fields({_DRAWS: draws}, {_DRAWS: FieldSpec("sample")})

    def _length_table(self, generated: SampleBatch) -> LengthTable:
        """Table of the ids, lengths and replicas of the responses of all replicas."""
        layout = self.model.layout
        replies = exchange(
            layout.host_group,
            "responses of the sampler",
            lambda: (
                (layout.dp_rank, generated.ids.numpy(), generated.lengths.numpy()) if layout.is_replica_leader else None
            ),
        )
        parts = sorted((part for part in replies if part is not None), key=lambda part: part[0])
        return LengthTable(
            np.concatenate([ids for _, ids, _ in parts]),
            np.concatenate([lengths for _, _, lengths in parts]),
            np.repeat([rank for rank, _, _ in parts], [len(ids) for _, ids, _ in parts]),
        )


def layout_sampler(config: JobConfig, strategy: MegatronInferStrategy) -> LayoutSampler | None:
    """The sampler of a job whose `actor_infer` has another layout; None when the strategy itself samples."""
    if not samples_apart(config):
        return None
    worker = config.actor_train.model_copy(update={"strategy_args": config.actor_infer.strategy_args})
    return LayoutSampler(worker, strategy, releases_memory=config.is_offload_states)


def _response_ids(prompt_ids: torch.Tensor, group: int) -> torch.Tensor:
    """Ids of the responses to prompts: `group` consecutive ids per prompt."""
    return (prompt_ids[:, None] * group + torch.arange(group)).flatten()
