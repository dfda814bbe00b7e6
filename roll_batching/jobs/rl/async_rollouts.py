"""Asynchronous rollouts: requests for later steps are sampled in other processes while earlier steps train.

By default requests are numbered in the order of the prompts, and a step takes the rollouts of its prompts: each is
trained on once, in the order of a synchronous run, and the saved position in the data is that of the completed steps.
After s steps the requests of at most 1 + s + `async_generation_ratio` steps have been sent; so a sample is at most
`async_generation_ratio` steps old (rounded up), and a sampler that is faster than training waits. With a ratio of 0
sampling and training take turns.

Under `partial_rollout` each prompt is a request, and a step takes those that are answered first. What the sampler has
been asked for and no step has taken is saved with the position in the data: a resumed run asks for it again.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.errors import DataError, EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.engines.client import sum_metrics
from roll_batching.jobs.engines.probe import make_probe
from roll_batching.jobs.engines.sampler import sends_tied_head, weights_folder
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.roles.client import FREE_SAMPLER, SAMPLER, RoleClient, Weights, answer_timeout
from roll_batching.jobs.roles.sampler import Answer, Request
from roll_batching.jobs.rollouts.prompts import Prompts, prompt_stream
from roll_batching.jobs.rollouts.rollout import StepScores, impute_failed
from roll_batching.jobs.rollouts.token_versions import VERSIONS_SPEC, WEIGHT_VERSIONS
from roll_batching.jobs.run.context import JobContext
from roll_batching.jobs.seeds import step_seed
from roll_batching.jobs.streams.rollout_queue import QueueMetrics
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.samples import FieldSpec, SampleBatch, rank_slice
from roll_batching.samples.fields import EXPERTS_SPEC, ROLLOUT_IDS, ROUTED_EXPERTS

WEIGHTS = "weights"
"""Folder of the weights that the sampler loads, in the run's folder (or the engine's weights folder)."""
_SCHEMA = {
    "input_ids": FieldSpec("token"),
    "response_mask": FieldSpec("token"),
    "log_probs": FieldSpec("next_token"),
    ROLLOUT_IDS: FieldSpec("sample"),
    ROUTED_EXPERTS: EXPERTS_SPEC,
    WEIGHT_VERSIONS: VERSIONS_SPEC,
}
"""Fields that an answer may have."""


class AsyncRollouts:
    """The rollouts of a sampler in its own processes. Building it, and every method but `close`, is collective.

    `sampler_config` is the job's settings with the URLs of its engine's servers.

    Raises RankError, the same on all ranks, when the sampler fails or may not be started again.
    """

    def __init__(self, context: JobContext, stream: Prompts, sampler_config: JobConfig) -> None:
        self.config, self.strategy, self.stream = context.config, context.strategy, stream
        self.uses_engine, self.evaluates = uses_engine(self.config), context.inputs.heldout is not None
        self.parts = parts_per_step(self.config)
        self.arrivals = Arrivals(self.parts)
        kind = FREE_SAMPLER if self.config.in_flight_updates else SAMPLER
        self.client = RoleClient(sampler_config, kind, context.start_workers) if dist.get_rank() == 0 else None
        parent = weights_folder(self.config) if self.uses_engine else self.config.run_folder
        self.folder = parent / WEIGHTS
        self._num_requests = 0
        """Requests sent so far, including those of completed steps."""
        self._num_more = 0
        """Requests of further generation batches, sent so far."""
        self._prompts: list[Prompt] = []
        """Prompts of the step of the last request."""
        self._pending: dict[int, Request] = {}
        """By number, the requests whose step is not completed: their rollouts may be too old and be sampled again."""
        self._version = 0
        self._request_stream = prompt_stream(self.config, context.inputs)
        """A second stream of the prompts, at the last request; `stream` is at the step that trains."""
        with self._consensus("starting the sampler"):
            if self.client is not None:
                self.client.start()

    def start_after(self, completed_steps: int) -> None:
        """Sends the current weights and the first requests. Call it once weights and stream are restored."""
        with self._consensus("starting the sampler"):
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # a killed run may have left some
        self._request_stream.load_state_dict(self.stream.state_dict())
        partial = self.config.partial_rollout
        self._num_requests = self.arrivals.first if partial else completed_steps * self.parts
        self.publish_weights(completed_steps)

    def publish_weights(self, step: int) -> Metrics:
        """Sends the weights after `step`, and the requests that they allow; returns metrics of the transfer."""
        started = time.perf_counter()
        if step == self.config.max_steps and not self.evaluates:
            return {}  # nothing samples with the last weights
        path = self.folder / f"version-{step:06d}"
        probe = make_probe(self.strategy) if self.uses_engine else None
        if self.uses_engine:
            with_head = sends_tied_head(self.config, self.strategy.layout.device)
            self.strategy.export(path, replaces=lambda path: True, with_head=with_head)
        else:
            self.strategy.save(path, optimizer=False, manifest=False)
        self._version = step
        with self._consensus("asking for rollouts"):
            if self.client is not None:
                self.client.publish(Weights(version=step, path=path.resolve(), probe=probe))
                allowed = math.floor((step + 1 + self.config.async_generation_ratio) * self.parts)
                while self._num_requests < min(allowed, self.config.max_steps * self.parts):
                    self._send_request(self.client)
        return {"weights_seconds": time.perf_counter() - started}

    def take(self, step: int, batch_number: int = 0) -> tuple[SampleBatch, StepScores, Metrics]:
        """Waits for the rollouts of `step`; returns this rank's (as `Rollouts.batch`), all ranks' scores, and metrics.

        Under dynamic sampling the rollouts are of one generation batch; batches from number 1 on are requested here.
        Responses of weights older than `max_staleness` are dropped and sampled again.
        """
        partial = self.config.partial_rollout
        if not partial:
            next(self.stream)  # advances the saved position; the prompts came from `_request_stream`
        answers = self.parts if self.config.max_staleness is None else 2 * self.parts  # dropped ones are sampled again
        step_rollouts: list[Any] = [None]
        started, patience = time.monotonic(), answer_timeout(self.config, answers)
        with consensus(self.strategy.layout.host_group, "rollouts", patience=patience):
            if self.client is not None:
                if batch_number:
                    numbers = [self._send_more(self.client, step, batch_number)]
                elif partial:
                    numbers = self.client.first(self.parts)
                else:
                    numbers = list(range((step - 1) * self.parts, step * self.parts))
                step_rollouts = [(numbers, *self._collect(self.client, numbers, started))]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(step_rollouts, src=0, group=self.strategy.layout.host_group)
        numbers, batch, scores, metrics = step_rollouts[0]
        if partial:
            for _ in range(self.arrivals.add(numbers)):
                next(self.stream)
        layout = self.strategy.layout
        # A rank has whole rollouts, as where it makes them itself.
        rollouts, rollout_of = np.arange(len(scores.ids)), batch[ROLLOUT_IDS].numpy()
        local = rollouts[rank_slice(len(rollouts), layout.dp_rank, layout.dp_size)]
        return batch.select(np.flatnonzero(np.isin(rollout_of, local))), scores, metrics

    def evaluate(self, step: int, prompts: Sequence[Prompt], seed: int) -> StepScores:
        """Waits for the sampler's responses to held-out `prompts`; returns their scores, the same on all ranks.

        The weights are those after `step`, which were published last: the sampler completes the request in progress,
        loads them, and answers before all other requests. None later can arrive while training waits here.
        """
        box: list[Any] = [None]
        patience = answer_timeout(self.config, 2)  # of the request in progress, and of this one
        with consensus(self.strategy.layout.host_group, "held-out evaluation", patience=patience):
            if self.client is not None:
                number = -1 - step  # below those of rollouts: the sampler answers the lowest first
                shown = self.config.rollout_samples
                self.client.ask(Request(number=number, prompts=prompts, seed=seed, shown=shown, held_out=True))
                (answer,) = self.client.take([number])
                if answer.version != step:
                    text = f"the sampler answered held-out prompts with the weights of step {answer.version}"
                    raise EngineError(f"{text}, and step {step} is evaluated: report this as a bug")
                box = [answer.scores]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0, group=self.strategy.layout.host_group)
        scores: StepScores = box[0]
        return scores

    def close(self) -> None:
        """End the sampler's processes and remove its weights."""
        if self.client is not None:
            self.client.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.uses_engine:
                with contextlib.suppress(OSError):  # not empty
                    self.folder.parent.rmdir()

    def _consensus(self, action: str) -> contextlib.AbstractContextManager[Any]:
        return consensus(self.strategy.layout.host_group, action)

    def _send_request(self, client: RoleClient) -> None:
        """Send the next request: one part of a step's prompts."""
        step, part = divmod(self._num_requests, self.parts)
        if part == 0:
            self._prompts = next(self._request_stream)
        prompts = self._prompts[rank_slice(len(self._prompts), part, self.parts)]
        seed = step_seed(self.config.seed, step + 1, part)  # with one part per step: that of a synchronous run
        shown = self.config.rollout_samples  # of the whole step; -1: all
        shown = (part + 1) * shown // self.parts - part * shown // self.parts if shown > 0 else shown
        if self._num_requests not in self.arrivals.taken:
            first = rank_slice(len(self._prompts), part, self.parts).start
            self._send(client, Request(number=self._num_requests, prompts=prompts, seed=seed, shown=shown, first=first))
        self._num_requests += 1

    def _send_more(self, client: RoleClient, step: int, batch_number: int) -> int:
        """Send the request of a further generation batch of `step`; returns its number."""
        number = self.config.max_steps * self.parts + self._num_more  # beyond those of all steps
        self._num_more += 1
        seed = step_seed(self.config.seed, step, batch_number)
        prompts, shown = next(self._request_stream), self.config.rollout_samples
        self._send(client, Request(number=number, prompts=prompts, seed=seed, shown=shown))
        return number

    def _send(self, client: RoleClient, request: Request) -> None:
        self._pending[request.number] = request
        client.ask(request)

    def _collect(
        self, client: RoleClient, numbers: Sequence[int], started: float
    ) -> tuple[SampleBatch, StepScores, Metrics]:
        """Waits on rank 0 for the rollouts of these requests; returns them as one batch, with scores and metrics.

        Ids are the positions of the samples in the batch.
        """
        queue = QueueMetrics()
        answers: dict[int, Answer] = {}
        while missing := [number for number in numbers if number not in answers]:
            for answer in client.take(missing):
                staleness, count = self._version - answer.version, len(answer.lengths)
                if not self.config.in_flight_updates and staleness > self.config.staleness_bound:
                    queue.dropped += count
                    client.ask(self._pending[answer.number])
                    continue
                answers[answer.number] = answer
                if not self.config.in_flight_updates:
                    queue.add(staleness, count)
        for number in numbers:
            del self._pending[number]
        join = max if self.config.in_flight_updates else sum  # then answers overlap
        metrics = queue.to_dict(client.ready) | {
            "queue_wait_seconds": time.monotonic() - started,
            "sampler_seconds": join(answer.seconds for answer in answers.values()),
            "sampler_restarts": client.restarts,
        }
        ordered = [answers[number] for number in numbers]
        metrics |= sum_metrics([answer.figures for answer in ordered])
        batch, scores = _concat_batches(ordered), _concat_scores(ordered)
        if self.config.in_flight_updates:
            if scores.failed.all():
                raise DataError(
                    f"the reward function failed on all {len(scores.ids)} responses of a step, which no reward_failure "
                    "can replace: the sampler's warnings above say how"
                )
            if self.config.reward_failure == "drop":
                scores = replace(scores, rewards=impute_failed(scores, self.config.group_size))
            batch, of_tokens = fresh_tokens(batch, self._version, self.config.max_staleness)
            metrics |= of_tokens
        return batch, scores, metrics


