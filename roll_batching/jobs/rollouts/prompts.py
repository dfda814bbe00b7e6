"""Draws the prompts of every RL step, and checks that rewards can score every line of the data files."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import exchange
from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rewards import prompts_of_domains
from roll_batching.jobs.config.worker import DataArgs
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.texts.epochs import MixedStream, PromptStream
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.texts import Prompt, PromptDataset

Prompts = PromptStream | MixedStream[Prompt]


def prompt_stream(config: JobConfig, inputs: JobInputs) -> Prompts:
    """Returns an iterator over the prompts of each step or generation batch, the same on all ranks."""
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
    """The prompts of each domain in `domain_interleave_probs`, or None without this key.

    Raises DataError when a domain has no prompts.
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


# ---- line checks


logger = logging.getLogger(__name__)

_LEAST_SHARE = 256
"""A further rank takes part per so many lines: for fewer, starting its reward costs more than it saves."""
_CURE = "Correct the line, or remove it."


def check_lines(config: JobConfig, inputs: JobInputs, group: Any) -> None:
    """Checks that rewards can score the training and held-out prompts, a share on each rank. Collective.

    Raises DataError, the same on all ranks, naming every line that cannot be scored; if `reward_failure` is not
    `error`, rank 0 logs these lines instead. Raises RankError when a check takes too long or ends its process. The
    processes of rewards that were asked keep running.
    """
    if inputs.reward is None or not inputs.reward.domains:
        return
    prompts = [prompt for part in (inputs.prompts, inputs.heldout) if part is not None for prompt in part]
    _check_response(config.actor_train.data_args, prompts)
    reward = inputs.reward
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shares = min(size, -(-len(prompts) // _LEAST_SHARE))
    share = prompts[len(prompts) * rank // shares : len(prompts) * (rank + 1) // shares] if rank < shares else []
    patience = reward.limits.start * (2 + len(prompts))
    faults = Faults()
    for part in exchange(group, "the check of the prompts by their reward", lambda: find_faults(share, reward),
                         patience=patience):  # fmt: skip
        faults.merge(part)
    report_faults(faults, reward, is_first=rank == 0)


def find_faults(prompts: list[Prompt], reward: RewardPool) -> Faults:
    """The faults of lines that `reward` cannot score. Raises as `RewardPool.check`."""
    faults = Faults()
    for prompt, fault in zip(prompts, reward.check(prompts), strict=True):
        if fault:
            faults.add(prompt.source, fault, _CURE)
    return faults


def report_faults(faults: Faults, reward: RewardPool, *, is_first: bool = True) -> None:
    """Raises DataError for `faults`; where `reward_failure` is not `error`, the first rank logs them."""
    if reward.failure == "error":
        faults.check()
    elif len(faults) and is_first:
        logger.warning("reward_failure: %s holds for all responses to these lines: %s", reward.failure, faults)


def _check_response(data: DataArgs, prompts: list[Prompt]) -> None:
    """Raises DataError for a key of answers that no line has."""
    if data.response != DataArgs.model_fields["response"].default and all(prompt.answer is None for prompt in prompts):
        raise DataError(
            f"no line of the prompts has the key {data.response!r}, which actor_train.data_args.response names for "
            f"answers; {prompts[0].source} has {', '.join(map(repr, prompts[0].line))}: name the right one, or remove "
            "the setting"
        )
