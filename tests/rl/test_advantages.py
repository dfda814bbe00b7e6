from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_batching.errors import DataError
from roll_batching.rl.advantages import AdvantageRule, compute_advantages, shuffled, zero_groups

GRPO = AdvantageRule()


def test_grpo_by_hand():
    got = compute_advantages(np.array([1.0, 0, 0, 0, 1, 1, 1, 1]), 4, GRPO)
    sd = np.sqrt(0.25 * 0.75) + 1e-4
    assert got == pytest.approx([0.75 / sd, -0.25 / sd, -0.25 / sd, -0.25 / sd, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (AdvantageRule(std=None), [0.5, -0.5, 0, 0]),
        (AdvantageRule(mean=None, std=None), [1, 0, 0, 0]),
        (AdvantageRule(mean="batch", std=None), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageRule(mean="batch", std="batch"), np.array([3, -1, -1, -1]) / (np.sqrt(3) + 4e-4)),
        (AdvantageRule(mean=None, std=None, reward_clip=0.3), [0.3, 0, 0, 0]),
        (AdvantageRule(std=None, advantage_clip=0.1), [0.1, -0.1, 0, 0]),
    ],
)
def test_each_rule_by_hand(rule, expected):
    assert compute_advantages(np.array([1.0, 0, 0, 0]), 2, rule) == pytest.approx(expected)


@st.composite
def grouped_rewards(draw):
    group = draw(st.integers(1, 6))
    values = st.lists(st.floats(-1e3, 1e3), min_size=group, max_size=group)
    return group, np.array(draw(st.lists(values, min_size=1, max_size=5))).reshape(-1)


@given(grouped_rewards(), st.sampled_from([GRPO, AdvantageRule(std=None)]))
def test_groups_are_centred_ordered_like_their_rewards_and_do_not_touch_each_other(case, rule):
    group, rewards = case
    got = compute_advantages(rewards, group, rule)
    for start in range(0, len(rewards), group):
        at = slice(start, start + group)
        assert np.array_equal(got[at], compute_advantages(rewards[at], group, rule))
        assert abs(got[at].sum()) < 1e-6
        assert (np.diff(got[at][np.argsort(rewards[at], kind="stable")]) >= 0).all()


def test_equal_rewards_give_exact_zeros_and_are_found():
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1: without care such a group would push the policy at random.
    got = compute_advantages(np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.2]), 3, GRPO)
    assert not got[:3].any() and got[3:].all()
    assert zero_groups(got, 3).tolist() == [True] * 3 + [False] * 3


def test_a_group_with_one_zero_advantage_is_not_idle():
    assert not zero_groups(np.array([0.0, 1.0, -1.0]), 3).any()


def test_whitening_is_over_tokens():
    tokens = np.array([10, 30, 5, 5])
    got = compute_advantages(np.array([1.0, 0, 3, 0]), 2, AdvantageRule(std=None, whiten=True), response_tokens=tokens)
    spread = np.repeat(got, tokens)
    assert spread.mean() == pytest.approx(0, abs=1e-12) and spread.std() == pytest.approx(1, abs=1e-3)


def test_shuffled_advantages_are_the_same_values_elsewhere():
    before = np.arange(50.0)
    after = shuffled(before, np.random.default_rng(0))
    assert sorted(after) == sorted(before) and (after != before).sum() > 40


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("rewards", "group", "rule", "words"),
    [
        ([1.0, 0.0, 1.0], 2, GRPO, "groups of 2"),
        ([1.0, float("nan")], 2, GRPO, r"positions \[1\] are not finite"),
        ([1.0, 0.0], 2, AdvantageRule(whiten=True), "response_tokens"),
    ],
)
def test_bad_groups(rewards, group, rule, words):
    with pytest.raises(DataError, match=words):
        compute_advantages(np.array(rewards), group, rule)
