"""Rules and notices of the role `critic` and of the keys that only adv_estimator: gae reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.advantages import GAE
from roll_batching.jobs.config.diagnostics import Notice, NoticeKind, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import differing_keys, layout_problems
from roll_batching.jobs.config.supervised import supervised

CRITIC_KEYS = ("lambd", "value_clip", "critic_warmup", "critic_epochs")
"""Keys of the job that only adv_estimator: gae reads."""


def uses_critic(job: JobKeys) -> bool:
    """Whether the job builds and trains a critic."""
    return job.adv_estimator == GAE and job.critic is not None and bool(job.max_steps) and not supervised(job)


def critic_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the critic and its keys."""
    for name, role in job.roles.items():
        if name != "critic" and role.model_args.value_head:
            text = "is true; only the role `critic` has a value head: leave it out here"
            yield Problem((name, "model_args", "value_head"), text)
        if name != "critic" and role.model_args.value_head_std:
            text = "belongs to a value head, which only the role `critic` has: leave it out here"
            yield Problem((name, "model_args", "value_head_std"), text)
    if job.adv_estimator == GAE and job.critic is None and not supervised(job):
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
    mine, policy = job.critic.model_args.architecture, job.actor_train.model_args.architecture
    if mine is not None and policy is not None and mine.vocab_size < policy.vocab_size:
        text = f"is {mine.vocab_size:,}, and the policy samples {policy.vocab_size:,} tokens, which the critic reads: "
        yield Problem(("critic", "model_args", "architecture", "vocab_size"), f"{text}choose a critic with as many")
    if job.own_devices("critic") is not None:
        text = "differs from actor_train's: the critic shares its devices for now; leave it out here"
        yield Problem(("critic", "device_mapping"), text)
    for key in differing_keys(job.critic, job.actor_train):
        text = "differs from actor_train's: the critic shares its parallel sizes for now; leave it out here"
        yield Problem(("critic", "strategy_args", "strategy_config", key), text)
    if job.batch_balance:
        text = "is true, and the critic's mini-batches are drawn over all ranks; set it to false under gae"
        yield Problem(("batch_balance",), text)
    yield from layout_problems("critic", job.critic)


def critic_notices(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys of a critic that the job does not build."""
    if uses_critic(job):
        return
    cause = f"task is {job.task}" if job.task != "grpo" else f"adv_estimator is {job.adv_estimator}, not gae"
    if job.task == "grpo" and job.adv_estimator == GAE:
        cause = "max_steps is 0"
    for key in CRITIC_KEYS:
        if given.get(key):
            yield no_effect((key,), cause)
    if job.critic is not None:
        yield Notice(("critic",), f"is not built: {cause}", kind=NoticeKind.NOT_BUILT)
