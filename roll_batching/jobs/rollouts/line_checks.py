"""Asks the rewards of a job, before a model is built, whether they can score every line of its prompts."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import exchange
from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.worker import DataArgs
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.texts import Prompt

logger = logging.getLogger(__name__)

_LEAST_SHARE = 256
"""Lines below which a further rank does not help."""
_CURE = "Correct the line, or remove it."


def check_lines(config: JobConfig, inputs: JobInputs, group: Any) -> None:
    """Each rank asks its rewards about a share of the training and held-out prompts. Collective.

    Raises DataError, the same on all ranks, naming every line that cannot be scored; where `reward_failure` is not
    `error`, rank 0 logs it. Raises RankError where a check takes too long or ends its process. The processes of
    rewards that were asked keep running.
    """
    if inputs.reward is None or not inputs.reward.domains:
        return
    prompts = [prompt for part in (inputs.prompts, inputs.heldout) if part is not None for prompt in part]
    _check_response(config.actor_train.data_args, prompts)
    reward = inputs.reward
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shares = min(size, -(-len(prompts) // _LEAST_SHARE))
    own = prompts[len(prompts) * rank // shares : len(prompts) * (rank + 1) // shares] if rank < shares else []
    patience = reward.limits.start * (2 + len(prompts))
    faults = Faults()
    for part in exchange(group, "the check of the prompts by their reward", lambda: find_faults(own, reward),
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