def parts_per_step(config: JobConfig) -> int:
    """Number of requests of a step: under `partial_rollout` one for each prompt.

    Else 1 for a whole `async_generation_ratio`, or enough for its fraction (0.5: 2), up to the number of prompts.
    """
    ratio, prompts = config.async_generation_ratio, config.rollout_batch_size
    if config.partial_rollout:
        return prompts
    fraction = ratio - math.floor(ratio)
    return min(math.ceil(1 / fraction), prompts) if fraction else 1


class Arrivals:
    """Which requests completed steps have taken, where they take those that are answered first; `parts` in a step.

    It is a part of checkpoints.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self.first = 0
        """Number of the first request of the oldest prompts of which some are not taken."""
        self.taken: set[int] = set()
        """Numbers from `first` on that are taken."""

    def add(self, numbers: Sequence[int]) -> int:
        """Adds what a step takes; returns the number of whole batches of prompts by which `first` moves on."""
        self.taken.update(numbers)
        batches = 0
        while self.taken.issuperset(oldest := range(self.first, self.first + self._parts)):
            self.taken.difference_update(oldest)
            self.first += self._parts
            batches += 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {"parts": self._parts, "first": self.first, "taken": sorted(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises DataError where steps had another number of prompts."""
        if state["parts"] != self._parts:
            raise DataError(
                f"the checkpoint was saved under partial_rollout with rollout_batch_size {state['parts']}, and it is "
                f"{self._parts} now: set it again"
            )
        self.first, self.taken = int(state["first"]), set(state["taken"])


