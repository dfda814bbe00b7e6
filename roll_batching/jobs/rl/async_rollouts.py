"""Rollouts ahead of training: what each step trains on was asked for some steps before, and drawn meanwhile.

Requests are numbered in the order of the prompts, and a step takes those of its own prompts: every prompt is trained on
once, in the order of a synchronous run, and the data's position is that of the steps done. After s steps the requests
of at most 1 + s + `async_generation_ratio` steps have been made; so a sample is at most `async_generation_ratio` steps
old (rounded up), and a sampler that is faster than training waits. With a ratio of 0 the two take turns.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.engines.asking import joined
from roll_batching.jobs.engines.weights import weights_folder
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.roles.client import SAMPLER, RoleClient
from roll_batching.jobs.roles.messages import Weights, answer_timeout
from roll_batching.jobs.roles.sampler import Answer, Request
from roll_batching.jobs.rollouts.prompts import Prompts, prompt_stream
from roll_batching.jobs.rollouts.rollout import StepScores
from roll_batching.jobs.run.run import Run
from roll_batching.jobs.run_folder import folder_of
from roll_batching.jobs.seeds import step_seed
from roll_batching.jobs.streams.rollout_queue import QueueFigures
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.samples import FieldSpec, SampleBatch, rank_slice

WEIGHTS = "weights"
"""Folder, in the run's, of weights on their way to the sampler."""
_KINDS = {"input_ids": FieldSpec("token"), "response_mask": FieldSpec("token"), "log_probs": FieldSpec("next_token")}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What a step trains on."""

    batch: SampleBatch
    """This data-parallel rank's responses, as `rollout.Rollouts` has them."""
    scores: StepScores
    columns: Row


