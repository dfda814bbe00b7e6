"""Rollouts of the job's own sampler: the prompts of a wave, and one token more when the cache is as full as it gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll_batching.errors import LayoutError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.objectives.from_config import sampling_of
from roll_batching.planning import ParallelDims
from roll_batching.rehearsal.recorder import Recorder
from roll_batching.rehearsal.task import COMPACTION, DECODING, PREFILL
from roll_batching.strategy.generation import (
    COMPACT_BELOW,
    Answers,
    Cached,
    check_layout,
    sampler_of,
    sources,
)
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.waves import room_of_row, waves_of


def rolls_out(job: JobConfig) -> bool:
    """Whether the model in training answers prompts itself, as part of a step."""
    return bool(job.max_steps) and not (supervised(job) or uses_engine(job) or job.has_sampler)


def fault_of(job: JobConfig, dims: ParallelDims) -> str | None:
    """Why the first rollout of `job` would fail; None where it would not."""
    try:
        if rolls_out(job):
            check_layout(dims)
    except LayoutError as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class RolloutSizes:
    """What a rank samples in a step at the most."""

    prompts: int
    rows: int
    room: int
    """Positions of a row in the cache."""


def sizes_of(job: JobConfig, dims: ParallelDims) -> RolloutSizes:
    """The rollouts of a rank of `job`."""
    prompts, settings = -(-job.rollout_batch_size // dims.dp_size), sampling_of(job, None)
    return RolloutSizes(
        prompts=prompts,
        rows=prompts * settings.num_return_sequences,
        room=room_of_row(job.prompt_length, settings, dims),
    )


def rehearse_rollout(model: ModelState, job: JobConfig, recorder: Recorder) -> str:
    """The pieces of a rollout as `strategy.generation.generate` makes them, of rows as long as the job allows.

    When rows end depends on values. Most memory is held if none does, so none does here, and of the tokens in between,
    which all are alike but for the width of what they see, none is drawn. Returns what was done, in words.
    """
    layout, settings = model.layout, sampling_of(job, None)
    if fault_of(job, layout):
        return "rollouts are not rehearsed: they fail"
    if layout.pp_size > 1:
        return "rollouts are not rehearsed: a pipeline has no cache and computes whole sequences for every token"
    sizes = sizes_of(job, layout)
    wave = len(waves_of([sizes.room] * sizes.rows, settings.max_tokens_in_cache, layout)[0])
    every = [torch.zeros(job.prompt_length, dtype=torch.int64, device=layout.device) for _ in range(sizes.prompts)]
    rows = [every[number // settings.num_return_sequences] for number in range(wave)]
    number = torch.arange(wave, device=layout.device)
    with sources(model, settings) as source_of, torch.no_grad():
        with recorder.during(PREFILL):
            sampler, source = sampler_of(model, settings, sizes.rows), source_of(rows)
            logits = source.first()
            answers = Answers(wave, settings, logits)
            drawn, log_probs = sampler(logits, number, 0)
            answers.add(0, drawn, log_probs)
        assert isinstance(source, Cached)
        with recorder.during(DECODING):
            source.longest = sizes.room - 1
            drawn, log_probs = sampler(source.following(drawn), number, settings.max_new_tokens - 1)
            answers.add(settings.max_new_tokens - 1, drawn, log_probs)
        with recorder.during(COMPACTION):  # as late as can be, and of as many rows
            rest = number[: int(COMPACT_BELOW * wave)]
            source.keep(rest)
            answers.keep(rest)
    return (
        f"rollout: {wave:,} of a rank's {sizes.rows:,} rows at once, {sizes.room:,} positions each; "
        "bounded by actor_infer.generating_args.max_tokens_in_cache"
    )
