"""Rules for values of RL keys: shaped rewards, groups, corrections, critics, lengths. Pairs of features: `support`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, GAE, compares_states
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import differing_keys, layout_problems, sampling_role

# ---- shaped rewards


def reward_shaping_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the values of `reward_scaling` and `overlong_buffer`."""
    scaling, buffer = job.reward_scaling, job.overlong_buffer
    if job.task != "grpo" or not job.max_steps:
        return
    if scaling is not None:
        for key in ("source", "target"):
            low, high = getattr(scaling, f"{key}_min"), getattr(scaling, f"{key}_max")
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                yield Problem(
                    ("reward_scaling", f"{key}_min"),
                    f"is {low}, not below {key}_max {high}; set finite numbers, this the smaller",
                )
    if buffer is not None:
        longest = buffer.response_length or job.response_length
        if longest is not None and buffer.length > longest:
            yield Problem(
                ("overlong_buffer", "length"), f"is {buffer.length}, more than the {longest} of a response; lower it"
            )
        if not math.isfinite(buffer.penalty):
            yield Problem(
                ("overlong_buffer", "penalty"), f"is {buffer.penalty}, no number to subtract; write a finite one"
            )


# ---- groups


def group_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of groups that leave nothing to compare: a single response, or equal ones from greedy decoding."""
    args, size = job.actor_infer.generating_args, job.group_size
    if job.is_supervised or not job.max_steps:
        return
    is_given = "num_return_sequences_in_group" in job.model_fields_set  # resolved settings have it, too
    if is_given and (job.has_reward or job.rollout_function is not None):
        yield from single_responses(job)
    key = args.greedy
    if key is None or size < 2 or job.rollout_function is not None:
        return
    text = f"is {args.greedy_value}: greedy decoding makes the {size} responses of a prompt equal, and nothing is"
    cure = {"do_sample": "set do_sample to true", "top_k": "raise top_k, or set it to 0"}.get(key, f"raise {key}")
    text += f" learned from comparing them; {cure}, or num_return_sequences_in_group to 1"
    yield Problem(("actor_infer", "generating_args", key), text)


def single_responses(job: JobKeys) -> Iterator[Problem]:
    """The problem of groups of one response, where the advantage estimator compares responses."""
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if job.task == "grpo" and estimator is not None and estimator.compares and job.group_size < 2:
        text = f"is {job.group_size}: {estimator.name} compares the responses of a prompt and needs at least 2; raise"
        yield Problem(("num_return_sequences_in_group",), f"{text} it, or set adv_estimator to reinforce")


# ---- GiGPO


def gigpo_problems(job: JobKeys) -> Iterator[Problem]:
    """The problem that both weights of GiGPO are 0."""
    if not compares_states(job.adv_estimator) or job.task != "grpo" or not job.max_steps:
        return
    if not job.episode_reward_weight and not job.step_reward_weight:
        yield Problem(
            ("step_reward_weight",), "is 0 beside episode_reward_weight: 0, which leaves no advantage; raise one"
        )


# ---- differences between trainer and engine


_KEY = "train_infer_correction"


def train_infer_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of contradictions within train_infer_correction."""
    correction = job.train_infer_correction
    if correction is None or job.task != "grpo" or not job.max_steps:
        return
    for path, text in correction.problems():
        yield Problem((_KEY, *path), text)


# ---- critics


def uses_critic(job: JobKeys) -> bool:
    """Whether the job builds and trains a critic."""
    return job.adv_estimator == GAE and job.critic is not None and bool(job.max_steps) and not job.is_supervised


def critic_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the critic and its keys."""
    for name, role in job.roles.items():
        if name != "critic" and role.model_args.value_head:
            text = "is true; only the role `critic` has a value head: leave it out here"
            yield Problem((name, "model_args", "value_head"), text)
        if name != "critic" and role.model_args.value_head_std:
            text = "belongs to a value head, which only the role `critic` has: leave it out here"
            yield Problem((name, "model_args", "value_head_std"), text)
    if job.adv_estimator == GAE and job.critic is None and not job.is_supervised:
        text = "gae needs the role `critic`; add that section (`critic: {}` takes actor_train's model), or choose "
        yield Problem(("adv_estimator",), f"{text}reinforce_plus_plus, grpo or rloo, which need no critic")
    if not uses_critic(job):
        return
    assert job.critic is not None
    if job.critic_warmup >= job.max_steps:
        text = f"is {job.critic_warmup} of max_steps: {job.max_steps}, so that no step would train the policy; lower it"
        yield Problem(("critic_warmup",), text)
    if not job.critic.model_args.value_head:
        yield Problem(("critic", "model_args", "value_head"), "is false, and a critic computes values; leave it out")
    critic, policy = job.critic.model_args.architecture, job.actor_train.model_args.architecture
    if critic is not None and policy is not None and critic.vocab_size < policy.vocab_size:
        text = (
            f"is {critic.vocab_size:,}, and the policy samples {policy.vocab_size:,} tokens, which the critic reads: "
        )
        yield Problem(("critic", "model_args", "architecture", "vocab_size"), f"{text}choose a critic with as many")
    for key in differing_keys(job.critic, job.actor_train):
        text = "differs from actor_train's: the critic shares its parallel sizes for now; leave it out here"
        yield Problem(("critic", "strategy_args", "strategy_config", key), text)
    yield from layout_problems("critic", job.critic)


# ---- lengths


def length_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of limits in tokens that contradict each other."""
    response, longest = job.response_length, job.sequence_length
    if job.is_supervised:
        return
    if job.max_steps and response is not None and longest is not None and "sequence_length" in job.model_fields_set:
        if longest < job.prompt_length + response:
            text = f"is {longest}, less than prompt_length {job.prompt_length} + response_length {response}"
            yield Problem(("sequence_length",), f"{text}; leave it or response_length out")
    for role in ("actor_infer", "validation"):
        tokens = getattr(job, role).generating_args.max_new_tokens
        if tokens is not None and response is not None and tokens > response:
            path = (role, "generating_args", "max_new_tokens")
            yield Problem(path, f"is {tokens}, more than the job's response_length {response}; lower it")
    tokens = job.actor_infer.generating_args.max_new_tokens
    limit, new_tokens = job.actor_infer.generating_args.max_tokens_in_cache, tokens or response
    layout = sampling_role(job).strategy_args.strategy_config
    if limit is not None and new_tokens is not None:
        needed = job.prompt_length + new_tokens + (layout.tensor_model_parallel_size - 1) * layout.sequence_parallel
        if limit < needed:
            path = ("actor_infer", "generating_args", "max_tokens_in_cache")
            yield Problem(path, f"is {limit}, but one prompt and its response may need {needed}; raise it")
