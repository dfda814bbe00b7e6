"""Rules of the lengths of prompts, responses and caches."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import sampling_role
from roll_batching.jobs.config.supervised import supervised


def length_problems(job: JobKeys) -> Iterator[Problem]:
    """Lengths that do not fit each other."""
    response, longest = job.response_length, job.sequence_length
    if supervised(job):
        return
    if job.max_steps and response is not None and longest is not None and "sequence_length" in job.model_fields_set:
        if longest < job.prompt_length + response:
            text = f"is {longest}, less than prompt_length {job.prompt_length} + response_length {response}"
            yield Problem(("sequence_length",), f"{text}; leave it or response_length out")
    for role in ("actor_infer", "validation"):
        tokens = getattr(job, role).generating_args.max_new_tokens
        if tokens is not None and response is not None and tokens > response:
            path = (role, "generating_args", "max_new_tokens")
            yield Problem(path, f"is {tokens}, more than the job's response_length {response}")
    tokens = job.actor_infer.generating_args.max_new_tokens
    limit, new_tokens = job.actor_infer.generating_args.max_tokens_in_cache, tokens or response
    layout = sampling_role(job).strategy_args.strategy_config
    if limit is not None and new_tokens is not None:
        needed = job.prompt_length + new_tokens + (layout.tensor_model_parallel_size - 1) * layout.sequence_parallel
        if limit < needed:
            path = ("actor_infer", "generating_args", "max_tokens_in_cache")
            yield Problem(path, f"is {limit}, but one prompt and its response may need {needed}; raise it")
