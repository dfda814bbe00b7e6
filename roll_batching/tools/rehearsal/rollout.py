"""Rehearse rollouts of the training model: prefill, one token with a full KV cache, and compaction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll_batching.errors import LayoutError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.layout_rules import samples_apart
from roll_batching.jobs.objectives.from_config import sampling_of
from roll_batching.planning import ParallelDims
from roll_batching.strategy.decoding import cache_positions, split_by_cache_limit
from roll_batching.strategy.generation import (
    COMPACT_BELOW,
    CachedDecoder,
    ResponseBuffer,
    check_layout,
    decoding,
    make_sampler,
)
from roll_batching.strategy.model_state import ModelState
from roll_batching.tools.rehearsal.fake_data import ImageSizes, images_of_rows
from roll_batching.tools.rehearsal.recorder import Recorder
from roll_batching.tools.rehearsal.task import COMPACTION, DECODING, PREFILL


def has_local_rollouts(config: JobConfig) -> bool:
    """Whether the training model itself samples rollouts in every step."""
    return _has_rollouts_here(config) and not samples_apart(config)


def has_sampling_copy(config: JobConfig) -> bool:
    """Whether a copy of the model in another layout samples rollouts on the ranks of training."""
    return _has_rollouts_here(config) and samples_apart(config)


def _has_rollouts_here(config: JobConfig) -> bool:
    return bool(config.max_steps) and not (config.is_supervised or uses_engine(config) or config.has_sampler)


def fault_of(config: JobConfig, dims: ParallelDims) -> str | None:
    """Error of the first rollout of `config`; None if it would not fail."""
    try:
        if has_local_rollouts(config):
            check_layout(dims)
            if config.actor_train.strategy_args.strategy_config.fp8 is not None:
                return "generate is not supported in FP8: sample with an engine, or a model in bf16"
    except LayoutError as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class RolloutSizes:
    """Rollouts of one rank in a step."""

    prompts: int
    """Contexts that are computed once each: the prompts, with a rollout function those of each row's last turn."""
    rows: int
    context: int
    """Tokens of the longest context."""
    room: int
    """Positions per row in the KV cache."""


def sizes_of(config: JobConfig, dims: ParallelDims) -> RolloutSizes:
    """Rollouts of one data-parallel rank of `config` in a step."""
    prompts, settings = -(-config.prompts_per_generation // dims.dp_size), sampling_of(config, None)
    rows, context = prompts * settings.num_return_sequences, config.prompt_length
    if config.rollout_function is not None:  # every turn computes its whole context anew, and each row has its own
        prompts, context = rows, max(context, (config.sequence_length or 0) - settings.max_new_tokens)
    return RolloutSizes(prompts=prompts, rows=rows, context=context, room=cache_positions(context, settings, dims))


def rehearse_rollout(
    model: ModelState,
    config: JobConfig,
    recorder: Recorder,
    images: ImageSizes | None = None,
    *,
    with_values: bool = False,
) -> str:
    """Run the parts of `strategy.generation.generate` that hold the most memory; returns a note for the report.

    Which rows end early depends on sampled values. Memory is largest if none does, so all rows have full length here.
    Only the first and the last token are sampled: those between differ only in how much of the cache they attend to.
    """
    layout, settings = model.layout, sampling_of(config, None)
    if fault_of(config, layout):
        return "rollouts are not rehearsed: they fail"
    if layout.pp_size > 1:
        return (
            "rollouts are not rehearsed: a pipeline has no KV cache and recomputes the whole sequence for every token"
        )
    sizes = sizes_of(config, layout)
    wave = len(split_by_cache_limit([sizes.room] * sizes.rows, settings.max_tokens_in_cache, layout)[0])
    prompts = [torch.zeros(sizes.context, dtype=torch.int64, device=layout.device) for _ in range(sizes.prompts)]
    prompt_of = [number * sizes.prompts // sizes.rows for number in range(wave)]
    rows = [prompts[number] for number in prompt_of]
    shown = None
    if images is not None:
        shown = images_of_rows(model, images, sizes.context, prompt_of, with_values=with_values)
    number = torch.arange(wave, device=layout.device)
    with decoding(model, settings) as make_decoder, torch.no_grad():
        with recorder.during(PREFILL):
            sampler, source = make_sampler(model, settings, sizes.rows), make_decoder(rows, shown)
            logits = source.prefill()
            answers = ResponseBuffer(wave, settings, logits)
            tokens, log_probs = sampler(logits, number, 0)
            answers.append(0, tokens, log_probs)
        assert isinstance(source, CachedDecoder)
        with recorder.during(DECODING):
            source.longest = sizes.room - 1
            tokens, log_probs = sampler(source.step(tokens), number, settings.max_new_tokens - 1)
            answers.append(settings.max_new_tokens - 1, tokens, log_probs)
        with recorder.during(COMPACTION):  # with a full cache, and as many rows as a compaction keeps
            kept = number[: int(COMPACT_BELOW * wave)]
            source.select(kept)
            answers.select(kept)
    return (
        f"rollout: {wave:,} of a rank's {sizes.rows:,} rows at a time, {sizes.room:,} positions each; "
        "bounded by actor_infer.generating_args.max_tokens_in_cache"
    )
