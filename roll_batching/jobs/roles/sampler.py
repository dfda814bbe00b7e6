"""Worker of a sampler in separate processes: it generates and scores rollouts.

It holds a copy of the model, in the layout of actor_infer on separate devices or else in a single process, and loads
checkpoints that training writes; or it sends requests to an engine, which loads model directories.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.roles.client import Weights, worker_timeout_minutes
from roll_batching.jobs.texts.texts import Prompt

if TYPE_CHECKING:
    from roll_batching.distributed.parallel_layout import ParallelLayout
    from roll_batching.jobs.engines.client import EngineClient
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronInferStrategy


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for rollouts of prompts, or for responses to held-out prompts."""

    number: int
    prompts: Sequence[Prompt]
    seed: int
    shown: int
    """Number of responses whose texts are returned for the sample log; -1: all."""
    first: int = 0
    """Index of the first prompt in the step."""
    held_out: bool = False
    """Whether to sample by `validation.generating_args`, for an evaluation."""

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self.prompts)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The scored rollouts of a request. Rollout i is rollout i % group of prompt i // group."""

    number: int
    version: int
    """Version of the weights that generated the responses, or under in_flight_updates their ends."""
    seconds: float
    """Seconds of generating and scoring."""
    lengths: np.ndarray
    """int64 `[n]`: tokens of each sample, its prompt included."""
    fields: dict[str, np.ndarray]
    """`input_ids`, `response_mask`, `log_probs`, `rollout_ids`, under R3 `routed_experts`, under in_flight_updates
    `weight_versions`: flat, as in a `SampleBatch`."""
    scores: Any
    """`rollout.StepScores`, ids from 0."""
    figures: dict[str, float]
    """The engine's metrics; empty without one."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.lengths)


def serve(connection: Connection) -> None:
    """Runs one worker of the sampler until `connection` closes; see `serve_requests`."""
    from roll_batching.jobs.roles.worker import serve_requests

    serve_requests(connection, lambda config, reply: SerialSampler(config))


class SerialSampler:
    """Answers one request after another: the model or engine, the tokenizer and the reward."""

    def __init__(self, config: JobConfig) -> None:
        from roll_batching.jobs.objectives.from_config import sampling_of
        from roll_batching.jobs.rewards.pool import reward_of
        from roll_batching.jobs.rollouts.function_rollouts import function_rollouts_of
        from roll_batching.jobs.rollouts.rollout import start_reward
        from roll_batching.jobs.text_sets import load_tokenizer

        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.sampling = sampling_of(config, self.tokenizer)
        self.held_out_sampling = sampling_of(config, self.tokenizer, held_out=True)
        reward = reward_of(config)
        assert reward is not None, "an RL job has a reward"
        self.reward, self.function = reward, function_rollouts_of(config)
        self.source: EngineClient | MegatronInferStrategy = (
            _engine(config) if uses_engine(config) else _model(config, self.sampling.temperature)
        )
        self.version = -1
        start_reward(self.source.layout, reward)

    def load(self, weights: Weights) -> None:
        """Loads `weights` into the model, or has the engine load them."""
        from roll_batching.jobs.engines.client import EngineClient

        if isinstance(self.source, EngineClient):
            self.source.load(weights.path, weights.version)
            self.source.check_weights(weights.probe)
        else:
            self.source.load(weights.path)
        self.version = weights.version

    def answer(self, request: Request) -> Answer | None:
        """Generates and scores responses, each replica to its share of the prompts; returns all on the first worker."""
        from roll_batching.jobs.rollouts.rollout import generate_rollouts, score_rollouts

        started = time.perf_counter()
        sampling = self.held_out_sampling if request.held_out else self.sampling
        rollouts = generate_rollouts(
            self.source,
            request.prompts,
            self.tokenizer,
            replace(sampling, seed=request.seed),
            prompt_length=self.config.prompt_length,
            function=self.function,
        )
        scores = score_rollouts(self.source, rollouts, self.reward, shown=request.shown)
        batch = _gather(self.source.layout, rollouts.batch)
        if batch is None:
            return None
        return Answer(
            number=request.number,
            version=self.version,
            seconds=time.perf_counter() - started,
            lengths=batch.lengths.numpy(),
            fields={name: batch[name].cpu().numpy() for name in batch.schema},
            scores=scores,
            figures=self.engine_metrics(request),
        )

    def engine_metrics(self, request: Request) -> dict[str, float]:
        """The engine's metrics since the last rollouts. Requests of an evaluation count with the next rollouts."""
        from roll_batching.jobs.engines.client import EngineClient

        if request.held_out or not isinstance(self.source, EngineClient):
            return {}
        return self.source.request_metrics()


def _gather(layout: ParallelLayout, batch: SampleBatch) -> SampleBatch | None:
    """Gathers the samples of all replicas, sorted by id, on the first worker; returns None on others. Collective."""
    import torch.distributed as dist

    from roll_batching.samples import SampleBatch

    local_batch = batch.to("cpu") if layout.is_replica_leader else None
    gathered: list[SampleBatch | None] = [None] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object(local_batch, gathered if is_first else None, dst=0, group=layout.host_group)
    if not is_first:
        return None
    joined = SampleBatch.concat([part for part in gathered if part is not None])
    return joined.select_ids(np.sort(joined.ids.numpy()))


def _engine(config: JobConfig) -> EngineClient:
    """Makes the client of the job's engine, in a layout of one process."""
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.jobs.engines.client import EngineClient
    from roll_batching.planning import ParallelDims

    return EngineClient(config, make_layout(ParallelDims.of_world(1), start_processes()))


def _model(config: JobConfig, temperature: float) -> MegatronInferStrategy:
    """Makes the model that samples; `load` gives it weights."""
    from roll_batching.strategy import MegatronInferStrategy

    role = sampler_worker(config)
    strategy = MegatronInferStrategy(role, seed=config.seed, temperature=temperature)
    strategy.initialize(weights=role.model_args.lora_target is not None)  # a checkpoint of adapters has no others
    return strategy


def sampler_worker(config: JobConfig) -> WorkerConfig:
    """Settings of the sampler: actor_train's, in actor_infer's layout on separate devices, else for one process."""
    worker = config.actor_train
    if config.own_devices("actor_infer") is not None:
        layout = config.actor_infer.strategy_args.strategy_config
    else:
        layout = worker.strategy_args.strategy_config.model_copy(
            update={
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "virtual_pipeline_model_parallel_size": None,
                "microbatch_group_size_per_vp_stage": None,
                "context_parallel_size": 1,
                "expert_model_parallel_size": 1,
                "sequence_parallel": False,
            }
        )
    return worker.model_copy(
        update={
            "strategy_args": worker.strategy_args.model_copy(update={"strategy_config": layout}),
            "device_mapping": None,
            "backend_timeout": worker_timeout_minutes(config),
        }
    )