class AsyncRollouts:
    """The rollouts of a sampler that does not train. Building it, and every method but `close`, is collective.

    `served` is the job with the URLs of its engine's servers, as the sampler needs it.

    Raises RankError, the same on all ranks, when the sampler fails or may not be started again.
    """

    def __init__(self, run: Run, stream: Prompts, served: JobConfig) -> None:
        self.config, self.strategy, self.stream = run.config, run.strategy, stream
        self.engine = uses_engine(run.config)
        self.parts = parts_of(self.config.async_generation_ratio, self.config.rollout_batch_size)
        self.sampler = RoleClient(served, SAMPLER, run.start_workers) if dist.get_rank() == 0 else None
        self.folder = (weights_folder(self.config) if self.engine else folder_of(self.config)) / WEIGHTS
        self._made = 0
        self._prompts: list[Prompt] = []
        """Of the step whose request was made last."""
        self._requests: dict[int, Request] = {}
        """Made and not trained on."""
        self._version = 0
        self._ahead = prompt_stream(self.config, run.inputs)
        with self._agreed("starting the sampler"):
            if self.sampler is not None:
                self.sampler.start()

    def begin(self, done: int) -> None:
        """The first of the remaining steps is about to run, after `done` of them; weights and stream are in place."""
        with self._agreed("starting the sampler"):
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # what an earlier run was killed over
        self._ahead.load_state_dict(self.stream.state_dict())
        self._made = done * self.parts
        self.trained(done)

    def trained(self, step: int) -> Row:
        """The weights after `step` are done: the sampler gets them, and is asked for what they allow."""
        began = time.perf_counter()
        if step == self.config.max_steps:
            return {}
        path = self.folder / f"version-{step:06d}"
        if self.engine:
            self.strategy.export(path, replaces=lambda path: True)
        else:
            self.strategy.save(path, optimizer=False, manifest=False)
        self._version = step
        with self._agreed("asking for rollouts"):
            if self.sampler is not None:
                self.sampler.publish(Weights(version=step, path=path.resolve()))
                most = math.floor((step + 1 + self.config.async_generation_ratio) * self.parts)
                while self._made < min(most, self.config.max_steps * self.parts):
                    self._ask(self.sampler)
        return {"weights_seconds": time.perf_counter() - began}

    def take(self, step: int) -> Drawn:
        """The rollouts of `step`, waited for; drawn again where their weights are older than `max_staleness`."""
        next(self.stream)  # the position of this step; its prompts were drawn from `_ahead`
        answers = self.parts if self.config.max_staleness is None else 2 * self.parts  # those that are dropped, again
        found: list[Any] = [None]
        patience = answer_timeout(self.config, answers)
        with consensus(self.strategy.layout.host_group, "rollouts", patience=patience):
            if self.sampler is not None:
                found = [self._taken(self.sampler, step)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0, group=self.strategy.layout.host_group)
        batch, scores, columns = found[0]
        layout = self.strategy.layout
        mine = np.arange(len(batch))[rank_slice(len(batch), layout.dp_rank, layout.dp_size)]
        return Drawn(batch=batch.select(mine), scores=scores, columns=columns)

    def close(self) -> None:
        """Ends the sampler."""
        if self.sampler is not None:
            self.sampler.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.engine:
                with contextlib.suppress(OSError):  # something else lies there
                    self.folder.parent.rmdir()

    def _agreed(self, what: str) -> contextlib.AbstractContextManager[Any]:
        return consensus(self.strategy.layout.host_group, what)

    def _ask(self, sampler: RoleClient) -> None:
        """The next request."""
        step, part = divmod(self._made, self.parts)
        if part == 0:
            self._prompts = next(self._ahead)
        prompts = self._prompts[rank_slice(len(self._prompts), part, self.parts)]
        seed = step_seed(self.config.seed, step + 1, part)  # in one part: that of a synchronous run
        shown = self.config.rollout_samples  # of the whole step; -1: all
        shown = -(-shown // self.parts) if shown > 0 else shown
        request = Request(number=self._made, prompts=prompts, seed=seed, shown=shown)
        self._requests[request.number] = request
        sampler.ask(request)
        self._made += 1

    def _taken(self, sampler: RoleClient, step: int) -> tuple[SampleBatch, StepScores, Row]:
        """The rollouts of `step` as one batch, ids by place, and how they came. On rank 0."""
        began, figures = time.monotonic(), QueueFigures()
        wanted = range((step - 1) * self.parts, step * self.parts)
        answers: dict[int, Answer] = {}
        while missing := [number for number in wanted if number not in answers]:
            for answer in sampler.take(missing):
                age, count = self._version - answer.version, len(answer.lengths)
                if age > self.config.staleness_bound:
                    figures.dropped += count
                    sampler.ask(self._requests[answer.number])
                    continue
                answers[answer.number] = answer
                figures.taken += count
                figures.staleness += age * count
                figures.most = max(figures.most, age)
        for number in wanted:
            del self._requests[number]
        figures.waited = time.monotonic() - began
        columns = figures.to_row(sampler.ready) | {
            "sampler_seconds": sum(answer.seconds for answer in answers.values()),
            "sampler_restarts": sampler.restarts,
        }
        ordered = [answers[number] for number in wanted]
        columns |= joined([answer.figures for answer in ordered])
        return _batch_of(ordered), _scores_of(ordered), columns


def parts_of(ratio: float, prompts: int) -> int:
    """Requests of a step: one where whole steps are ahead, else as many as tell the part of one that is."""
    beyond = ratio - math.floor(ratio)
    return min(math.ceil(1 / beyond), prompts) if beyond else 1


def _batch_of(answers: Sequence[Answer]) -> SampleBatch:
    lengths = torch.from_numpy(np.concatenate([answer.lengths for answer in answers]))
    columns = {name: torch.from_numpy(np.concatenate([answer.fields[name] for answer in answers])) for name in _KINDS}
    return SampleBatch(torch.arange(len(lengths)), lengths, columns, _KINDS)


def _scores_of(answers: Sequence[Answer]) -> StepScores:
    """The scores of answers one after the other, as of one; ids count on."""
    parts: list[StepScores] = [answer.scores for answer in answers]
    firsts = np.cumsum([0, *(len(part.ids) for part in parts)])
    names = sorted({name for part in parts for name in part.marks})

    def mark(part: StepScores, name: str) -> np.ndarray:
        return part.marks.get(name, np.zeros(len(part.ids), dtype=bool))

    values: dict[str, Any] = {
        "ids": np.arange(firsts[-1]),
        "marks": {name: np.concatenate([mark(part, name) for part in parts]) for name in names},
        "said": [
            {**line, "id": int(first) + line["id"], "version": answer.version}
            for answer, first in zip(answers, firsts, strict=False)
            for line in answer.scores.said
        ],
    }
    for name in (field.name for field in fields(StepScores) if field.name not in values):
        values[name] = np.concatenate([getattr(part, name) for part in parts])
    return StepScores(**values)
