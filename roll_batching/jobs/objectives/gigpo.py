"""Group-in-group policy optimisation (GiGPO): advantages of turns, from episodes and from turns in equal states.

Feng et al. 2025, arXiv 2505.10978. The episode-level advantage compares the total rewards of a prompt's samples. The
step-level advantage compares turns that these samples took in the same state, by the discounted rewards from there on:

    return(t) = r(t) + gamma r(t + 1) + gamma^2 r(t + 2) + ...
    A(t) = w_episode norm(sum of r, over the prompt's samples) + w_step norm(return(t), over turns in the state of t)

norm subtracts the mean, and with a deviation divides by it. A turn whose state no other turn of the group has gets a
step-level advantage of 0. ROLL 8eb27cc groups equal states over all prompts of a step; here, as in the paper, turns are
compared within the samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from roll_batching.checked_fields import CheckedFields, NotNegative, OptionalPositive, Share
from roll_batching.errors import DataError
from roll_batching.jobs.objectives.advantages import EPSILON
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS
from roll_batching.samples.token_fields import counted_positions, sample_of


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The turns of one rollout: for each turn the state before it, and its reward."""

    states: tuple[str, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class GiGPO(CheckedFields, error=DataError):
    """GiGPO with its settings."""

    std: Literal["group"] | None = None
    """Deviation to divide by: the sample's (over n - 1) plus 1e-6; None: none."""
    episode_weight: NotNegative = 1.0
    step_weight: NotNegative = 1.0
    gamma: Share = 0.95
    """Discount per turn."""
    advantage_clip: OptionalPositive = None
    """Advantages are clipped to [-x, x]."""

    def __call__(self, episodes: Sequence[Episode], group_size: int) -> list[np.ndarray]:
        """Computes the advantages of each sample's turns, float64[turns]; groups are consecutive episodes.

        Raises DataError for groups of one, or episodes that do not fill whole groups.
        """
        if group_size < 2 or len(episodes) % group_size:
            raise DataError(
                f"gigpo compares the samples of a prompt: {len(episodes)} samples do not make groups of {group_size}, "
                "of at least two"
            )
        result: list[np.ndarray] = []
        for start in range(0, len(episodes), group_size):
            group = episodes[start : start + group_size]
            episode_part = self._normalised(np.array([sum(episode.rewards) for episode in group]))
            returns = [discounted_returns(episode.rewards, self.gamma) for episode in group]
            turn_returns = np.concatenate(returns)
            step_part = np.zeros(len(turn_returns))
            for turns in state_groups(group):
                step_part[turns] = self._normalised(turn_returns[turns])
            turn_counts = [len(of_episode) for of_episode in returns]
            total = self.episode_weight * np.repeat(episode_part, turn_counts) + self.step_weight * step_part
            if self.advantage_clip is not None:
                total = total.clip(-self.advantage_clip, self.advantage_clip)
            result += np.split(total, np.cumsum(turn_counts)[:-1])
        return result

    def _normalised(self, values: np.ndarray) -> np.ndarray:
        """`values` less their mean, and divided by their deviation with `std`; exactly 0 if all are equal."""
        if (values == values[0]).all():
            return np.zeros(len(values))
        centred = values - values.mean()
        return centred if self.std is None else centred / (values.std(ddof=1) + EPSILON)


def discounted_returns(rewards: Sequence[float], gamma: float) -> np.ndarray:
    """Returns for each reward the discounted sum of it and the later rewards, float64[n]."""
    result, following = np.zeros(len(rewards)), 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = rewards[turn] + gamma * following
        result[turn] = following
    return result


def state_groups(group: Sequence[Episode]) -> list[np.ndarray]:
    """For each state, the indices (int64) of its turns in the concatenated turns of all episodes of a group."""
    turns: dict[str, list[int]] = {}
    for index, state in enumerate(state for episode in group for state in episode.states):
        turns.setdefault(state, []).append(index)
    return [np.array(indices) for indices in turns.values()]


def state_metrics(episodes: Sequence[Episode], group_size: int) -> Metrics:
    """Measures how often turns share a state: turns per state, and the share of turns in a state of several turns."""
    sizes = [
        len(members)
        for start in range(0, len(episodes), group_size)
        for members in state_groups(episodes[start : start + group_size])
    ]
    turns = max(sum(sizes), 1)
    return {
        "turns_per_state": sum(sizes) / max(len(sizes), 1),
        "shared_states": sum(size for size in sizes if size > 1) / turns,
    }


def shuffled_turns(advantages: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffles advantages among all turns: a control from which nothing can be learned."""
    ends = np.cumsum([len(of_sample) for of_sample in advantages])
    return np.split(rng.permutation(np.concatenate(advantages)), ends[:-1])


def with_turn_advantages(batch: SampleBatch, advantages: Sequence[np.ndarray]) -> SampleBatch:
    """Adds the field `advantages` (next_token, float32): each counted token gets the advantage of its turn.

    A turn is an unbroken run of counted tokens of one sample; other tokens get 0. `advantages[i]` is float64[turns]:
    one value per turn of rollout i, whose samples lie side by side in `batch`, in their order. Call it before anything
    masks tokens: that would split a turn.
    """
    counted, samples = counted_positions(batch), sample_of(batch)
    follows = torch.zeros_like(counted)  # counted, as is the token before it in the same sample: not a turn's first
    follows[1:] = counted[:-1] & (samples[1:] == samples[:-1])
    begins = counted & ~follows
    rollouts, rollout_of = torch.unique_consecutive(batch[ROLLOUT_IDS].cpu(), return_inverse=True)
    turn_counts = torch.zeros(len(rollouts), dtype=torch.int64).index_add_(0, rollout_of[samples], begins.long())
    for rollout, turns in zip(rollouts.tolist(), turn_counts.tolist(), strict=True):
        if turns != len(advantages[rollout]):
            raise DataError(
                f"rollout {rollout} has {turns} turns, and {len(advantages[rollout])} advantages: the tokens of each "
                "turn must be counted in one run, and the next turn must follow uncounted tokens"
            )
    # The last 0 keeps the index below valid when the batch has no turn.
    flat = torch.from_numpy(np.concatenate([*(advantages[rollout] for rollout in rollouts.tolist()), np.zeros(1)]))
    turn = begins.cumsum(0).sub(1).clamp(min=0)
    values = torch.where(counted, flat[turn], 0.0).float()
    return batch.with_fields({"advantages": values}, {"advantages": FieldSpec("next_token")})
