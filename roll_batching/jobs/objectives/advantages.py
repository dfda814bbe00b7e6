"""Computes advantages of responses from the rewards of a whole step, one reward domain at a time.

Everything here is plain numpy on the rewards of all ranks, in the order of the sample ids: every rank
computes the same advantages from the same numbers and keeps those of its own samples.

An estimator is an `AdvantageFunction`: it takes the rewards of a step, group by group. In the formulas below, A is the
advantage, and r the rewards of a group of n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from roll_batching.checked_fields import CheckedFields, OptionalPositive
from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.objectives.stateful import RunningMoments

AdvantageFunction = Callable[..., np.ndarray]
"""`(rewards, group_size, *, response_tokens) -> advantages`: float64[n], int, int64[n] -> float64[n]. Groups are
consecutive entries. `response_tokens` counts what the loss reads: 0 for masked responses. It is called once per reward
domain of the step, on every rank with the same arguments, and must return the same numbers there."""
Scope = Literal["group", "batch", "running"]
EPSILON = 1e-6
"""Added to the deviation of rewards (ROLL, verl, slime)."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance that whitening divides by (`masked_whiten` of ROLL and verl, slime)."""


@dataclass(frozen=True, kw_only=True)
class AdvantageRule(CheckedFields, error=DataError):
    """How rewards become advantages: subtract a mean, divide by a deviation, clip, whiten, clip.

    The default is GRPO's. `mean="group", std=None` is Dr. GRPO's, `mean="batch", std="batch"` REINFORCE with
    global normalisation, both None plain REINFORCE, which `whiten` turns into REINFORCE++.
    """

    mean: Scope | None = "group"
    """Mean to subtract: over the same prompt's responses, over all `rewards` (the domain's in this step), over all
    steps so far (`running`), or none."""
    std: Scope | None = "group"
    """Standard deviation to divide by: the sample's (over n - 1), plus 1e-6. Equal rewards, or a single one, are not
    divided."""
    running: RunningMoments | None = None
    """Moments of all rewards so far, this step's included; for the scope "running"."""
    reward_clip: OptionalPositive = None
    """Rewards are clipped to [-x, x] once they are normalised (as ROLL does)."""
    advantage_clip: OptionalPositive = None
    """Advantages are clipped to [-x, x] last."""
    whiten: bool = False
    """Give the advantages mean 0 and deviation 1 over response tokens (long responses count more): the sample's
    variance, plus 1e-8 under the root. Fewer than two tokens are not whitened, as in ROLL."""


def grpo(
    rewards: np.ndarray,
    group_size: int,
    *,
    response_tokens: np.ndarray | None = None,
    std: Scope = "group",
    **limits: Any,
) -> np.ndarray:
    """Rewards minus their group's mean, over a deviation; `limits` are the other fields of `AdvantageRule`."""
    rule = AdvantageRule(mean="group", std=std, **limits)
    return compute_advantages(rewards, group_size, rule, response_tokens=response_tokens)


def reinforce(
    rewards: np.ndarray,
    group_size: int,
    *,
    response_tokens: np.ndarray | None = None,
    mean: Scope | None = None,
    std: Scope | None = None,
    **limits: Any,
) -> np.ndarray:
    """Rewards as they are, or minus a mean and over a deviation; `limits` are the other fields of `AdvantageRule`."""
    rule = AdvantageRule(mean=mean, std=std, **limits)
    return compute_advantages(rewards, group_size, rule, response_tokens=response_tokens)


def check_advantages(advantages: Any, rewards: np.ndarray, source: str) -> np.ndarray:
    """Returns `advantages` as float64. Raises DataError, naming `source`, unless each reward has one finite number."""
    try:
        values = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the advantages of {source} are not numbers ({error}): return float64[{len(rewards)}]"
        ) from error
    if values.shape != rewards.shape:
        raise DataError(f"the advantages of {source} have shape {values.shape}: return one per reward, {rewards.shape}")
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        raise DataError(
            f"the advantages of {source} at positions {bad[:5].tolist()} are not finite: return numbers also where all "
            "rewards of a group are equal"
        )
    return values


def compute_advantages(
    rewards: np.ndarray, group_size: int, rule: AdvantageRule, *, response_tokens: np.ndarray | None = None
) -> np.ndarray:
    """Computes advantages, float64[n], of `rewards`, float[n], whose groups are `group_size` consecutive entries.

    `response_tokens`, int[n], is needed to whiten. A group with equal rewards gets exact zeros under
    `mean="group"`, unless they are whitened. Raises DataError when the rewards do not make whole groups, are
    not finite, or are compared within groups of one, whose mean is their reward.
    """
    rewards = group_rewards(rewards, group_size, compares="group" in (rule.mean, rule.std)).reshape(-1)
    if not len(rewards):
        return rewards
    return clip_and_whiten(_normalise(rewards, group_size, rule), rule, response_tokens)


def group_rewards(rewards: np.ndarray, group_size: int, *, compares: bool = True) -> np.ndarray:
    """Copies rewards as float64[prompts, group_size].

    `compares`: the estimator compares the responses of a group, so that a group of one is an error. Raises DataError
    for such a group, for rewards that do not fill whole groups, and for rewards that are not finite.
    """
    rewards = np.array(rewards, dtype=np.float64)
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise DataError(
            f"rewards of shape {rewards.shape} do not make groups of {group_size}: they must come group by group"
        )
    if (bad := np.flatnonzero(~np.isfinite(rewards))).size:
        raise DataError(f"rewards at positions {bad[:5].tolist()} are not finite: correct the reward")
    if group_size == 1 and compares and len(rewards):
        raise DataError(
            "a group of one response has no other to compare with: sample at least two responses per prompt, or "
            "normalise over the batch"
        )
    return rewards.reshape(-1, group_size)


