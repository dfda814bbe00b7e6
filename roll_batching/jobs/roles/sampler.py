"""The sampler, which draws rollouts in processes that do not train.

It holds a copy of the model, in the layout of actor_infer on devices of its own and else of a single process, and takes
over weights from checkpoints that training writes; or it asks an engine, which reads them as model directories.
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
from roll_batching.jobs.roles.messages import Weights, patience_inside
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.lifetime import die_with_parent

if TYPE_CHECKING:
    from roll_batching.distributed.parallel_layout import ParallelLayout
    from roll_batching.jobs.engines.asking import EngineClient
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronInferStrategy


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts to answer."""

    number: int
    prompts: Sequence[Prompt]
    seed: int
    shown: int
    """Responses whose texts are told as well (-1: all)."""

    @property
    def size(self) -> int:
        """Prompts."""
        return len(self.prompts)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The scored responses to a request. Sample i is response i % group to prompt i // group."""

    number: int
    version: int
    """Of the weights that drew them."""
    seconds: float
    """That drawing and scoring took."""
    lengths: np.ndarray
    """int64 `[n]`."""
    fields: dict[str, np.ndarray]
    """`input_ids`, `response_mask`, `log_probs`: flat, as in a `SampleBatch`."""
    scores: Any
    """`rollout.StepScores`, ids from 0."""
    figures: dict[str, float]
    """Of the engine, where one drew them."""

    @property
    def size(self) -> int:
        """Responses."""
        return len(self.lengths)


def serve(descriptor: int, parent: int) -> None:
    """One process of the sampler's world, as a child of the process that it works for."""
    die_with_parent(parent)  # before imports that take seconds
    join(Connection(descriptor))


def join(connection: Connection) -> None:
    """One process of the sampler's world; see `child.work`."""
    from roll_batching.jobs.roles.child import work

    work(connection, _Sampler)


class _Sampler:
    """The model, the tokenizer and the reward."""

    def __init__(self, config: JobConfig) -> None:
        from roll_batching.jobs.inputs import load_tokenizer
        from roll_batching.jobs.objectives.from_config import sampling_of
        from roll_batching.jobs.rewards.pool import reward_of
        from roll_batching.jobs.rollouts.rollout import start_reward

        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.sampling = sampling_of(config, self.tokenizer)
        reward = reward_of(config)
        assert reward is not None, "an RL job has a reward"
        self.reward = reward
        self.source: EngineClient | MegatronInferStrategy = (
            _engine(config) if uses_engine(config) else _model(config, self.sampling.temperature)
        )
        self.version = -1
        start_reward(self.source.layout, reward)

    def load(self, weights: Weights) -> None:
        """Draws with `weights` from now on."""
        from roll_batching.jobs.engines.asking import EngineClient

        if isinstance(self.source, EngineClient):
            self.source.load(weights.path, weights.version)
        else:
            self.source.load(weights.path)
        self.version = weights.version

    def answer(self, request: Request) -> Answer | None:
        """Draws and scores: each replica its share of the prompts."""
        from roll_batching.jobs.engines.asking import EngineClient
        from roll_batching.jobs.rollouts.rollout import generate_rollouts, score_rollouts

        began = time.perf_counter()
        rollouts = generate_rollouts(
            self.source,
            request.prompts,
            self.tokenizer,
            replace(self.sampling, seed=request.seed),
            prompt_length=self.config.prompt_length,
        )
        scores = score_rollouts(self.source, rollouts, self.reward, shown=request.shown)
        batch = _whole(self.source.layout, rollouts.batch)
        if batch is None:
            return None
        return Answer(
            number=request.number,
            version=self.version,
            seconds=time.perf_counter() - began,
            lengths=batch.lengths.numpy(),
            fields={name: batch[name].cpu().numpy() for name in ("input_ids", "response_mask", "log_probs")},
            scores=scores,
            figures=self.source.figures() if isinstance(self.source, EngineClient) else {},
        )


def _whole(layout: ParallelLayout, batch: SampleBatch) -> SampleBatch | None:
    """The samples of all replicas by id, on the first process; None on the others. Collective."""
    import torch.distributed as dist

    from roll_batching.samples import SampleBatch

    mine = batch.to("cpu") if layout.is_replica_leader else None
    parts: list[SampleBatch | None] = [None] * dist.get_world_size()
    first = dist.get_rank() == 0
    dist.gather_object(mine, parts if first else None, dst=0, group=layout.host_group)
    if not first:
        return None
    whole = SampleBatch.concat([part for part in parts if part is not None])
    return whole.select_ids(np.sort(whole.ids.numpy()))


def _engine(config: JobConfig) -> EngineClient:
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.jobs.engines.asking import EngineClient
    from roll_batching.planning import ParallelDims

    return EngineClient(config, make_layout(ParallelDims.of_world(1), start_processes()))


def _model(config: JobConfig, temperature: float) -> MegatronInferStrategy:
    from roll_batching.strategy import MegatronInferStrategy

    strategy = MegatronInferStrategy(sampler_worker(config), seed=config.seed, temperature=temperature)
    strategy.initialize(weights=False)
    return strategy


def sampler_worker(config: JobConfig) -> WorkerConfig:
    """The settings of the sampler's model: actor_train's, in actor_infer's layout or that of a single process."""
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
            "backend_timeout": patience_inside(config),
        }
    )
