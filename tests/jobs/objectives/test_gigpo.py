"""GiGPO against plain loops, its limits, and the advantages of tokens."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.objectives.gigpo import Episode, GiGPO, shuffled_turns, state_metrics, with_turn_advantages
from roll_batching.samples import SampleBatch


def episodes(seed: int, count: int) -> list[Episode]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        turns = rng.randint(1, 6)
        states = tuple(rng.choice("abcd") for _ in range(turns))
        made.append(Episode(states=states, rewards=tuple(rng.choice([0.0, 0.5, 1.0]) for _ in range(turns))))
    return made


def by_loops(group: list[Episode], std: bool, w_episode: float, w_step: float, gamma: float) -> list[list[float]]:
    """One prompt's samples; every turn looks for the turns in its state itself."""

    def norm(value: float, others: list[float]) -> float:
        if max(others) == min(others):
            return 0.0
        deviation = statistics.stdev(others) + 1e-6 if std else 1.0
        return (value - statistics.fmean(others)) / deviation

    def value(one: Episode, turn: int) -> float:
        return math.fsum(gamma**later * reward for later, reward in enumerate(one.rewards[turn:]))

    totals = [sum(one.rewards) for one in group]
    result = []
    for one, total in zip(group, totals, strict=True):
        own = []
        for turn, state in enumerate(one.states):
            same = [value(other, k) for other in group for k, name in enumerate(other.states) if name == state]
            own.append(w_episode * norm(total, totals) + w_step * norm(value(one, turn), same))
        result.append(own)
    return result


@pytest.mark.parametrize("std", [None, "group"])
def test_advantages_equal_loops_over_turns(std: Any) -> None:
    made = episodes(3, 24)
    found = GiGPO(std=std, episode_weight=0.7, step_weight=1.3, gamma=0.9)(made, 6)
    expected = [row for at in range(0, 24, 6) for row in by_loops(made[at : at + 6], std is not None, 0.7, 1.3, 0.9)]
    for own, right in zip(found, expected, strict=True):
        assert own.tolist() == pytest.approx(right)


def test_without_steps_it_is_grpo_and_without_episodes_equal_states_alone_count() -> None:
    from roll_batching.jobs.objectives.advantages import grpo

    made = episodes(5, 8)
    totals = np.array([sum(one.rewards) for one in made])
    alone = GiGPO(std="group", step_weight=0)(made, 4)
    for own, right in zip(alone, grpo(totals, 4), strict=True):
        assert own.tolist() == pytest.approx([right] * len(own))
    lonely = [Episode(states=(f"s{i}",), rewards=(float(i),)) for i in range(4)]
    assert all((own == 0).all() for own in GiGPO(episode_weight=0)(lonely, 4))
    met = [Episode(states=("s",), rewards=(float(i),)) for i in (0, 1)]
    assert [own.tolist() for own in GiGPO(episode_weight=0)(met, 2)] == [[-0.5], [0.5]]
    assert [own.tolist() for own in GiGPO(advantage_clip=0.2)(met, 2)] == [[-0.2], [0.2]]


def test_states_of_other_prompts_are_other_states() -> None:
    one = [Episode(states=("s",), rewards=(r,)) for r in (0.0, 1.0)]
    other = [Episode(states=("s",), rewards=(r,)) for r in (5.0, 5.0)]
    found = GiGPO(episode_weight=0)([*one, *other], 2)
    assert [own.tolist() for own in found] == [[-0.5], [0.5], [0.0], [0.0]]
    assert state_metrics([*one, *other], 2) == {"turns_per_state": 2.0, "shared_states": 1.0}


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(DataError, match="at least two"):
        GiGPO()(episodes(1, 3), 1)
    with pytest.raises(DataError, match="groups of 2"):
        GiGPO()(episodes(1, 3), 2)


def test_tokens_have_the_advantage_of_their_turn() -> None:
    masks = [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1]]
    rows: dict[str, Any] = {"input_ids": [[1] * 6, [1] * 5], "response_mask": [[bool(x) for x in one] for one in masks]}
    kinds = {"input_ids": "token", "response_mask": "token", "rollout_ids": "sample"}
    batch = SampleBatch.from_lists(rows | {"rollout_ids": torch.tensor([1, 0])}, kinds, ids=[1, 0])
    found = with_turn_advantages(batch, [np.array([7.0, 8.0]), np.array([3.0, 4.0])])
    assert found.schema["advantages"].kind == "next_token"
    own = [one.tolist() for one in found.to_lists("advantages")]
    assert own == [[0, 3, 3, 0, 4, 0], [7, 0, 0, 8, 0]]
    with pytest.raises(DataError, match="rollout 1 has 2 turns, and 1 advantages"):
        with_turn_advantages(batch, [np.array([7.0, 8.0]), np.array([3.0])])
    together = SampleBatch.from_lists(rows | {"rollout_ids": torch.tensor([5, 5])}, kinds)
    found = with_turn_advantages(together, [np.zeros(0)] * 5 + [np.array([3.0, 4.0, 7.0, 8.0])])
    assert [one.tolist() for one in found.to_lists("advantages")] == own, "one rollout of two samples"


def test_the_control_gives_the_same_advantages_to_other_turns() -> None:
    before = [np.arange(3.0), np.arange(3.0, 8.0)]
    after = shuffled_turns(before, np.random.default_rng(1))
    assert [len(one) for one in after] == [3, 5]
    assert sorted(np.concatenate(after)) == sorted(np.concatenate(before))
    assert not torch.equal(torch.from_numpy(np.concatenate(after)), torch.from_numpy(np.concatenate(before)))


FUNCTION = {"adv_estimator": "gigpo", "rollout_function": "examples.corridor.rollout:rollout"}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"rollout_function": None}, "adv_estimator", "set rollout_function"),
        ({"reward_function": "exact_match"}, "reward_function", "a reward for each turn"),
        ({"norm_std_type": "batch"}, "norm_std_type", "group divides"),
        ({"gamma": 0.9}, "gamma", "step_reward_gamma"),
        ({"step_reward_weight": 0.0, "episode_reward_weight": 0.0}, "step_reward_weight", "no advantage"),
    ],
)
def test_what_excludes_it_is_named(changes: dict[str, Any], key: str, words: str) -> None:
    given = {name: value for name, value in {**FUNCTION, **changes}.items() if value is not None}
    with pytest.raises(ConfigFileError, match=words) as caught:
        config_from_dict(given)
    assert key in str(caught.value)


def test_keys_reach_the_estimator() -> None:
    from roll_batching.jobs.objectives.from_config import advantages_of

    own = {"step_reward_weight": 0.5, "episode_reward_weight": 2.0, "step_reward_gamma": 0.8, "norm_std_type": "group"}
    found = advantages_of(config_from_dict({**FUNCTION, **own, "advantage_clip": 3.0}))
    assert found.of_turns and found.estimate == GiGPO(
        std="group", episode_weight=2.0, step_weight=0.5, gamma=0.8, advantage_clip=3.0
    )
