"""The prompts of an RL job, step by step: all of them alike, or so many of each domain."""

from __future__ import annotations

from roll_batching.config import JobConfig
from roll_batching.config.rewards import prompts_of_domains
from roll_batching.data.epochs import MixedStream, PromptStream
from roll_batching.data.texts import Prompt, PromptDataset
from roll_batching.errors import DataError
from roll_batching.rl.inputs import JobInputs

Prompts = PromptStream | MixedStream[Prompt]


def prompt_stream(job: JobConfig, inputs: JobInputs) -> Prompts:
    """The prompts of the first step, then of every other; the same on all ranks.

    Raises DataError when a domain that is to be drawn from has no prompts.
    """
    assert inputs.prompts is not None and inputs.reward is not None
    shares = job.actor_train.data_args.domain_interleave_probs
    if shares is None:
        return PromptStream(inputs.prompts, job.rollout_batch_size, seed=job.seed)
    names = [domain.name for domain in inputs.reward.domains]
    members: dict[str, list[Prompt]] = {name: [] for name in shares}
    for prompt in inputs.prompts:
        home = inputs.reward.domain_of(prompt.extra)
        assert home is not None  # checked with the texts
        members[names[home]].append(prompt)
    if empty := [name for name, prompts in members.items() if not prompts]:
        raise DataError(
            f"domain_interleave_probs draws from {', '.join(empty)}, and no prompt of the files belongs there: add "
            "some, or remove the domain"
        )
    domains = {name: PromptDataset(prompts) for name, prompts in members.items()}
    return MixedStream(domains, prompts_of_domains(shares, job.rollout_batch_size), seed=job.seed)
