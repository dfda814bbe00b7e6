"""Advantage estimators with a baseline other than those of `AdvantageRule`: one function per paper.

Each is a function of the rewards of a step, group by group, as `AdvantageFunction` says; `limits` are the fields
`reward_clip`, `advantage_clip` and `whiten` of `AdvantageRule`. With r the rewards of a group of n.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roll_batching.jobs.objectives.advantages import (
    EPSILON,
    AdvantageRule,
    clip_and_whiten,
    compute_advantages,
    group_rewards,
    subtract_baseline,
)


def rloo(
    rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray | None = None, **limits: Any
) -> np.ndarray:
    """A = r - mean of the group's others = (r - mean) n / (n - 1).

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740).
    """
    advantages = subtract_baseline(group_rewards(rewards, group_size)) * (group_size / max(group_size - 1, 1))
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)


def grpo_leave_one_out(
    rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray | None = None, **limits: Any
) -> np.ndarray:
    """A = (r - mean of the group's others) / (their deviation + 1e-6); equal others are not divided by.

    NeMo-RL's default (7ea279a, `algorithms/advantage_estimator.py:85` and `algorithms/utils.py:187`): the deviation is
    the sample's, over n - 2. The only right response of a group has A = r.
    """
    view = group_rewards(rewards, group_size)
    ranks = np.arange(group_size)
    others = view[:, [np.delete(ranks, rank) for rank in ranks]] if view.size else view[..., None]
    equal = others.max(axis=2) == others.min(axis=2)
    baseline = np.where(equal, others[..., 0], others.mean(axis=2))  # the mean of equal numbers may round
    deviation = others.std(axis=2, ddof=min(1, group_size - 2)) + EPSILON
    advantages = (view - baseline) / np.where(equal, 1.0, deviation)
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)


def reinforce_plus_plus(
    rewards: np.ndarray,
    group_size: int,
    *,
    response_tokens: np.ndarray | None = None,
    whiten: bool = True,
    **limits: Any,
) -> np.ndarray:
    """A = r, whitened over the tokens of the step (REINFORCE++, Hu 2025, arXiv 2501.03262)."""
    rule = AdvantageRule(mean=None, std=None, whiten=whiten, **limits)
    return compute_advantages(rewards, group_size, rule, response_tokens=response_tokens)


def reinforce_plus_plus_baseline(
    rewards: np.ndarray,
    group_size: int,
    *,
    response_tokens: np.ndarray | None = None,
    whiten: bool = True,
    **limits: Any,
) -> np.ndarray:
    """A = r - mean, whitened over the tokens of the step (REINFORCE++-baseline, Hu 2025, arXiv 2501.03262)."""
    rule = AdvantageRule(mean="group", std=None, whiten=whiten, **limits)
    return compute_advantages(rewards, group_size, rule, response_tokens=response_tokens)


def opo(rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray, **limits: Any) -> np.ndarray:
    """A = r - sum(tokens r) / sum(tokens): the baseline of least variance where gradients' norms grow with length.

    On-policy RL with optimal baseline (Hao et al. 2025, arXiv 2505.23585). A group whose tokens are all masked takes
    its mean: nothing reads its advantages.
    """
    view = group_rewards(rewards, group_size)
    tokens = np.asarray(response_tokens, dtype=np.float64).reshape(view.shape)
    tokens[tokens.sum(axis=1) == 0] = 1.0
    advantages = subtract_baseline(view, (tokens * view).sum(axis=1) / tokens.sum(axis=1))
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)


def gpg(
    rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray | None = None, **limits: Any
) -> np.ndarray:
    """A = (r - mean) N / M, with N the step's responses and M those whose reward is not 0 (at least 1).

    Group policy gradient (Chu et al. 2025, arXiv 2504.02546), as verl has it; goes with the loss `gpg`.
    """
    view = group_rewards(rewards, group_size)
    advantages = subtract_baseline(view) * (view.size / max(int(np.count_nonzero(view)), 1))
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)


def pass_at_k(
    rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray | None = None, std: bool = True, **limits: Any
) -> np.ndarray:
    """A = (largest r - second) / (deviation + 1e-6) for the group's best response, the first such; 0 for others.

    The gradient of the best of n (Walder and Karkhanis 2025, Tang et al. 2025, arXiv 2503.19595), n being the group.
    `std` False: not divided.
    """
    view = group_rewards(rewards, group_size)
    order = np.sort(view, axis=1)
    lead = order[:, -1] - order[:, -2]
    if std:
        lead = lead / (view.std(axis=1, ddof=1) + EPSILON)
    advantages = np.zeros_like(view)
    advantages[np.arange(len(view)), view.argmax(axis=1)] = lead
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)


def remax(
    rewards: np.ndarray,
    group_size: int,
    *,
    baselines: np.ndarray,
    response_tokens: np.ndarray | None = None,
    **limits: Any,
) -> np.ndarray:
    """A = r - the reward of the greedy answer to the same prompt, `baselines`, float64[prompts].

    ReMax (Li et al. 2023, arXiv 2310.10505).
    """
    advantages = group_rewards(rewards, group_size, compares=False) - np.asarray(baselines, dtype=np.float64)[:, None]
    return clip_and_whiten(advantages.reshape(-1), AdvantageRule(**limits), response_tokens)
