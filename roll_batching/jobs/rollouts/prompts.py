"""The prompts of every RL step: from one dataset, or a fixed number from each reward domain."""

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


def prompt_stream(config: JobConfig, inputs: JobInputs) -> Prompts:
    """Iterator over the prompts of each step or generation batch, the same on all ranks."""
    assert inputs.prompts is not None and inputs.reward is not None
    domains = prompts_by_domain(config, inputs.prompts, inputs.reward)
    if domains is None:
        return PromptStream(inputs.prompts, config.prompts_per_generation, seed=config.seed)
    counts = prompts_of_domains(config.actor_train.data_args.domain_interleave_probs or {}, config.rollout_batch_size)
    datasets = {name: PromptDataset(prompts) for name, prompts in domains.items()}
    return MixedStream(datasets, counts, seed=config.seed)


def prompts_by_domain(
    config: JobConfig, prompts: Iterable[Prompt], reward: RewardPool
) -> dict[str, list[Prompt]] | None:
    """The prompts of each domain in `domain_interleave_probs`; None where the job does not set it.

    Raises DataError when one of them has no prompts.
    """
    shares = config.actor_train.data_args.domain_interleave_probs
    if shares is None:
        return None
    domains: dict[str, list[Prompt]] = {name: [] for name in shares}
    for prompt in prompts:
        domain = reward.domain_of(prompt.line)
        assert domain is not None, "load_inputs refuses prompts without a reward"
        domains[reward.domains[domain].name].append(prompt)
    if empty := [name for name, members in domains.items() if not members]:
        raise DataError(
            f"domain_interleave_probs draws from {', '.join(empty)}, and no prompt of the data files belongs to it: "
            "add some, or remove the domain"
        )
    return domains
