"""The process that draws rollouts while another trains; `sampler` starts it and speaks with it.

It holds a copy of the model in the layout of a single process, and takes over weights from checkpoints that training
writes; or it asks an engine, which reads them as model directories. It does the lowest-numbered of what it was asked
for, each with the newest weights there are when it begins.
"""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_batching.config import JobConfig, WorkerConfig
from roll_batching.config.engine_rules import uses_engine
from roll_batching.data.texts import Prompt
from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import die_with_parent
from roll_batching.registry import describe_error

if TYPE_CHECKING:
    from roll_batching.rl.engine_sampler import EngineClient
    from roll_batching.strategy import MegatronInferStrategy


@dataclass(frozen=True, kw_only=True)
class Weights:
    """New weights: a checkpoint's folder, or a model directory."""

    version: int
    """RL steps that made them."""
    path: Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts to answer."""

    number: int
    prompts: Sequence[Prompt]
    seed: int
    shown: int
    """Responses whose texts are told as well (-1: all)."""


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


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The model is built and the reward answers."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights were taken over: those before them are read no more."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The process ends: nothing that starting it again would mend."""

    words: str


def send(connection: Connection, message: Any) -> None:
    """One message. Pickled as plain data: torch would share memory, which ends with its process."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when there will be none."""
    return pickle.loads(connection.recv_bytes())


def serve(descriptor: int, parent: int) -> None:
    """Builds what the first message, a `JobConfig`'s plain data, describes, then works until the other end closes."""
    die_with_parent(parent)
    connection = Connection(descriptor)
    try:
        sampler = _Sampler(JobConfig.model_validate(receive(connection)))
        send(connection, Ready())
        inbox = _Inbox(connection)
        while True:
            weights, request = inbox.next()
            if weights is not None:
                sampler.load(weights)
                send(connection, Loaded(version=weights.version))
            if request is not None:
                send(connection, sampler.answer(request))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # training is over
    except RollBatchingError as error:
        send(connection, Failed(words=f"{type(error).__name__}: {error}"))
    except Exception as error:
        send(connection, Failed(words=describe_error(error)))
        raise


class _Inbox:
    """Reads all the time, so that whoever asks never waits for it to be read."""

    def __init__(self, connection: Connection) -> None:
        self._requests: dict[int, Request] = {}
        self._weights: Weights | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(connection,), name="inbox", daemon=True).start()

    def next(self) -> tuple[Weights | None, Request | None]:
        """Waits for work: weights to take over, the request to answer then. Raises EOFError when no more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._weights is not None or self._requests or self._closed)
            if self._closed:
                raise EOFError
            weights, self._weights = self._weights, None
            number = min(self._requests, default=None)
            return weights, None if number is None else self._requests.pop(number)

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                message = receive(connection)
                with self._changed:
                    if isinstance(message, Weights):
                        self._weights = message
                    else:
                        self._requests[message.number] = message
                    self._changed.notify()
        except (EOFError, OSError):
            with self._changed:
                self._closed = True
                self._changed.notify()


class _Sampler:
    """The model, the tokenizer and the reward."""

    def __init__(self, config: JobConfig) -> None:
        # Megatron says several times per process that it does without these; on a CPU it always does.
        warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
        from roll_batching.rl.from_config import sampling_of
        from roll_batching.rl.inputs import load_tokenizer
        from roll_batching.rl.reward_pool import reward_of

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
        self.reward.start()

    def load(self, weights: Weights) -> None:
        """Draws with `weights` from now on."""
        from roll_batching.rl.engine_sampler import EngineClient

        if isinstance(self.source, EngineClient):
            self.source.load(weights.path, weights.version)
        else:
            self.source.load(weights.path)
        self.version = weights.version

    def answer(self, request: Request) -> Answer:
        """Draws and scores."""
        from roll_batching.rl.engine_sampler import EngineClient
        from roll_batching.rl.rollout import generate_rollouts, score_rollouts

        began = time.perf_counter()
        rollouts = generate_rollouts(
            self.source,
            request.prompts,
            self.tokenizer,
            replace(self.sampling, seed=request.seed),
            prompt_length=self.config.prompt_length,
        )
        scores = score_rollouts(self.source, rollouts, self.reward, shown=request.shown)
        batch = rollouts.batch
        return Answer(
            number=request.number,
            version=self.version,
            seconds=time.perf_counter() - began,
            lengths=batch.lengths.numpy(),
            fields={name: batch[name].cpu().numpy() for name in ("input_ids", "response_mask", "log_probs")},
            scores=scores,
            figures=self.source.figures() if isinstance(self.source, EngineClient) else {},
        )


def _engine(config: JobConfig) -> EngineClient:
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from roll_batching.rl.engine_sampler import EngineClient

    return EngineClient(config, make_layout(ParallelDims.of_world(1), start_processes()))


def _model(config: JobConfig, temperature: float) -> MegatronInferStrategy:
    from roll_batching.strategy import MegatronInferStrategy

    strategy = MegatronInferStrategy(sampler_worker(config), seed=config.seed, temperature=temperature)
    strategy.initialize(weights=False)
    return strategy


def sampler_worker(config: JobConfig) -> WorkerConfig:
    """The settings of the sampler's model: actor_train's, in the layout of a single process."""
    worker = config.actor_train
    alone = worker.strategy_args.strategy_config.model_copy(
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
            "strategy_args": worker.strategy_args.model_copy(update={"strategy_config": alone}),
            "device_mapping": None,
        }
    )