def fresh_tokens(batch: SampleBatch, version: int, max_staleness: int | None) -> tuple[SampleBatch, Metrics]:
    """`batch` without the versions of its tokens; `response_mask` is cleared where they are too old; and metrics.

    `version` is that of the current weights.
    """
    mask, versions = batch["response_mask"].bool(), batch[WEIGHT_VERSIONS]
    staleness = (version - versions)[mask]
    changes = [len(set(of_sample.tolist()) - {-1}) for of_sample in batch.to_lists(WEIGHT_VERSIONS)]
    metrics = {
        "staleness_mean": float(staleness.double().mean()),
        "staleness_max": int(staleness.max()),
        "weight_versions_mean": float(np.mean(changes)),
    }
    batch = batch.without(WEIGHT_VERSIONS)
    if max_staleness is not None:
        is_fresh = mask & (version - versions <= max_staleness)
        if not is_fresh.any():
            raise DataError(
                f"all tokens of a step are older than max_staleness={max_staleness}, the freshest by "
                f"{int(staleness.min())} versions: raise it, or lower async_generation_ratio"
            )
        metrics["stale_tokens"] = 1 - float(is_fresh.sum()) / float(mask.sum())
        batch = batch.with_fields({"response_mask": is_fresh}, {"response_mask": batch.schema["response_mask"]})
    return batch, metrics


