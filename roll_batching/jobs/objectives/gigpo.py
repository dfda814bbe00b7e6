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
from roll_batching.samples.token_fields import counted_positions, sample_of


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The turns of one sample: the state before each, and its reward."""

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
        """Advantages of the turns of each sample, float64[turns]; groups are consecutive episodes.

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
            totals = self._normalised(np.array([sum(one.rewards) for one in group]))
            returns = [discounted_returns(one.rewards, self.gamma) for one in group]
            turns = np.concatenate(returns)
            steps = np.zeros(len(turns))
            for members in state_groups(group):
                steps[members] = self._normalised(turns[members])
            sizes = [len(one) for one in returns]
            both = self.episode_weight * np.repeat(totals, sizes) + self.step_weight * steps
            if self.advantage_clip is not None:
                both = both.clip(-self.advantage_clip, self.advantage_clip)
            result += np.split(both, np.cumsum(sizes)[:-1])
        return result

    def _normalised(self, values: np.ndarray) -> np.ndarray:
        """Exactly 0 for equal values, or a single one."""
        if (values == values[0]).all():
            return np.zeros(len(values))
        centred = values - values.mean()
        return centred if self.std is None else centred / (values.std(ddof=1) + EPSILON)


def discounted_returns(rewards: Sequence[float], gamma: float) -> np.ndarray:
    """The discounted sum of each reward and those after it: float64[n]."""
    result, following = np.zeros(len(rewards)), 0.0
    for place in range(len(rewards) - 1, -1, -1):
        following = rewards[place] + gamma * following
        result[place] = following
    return result


def state_groups(group: Sequence[Episode]) -> list[np.ndarray]:
    """Numbers of the turns in each state, int64; turns are counted over the episodes of a group."""
    members: dict[str, list[int]] = {}
    for number, state in enumerate(state for one in group for state in one.states):
        members.setdefault(state, []).append(number)
    return [np.array(numbers) for numbers in members.values()]


def state_metrics(episodes: Sequence[Episode], group_size: int) -> Metrics:
    """How often turns meet: turns per state in a group, and the share of turns whose state another one has."""
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
    """The control: the same advantages, each given to a random turn. Nothing can be learned from them."""
    ends = np.cumsum([len(one) for one in advantages])
    return np.split(rng.permutation(np.concatenate(advantages)), ends[:-1])


def with_turn_advantages(batch: SampleBatch, advantages: Sequence[np.ndarray]) -> SampleBatch:
    """`batch` with `advantages`, next_token fp32: each counted token has that of its turn, a run of counted tokens.

    `advantages[i]` is float64[turns] of the sample with the id i. Call it before anything masks tokens.
    """
    counted, samples = counted_positions(batch), sample_of(batch)
    follows = torch.zeros_like(counted)
    follows[1:] = counted[:-1] & (samples[1:] == samples[:-1])
    begins = counted & ~follows
    of_sample = [advantages[number] for number in batch.ids.tolist()]
    turn_counts = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, samples, begins.long())
    if turn_counts.tolist() != [len(one) for one in of_sample]:
        row = next(row for row, one in enumerate(of_sample) if int(turn_counts[row]) != len(one))
        raise DataError(
            f"sample {int(batch.ids[row])} has {int(turn_counts[row])} turns, and {len(of_sample[row])} advantages"
        )
    flat = torch.from_numpy(np.concatenate([*of_sample, np.zeros(1)]))
    turn = begins.cumsum(0).sub(1).clamp(min=0)
    values = torch.where(counted, flat[turn], 0.0).float()
    return batch.with_fields({"advantages": values}, {"advantages": FieldSpec("next_token")})
