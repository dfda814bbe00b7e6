"""Client of the rollout engine on the ranks of a job: generation, weights and sleep, all collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import reads_engine_log_probs, wrong_log_probs
from roll_batching.jobs.config.worker import ENGINES
from roll_batching.jobs.engines.free_requests import FreeRequests
from roll_batching.jobs.engines.probe import Probe
from roll_batching.jobs.engines.protocol import (
    Engine,
    GenerationRequest,
    GenerationResult,
    Mixture,
    PromptImages,
    ServerProcess,
)
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.engines.routed_experts import mixture_of, with_experts
from roll_batching.jobs.seeds import response_seed
from roll_batching.samples import SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.generation import responses_to_batch

_MARGIN = 60.0
"""Seconds added to the engine's limits for the time between ranks."""


class EngineClient:
    """Client of the engine of `actor_infer`: one rank of each replica of `layout` calls it. Methods are collective.

    An engine in the job's processes (hf_infer) loads weights on those ranks; servers get weights from rank 0. `asleep`:
    the engine sleeps already.
    """

    def __init__(self, config: JobConfig, layout: ParallelLayout, *, asleep: bool = False) -> None:
        role = config.actor_infer
        self.config, self.layout = config, layout
        self._in_process = role.strategy_args.strategy_name == "hf_infer"
        make = ENGINES.load(role.strategy_args.strategy_name)
        self.engine: Engine = make(role.engine_args, layout.device)
        self._replica = replica_group(layout)
        self._asleep, self._version = asleep, 0
        self._mixture = mixture_of(config)
        model = config.actor_train.model_args.architecture
        self._vision = None if model is None else model.vision

    def load(self, path: Path, version: int) -> None:
        """Has the engine load the model directory at `path`, and wakes it up.

        Raises RankError, the same on all ranks, when no replica loads it.
        """

        def load() -> Mapping[str, ServerProcess | None]:
            if self._sends_weights:
                self.engine.update_weights(path.resolve(), version, asleep=self._asleep)
                self._check_log_probs()
            return self.engine.live

        live = exchange(self.layout.host_group, "sending weights to the engine", load, patience=self.patience)
        self.set_loaded(live[0], version)

    def check_weights(self, probe: Probe) -> None:
        """Drops replicas whose log-probs of `probe` are not the trainer's.

        Raises RankError, the same on all ranks, when no replica has the trainer's weights.
        """

        def check() -> Mapping[str, ServerProcess | None]:
            if self._sends_weights:
                self.engine.check_weights(probe)
            return self.engine.live

        live = exchange(self.layout.host_group, "checking the engine's weights", check, patience=self.patience)
        self.engine.set_live(live[0], self._version)

    def _check_log_probs(self) -> None:
        """Raises EngineError when the loss reads the engine's log-probs and a server's --logprobs-mode does not fit."""
        if not reads_engine_log_probs(self.config):
            return
        for url, process in self.engine.live.items():
            problem = None if process is None else wrong_log_probs(self.config, process.logprobs_mode)
            if problem is not None:
                raise EngineError(
                    f"{url}: {problem}. Start the server with another --logprobs-mode: logprob_plan: rollout, "
                    "engine_ratio_cap and train_infer_correction have the loss read its log-probs"
                )

    def set_loaded(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Sets the replicas that are awake and have the weights of `version`."""
        self.engine.set_live(live, version)
        self._version, self._asleep = version, False

    def sleep(self) -> None:
        """Has the engine free its device memory until the next `load`.

        Raises RankError, the same on all ranks, when no replica does.
        """
        with consensus(self.layout.host_group, "putting the engine to sleep", patience=self.patience):
            if self._sends_weights:
                self.engine.sleep()
        self._asleep = True

    @property
    def asleep(self) -> bool:
        """Whether the engine needs `load` before it can generate."""
        return self._asleep

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Generates responses to this replica's prompts, in the format of `MegatronInferStrategy.generate`.

        Each response is seeded by the settings' seed and the id of its prompt, if the engine takes seeds per request.
        With `router_replay: R3` the batch has `routed_experts`.
        """
        group_size = settings.num_return_sequences
        prompt_tokens = [tokens for tokens in prompts.to_lists("input_ids") for _ in range(group_size)]
        results: list[GenerationResult] = []
        counts = exchange(self.layout.host_group, "the number of prompts", lambda: len(prompts))
        most_requests = max(counts) * group_size
        patience = self.engine.generation_timeout(most_requests) + _MARGIN
        with consensus(self.layout.host_group, "rollouts", patience=patience):
            if self.layout.is_replica_leader and prompt_tokens:
                results = self.engine.generate(_requests(prompts, settings, self._mixture, self._vision), settings)
        if self._replica is not None:  # the leader alone has the results
            box: list[Any] = [results]
            group, source = self._replica
            dist.broadcast_object_list(box, src=source, group=group)
            results = box[0]
        responses = [
            (torch.tensor(result.tokens), torch.tensor(result.log_probs, dtype=torch.float32)) for result in results
        ]
        batch = responses_to_batch([prompt.cpu() for prompt in prompt_tokens], responses)
        return batch if self._mixture is None else with_experts(batch, results, self._mixture)

    def free_requests(self) -> FreeRequests | None:
        """Sends requests one by one, on the leaders of replicas. None: the engine takes whole batches alone."""
        return FreeRequests(self.engine) if isinstance(self.engine, Replicas) else None

    def request_metrics(self) -> dict[str, float]:
        """Metrics of this rank's requests since the last call. Not collective."""
        return self.engine.metrics()

    @property
    def patience(self) -> float:
        """Seconds that other ranks wait for a weight update, or for the engine to sleep."""
        return self.engine.update_timeout() + _MARGIN

    @property
    def _sends_weights(self) -> bool:
        """Whether this rank sends weights and sleep calls to the engine."""
        return self.layout.is_replica_leader if self._in_process else dist.get_rank() == 0


def sum_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Joins the metrics of several clients or calls: sums; of the replicas in use the minimum."""
    names = metrics[0] if metrics else ()
    return {
        name: (min if name == "engine_replicas" else sum)(of_client[name] for of_client in metrics)  # type: ignore[operator]
        for name in names
    }


def _requests(
    prompts: SampleBatch, settings: GenerationSettings, mixture: Mixture | None, vision: Any
) -> list[GenerationRequest]:
    """Returns the requests for the responses to a replica's prompts; `vision`: the encoder's configuration, or None."""
    group = settings.num_return_sequences
    images: list[PromptImages | None] = [None] * len(prompts)
    if vision is not None:
        from roll_batching.jobs.engines.routed_experts import images_of_prompts  # few models take images

        images = images_of_prompts(prompts, vision)
    return [
        GenerationRequest(
            tokens=row.tolist(),
            seed=response_seed(settings.seed, prompt * group + member),
            group=prompt,
            mixture=mixture,
            images=prompt_images,
        )
        for prompt, row, prompt_images in zip(prompts.ids.tolist(), prompts.to_lists("input_ids"), images, strict=True)
        for member in range(group)
    ]


def replica_group(layout: ParallelLayout) -> tuple[Any, int] | None:
    """Creates a gloo group of this replica's ranks; returns it and its leader's rank. None if a replica is one rank."""
    ranks = exchange(layout.host_group, "the replicas", lambda: (layout.dp_rank, layout.is_replica_leader))
    if len(ranks) == layout.dp_size:
        return None
    members: list[list[int]] = [[] for _ in range(layout.dp_size)]
    for rank, (dp_rank, _) in enumerate(ranks):
        members[dp_rank].append(rank)
    group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
    return group, next(rank for rank in members[layout.dp_rank] if ranks[rank][1])