def _concat_batches(answers: Sequence[Answer]) -> SampleBatch:
    lengths = torch.from_numpy(np.concatenate([answer.lengths for answer in answers]))
    schema = {name: _SCHEMA[name] for name in answers[0].fields}
    columns = {name: torch.from_numpy(np.concatenate([answer.fields[name] for answer in answers])) for name in schema}
    shifts = zip(answers, _first_rollouts(answers), strict=True)
    columns[ROLLOUT_IDS] = torch.from_numpy(
        np.concatenate([first + answer.fields[ROLLOUT_IDS] for answer, first in shifts])
    )
    return SampleBatch(torch.arange(len(lengths)), lengths, columns, schema)


def _first_rollouts(answers: Sequence[Answer]) -> list[int]:
    """The number of rollouts before each of `answers`."""
    counts = np.array([len(answer.scores.ids) for answer in answers])
    first: list[int] = (np.cumsum(counts) - counts).tolist()
    return first


def _concat_scores(answers: Sequence[Answer]) -> StepScores:
    """Joins the scores of all answers, with consecutive ids; log lines get the version of their weights."""
    parts = []
    for answer, first in zip(answers, _first_rollouts(answers), strict=True):
        scores: StepScores = answer.scores
        lines = [{**line, "id": first + line["id"], "version": answer.version} for line in scores.sample_log]
        parts.append(replace(scores, ids=first + scores.ids, sample_log=lines))
    return StepScores.concat(parts)
