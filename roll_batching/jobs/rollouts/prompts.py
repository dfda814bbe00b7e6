"""The prompts of an RL job, step by step: all of them alike, or so many of each domain."""

from __future__ import annotations

from collections.abc import Iterable

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rewards import prompts_of_domains
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.texts.epochs import MixedStream, PromptStream
from roll_batching.jobs.texts.texts import Prompt, PromptDataset

Prompts = PromptStream | MixedStream[Prompt]


def prompt_stream(job: JobConfig, inputs: JobInputs) -> Prompts:
    """The prompts of the first step, then of every other; the same on all ranks."""
    assert inputs.prompts is not None and inputs.reward is not None
    members = prompts_by_domain(job, inputs.prompts, inputs.reward)
    if members is None:
        return PromptStream(inputs.prompts, job.rollout_batch_size, seed=job.seed)
    counts = prompts_of_domains(job.actor_train.data_args.domain_interleave_probs or {}, job.rollout_batch_size)
    return MixedStream({name: PromptDataset(own) for name, own in members.items()}, counts, seed=job.seed)


def prompts_by_domain(job: JobConfig, prompts: Iterable[Prompt], reward: RewardPool) -> dict[str, list[Prompt]] | None:
    """The prompts of each domain that has a part of every step; None where domains have none.

    Raises DataError when one of them has no prompts.
    """
    shares = job.actor_train.data_args.domain_interleave_probs
    if shares is None:
        return None
    members: dict[str, list[Prompt]] = {name: [] for name in shares}
    for prompt in prompts:
        home = reward.domain_of(prompt.extra)
        assert home is not None, "a prompt that no reward judges is found with the texts"
        members[reward.domains[home].name].append(prompt)
    if empty := [name for name, own in members.items() if not own]:
        raise DataError(
            f"domain_interleave_probs draws from {', '.join(empty)}, and no prompt of the files belongs there: add "
            "some, or remove the domain"
        )
    return members