def subtract_baseline(view: np.ndarray, baseline: np.ndarray | None = None) -> np.ndarray:
    """Subtracts a baseline per group, by default its mean, from `view`, [groups, n].

    Groups of equal numbers become exact zeros: their mean can differ in the last bit, which would push the policy at
    random.
    """
    result = view - (view.mean(axis=1) if baseline is None else baseline)[:, None]
    result[view.max(axis=1) == view.min(axis=1)] = 0.0
    return result


def clip_and_whiten(result: np.ndarray, rule: AdvantageRule, response_tokens: np.ndarray | None) -> np.ndarray:
    """Clips normalised rewards, whitens them and clips them again, as `rule` says."""
    if rule.reward_clip is not None:
        result = result.clip(-rule.reward_clip, rule.reward_clip)
    if rule.whiten:
        result = _whiten(result, response_tokens)
    if rule.advantage_clip is not None:
        result = result.clip(-rule.advantage_clip, rule.advantage_clip)
    return result


def _normalise(rewards: np.ndarray, group_size: int, rule: AdvantageRule) -> np.ndarray:
    """Subtracts the mean and divides by the deviation that `rule` names."""
    if "running" in (rule.mean, rule.std) and rule.running is None:
        raise DataError("mean or std 'running' needs the moments so far: pass running=RunningMoments()")
    views = {"group": rewards.reshape(-1, group_size), "batch": rewards.reshape(1, -1)}
    result = rewards.copy()
    if rule.mean == "running":
        assert rule.running is not None
        result = result - rule.running.mean
    elif rule.mean is not None:
        result = subtract_baseline(views[rule.mean]).reshape(-1)
    if rule.std == "running":
        assert rule.running is not None
        result = result / (rule.running.deviation + EPSILON if rule.running.count > 1 else 1.0)
    elif rule.std is not None:
        view = views[rule.std]
        # Over n - 1; over 1 for a single reward, whose deviation over 0 would be nan.
        deviation = view.std(axis=1, ddof=min(1, view.shape[1] - 1), keepdims=True) + EPSILON
        # Rewards without variance would be divided by the epsilon alone, and grow a millionfold.
        deviation[view.max(axis=1) == view.min(axis=1)] = 1.0
        result = (result.reshape(view.shape) / deviation).reshape(-1)
    return result


def _whiten(advantages: np.ndarray, response_tokens: np.ndarray | None) -> np.ndarray:
    """Gives `advantages` mean 0 and deviation 1, each weighted by its response's tokens."""
    if response_tokens is None or len(response_tokens) != len(advantages):
        raise DataError("whitening weights each response by its tokens: pass response_tokens, one per reward")
    tokens = np.asarray(response_tokens, dtype=np.float64)
    count = tokens.sum()
    if count < 2:
        return advantages
    mean = (tokens * advantages).sum() / count
    variance = (tokens * (advantages - mean) ** 2).sum() / (count - 1)
    return (advantages - mean) / np.sqrt(variance + VARIANCE_EPSILON)


def shuffled(advantages: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shuffles advantages among samples: a control from which nothing can be learned."""
    return rng.permutation(advantages)


def zero_groups(advantages: np.ndarray, group_size: int) -> np.ndarray:
    """Marks samples (bool[n]) whose whole group has advantage exactly 0, and so no policy gradient."""
    idle = (np.asarray(advantages).reshape(-1, group_size) == 0.0).all(axis=1)
    return np.repeat(idle, group_size)


def outside_difficulty(rewards: np.ndarray, group_size: int, low: float, high: float) -> np.ndarray:
    """Marks samples (bool[n]) whose group's mean reward does not lie between `low` and `high`, or is one of them.

    This is `difficulty_mask` of ROLL (utils/functionals.py, 8eb27cc); as there, a group of one is never marked.
    """
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    means = groups.mean(axis=1)
    outside = ~((means > low) & (means < high)) if group_size > 1 else np.zeros(len(groups), dtype=bool)
    return np.repeat(outside, group_size)


# ---- reward shaping


def shape_rewards(config: JobConfig, rewards: np.ndarray, response_tokens: np.ndarray) -> np.ndarray:
    """`rewards` after `reward_scaling`, then `overlong_buffer`: float64 [n]."""
    scaling, buffer = config.reward_scaling, config.overlong_buffer
    if scaling is not None:
        share = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
            scaling.source_max - scaling.source_min
        )
        rewards = scaling.target_min + share * (scaling.target_max - scaling.target_min)
    if buffer is not None:
        longest = buffer.response_length or config.response_length
        assert longest is not None  # the loader resolves response_length
        excess = np.maximum(response_tokens - (longest - buffer.length), 0)
        rewards = rewards - buffer.penalty * excess / buffer.length
    return rewards


# ---- baselines


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
    """A = (r - mean of the group's others) / (their deviation + 1e-6); without the division if the others are equal.

    NeMo-RL's default (7ea279a, `algorithms/advantage_estimator.py:85` and `algorithms/utils.py:187`): the deviation is
    the sample's, over n - 2. The only right response of a group has A = r.
    """
    view = group_rewards(rewards, group_size)
    members = np.arange(group_size)
    # [groups, n, n - 1]: for each response the rewards of the others. An empty step has nothing to index.
    others = view[:, [np.delete(members, member) for member in members]] if view.size else view[..., None]
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
    """A = (largest r - second) / (deviation + 1e-6) for the first best response of a group; 0 for the others.

    This is the gradient of the best of n responses, the group (Walder and Karkhanis 2025, Tang et al. 2025, arXiv
    2503.19595). `std` False: without the division.
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
