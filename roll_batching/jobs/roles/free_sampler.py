"""A sampler whose rollouts run free: requests are answered as they are complete, while the engine takes new weights."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.engines.client import EngineClient
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.roles.client import Weights
from roll_batching.jobs.roles.sampler import Answer, Request, SerialSampler
from roll_batching.jobs.roles.worker import Reply, failure_of, serve_requests
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutClient, RolloutPrompt, RolloutSample
from roll_batching.jobs.rollouts.free_rollouts import CompleteRequest, FreeRollouts
from roll_batching.jobs.rollouts.function_rollouts import function_samples, rollout_prompts
from roll_batching.jobs.rollouts.rollout import Rollouts, score_rollouts
from roll_batching.jobs.texts.encode import encode_prompts
from roll_batching.samples import FieldSpec
from roll_batching.samples.fields import ROLLOUT_IDS

_WAIT_SECONDS = 60.0


def serve(connection: Connection) -> None:
    """Runs the sampler until `connection` closes; see `serve_requests`."""
    serve_requests(connection, FreeSampler)


class FreeSampler(SerialSampler):
    """Starts the rollouts of a request at once, and replies when all are scored. Evaluations are answered in turn."""

    def __init__(self, config: JobConfig, reply: Reply) -> None:
        super().__init__(config)
        assert isinstance(self.source, EngineClient) and isinstance(self.source.engine, Replicas)
        self._engine = self.source.engine
        function = _one_answer(config) if self.function is None else self.function.function
        self.rollout_function = replace(function, needs_versions=True)
        self._reply = reply
        self._requests: dict[int, tuple[Request, float]] = {}
        """Requests under way, and when they began."""
        self._rollouts: FreeRollouts | None = None
        self._scoring = threading.Lock()

    def load(self, weights: Weights) -> None:
        """Has the engine load `weights`; responses under way are interrupted and go on with them."""
        if self._rollouts is not None:
            with self._rollouts.interrupted():
                super().load(weights)
            return
        super().load(weights)
        self._rollouts = FreeRollouts(self._engine, self.rollout_function, self.tokenizer, self.sampling)
        self._rollouts.__enter__()  # until the process ends
        threading.Thread(target=self._answer_all, args=(self._rollouts,), name="answers", daemon=True).start()

    def answer(self, request: Request) -> Answer | None:
        """Starts the rollouts of `request`; returns the answer to an evaluation."""
        if request.held_out:
            with self._scoring:
                return super().answer(request)
        assert self._rollouts is not None, "weights come first"
        encoded = encode_prompts(request.prompts, self.tokenizer, max_length=self.config.prompt_length)
        first = request.first * self.sampling.num_return_sequences
        prompts = [
            replace(prompt, sample=first + prompt.sample)
            for prompt in rollout_prompts(encoded, request.prompts, replace(self.sampling, seed=request.seed))
        ]
        self._requests[request.number] = request, time.perf_counter()
        self._rollouts.start(request.number, prompts, request.seed)
        return None

    def _answer_all(self, rollouts: FreeRollouts) -> None:
        """Thread: scores complete requests and replies, until the process ends."""
        try:
            while True:
                if (complete := rollouts.wait(_WAIT_SECONDS)) is not None:
                    self._reply(self._answer_of(complete))
        except (BrokenPipeError, ConnectionResetError):
            return  # training has ended
        except Exception as error:
            self._reply(failure_of(error))
            if not isinstance(error, RollBatchingError):
                raise  # its traceback belongs into the output

    def _answer_of(self, complete: CompleteRequest) -> Answer:
        request, started = self._requests.pop(complete.number)
        samples = function_samples(self.rollout_function, complete.prompts, complete.rollouts, self.tokenizer)
        ids, seconds = np.arange(len(complete.rollouts)), time.perf_counter() - started
        rollout_ids = {ROLLOUT_IDS: torch.from_numpy(ids.repeat(samples.samples))}
        rollouts = Rollouts(
            ids=ids,
            batch=samples.batch.with_fields(rollout_ids, {ROLLOUT_IDS: FieldSpec("sample")}),
            samples=samples.samples,
            completions=samples.completions,
            scored=samples.scored,
            turns=samples.turns,
            episodes=samples.episodes,
            prompt_tokens=samples.prompt_tokens,
            seed=request.seed,
            group_size=self.sampling.num_return_sequences,
            max_rollouts=len(ids),
            total_rollouts=len(ids),
            seconds=seconds,
        )
        with self._scoring:
            scores = score_rollouts(self.source, rollouts, self.reward, shown=request.shown, is_step=False)
        return Answer(
            number=request.number,
            version=self.version,
            seconds=time.perf_counter() - started,
            lengths=rollouts.batch.lengths.numpy(),
            fields={name: rollouts.batch[name].numpy() for name in rollouts.batch.schema},
            scores=scores,
            figures=self.engine_metrics(request),
        )


def _one_answer(config: JobConfig) -> LoadedRolloutFunction:
    """The rollout of a job without a rollout function: the model answers the prompt once."""

    async def answer(prompt: RolloutPrompt, client: RolloutClient, tokenizer: Any) -> RolloutSample:
        turn = await client.generate(prompt.tokens)
        return RolloutSample(
            tokens=turn.tokens, loss_mask=[1] * len(turn.tokens), log_probs=turn.log_probs, finished=turn.finished
        )

    return LoadedRolloutFunction(
        path="(none: one answer)",
        function=answer,
        arguments={},
        timeout=config.rollout_function_timeout,
        max_calls=1,
        sequence_length=config.sequence_length or 1,
        has_reward=True,
    )
