from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_batching.errors import DataError
from roll_batching.rl.advantages import ESTIMATORS, group_advantages, shuffled


def test_grpo_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    got = group_advantages(rewards, 4)
    sd = np.sqrt(0.25 * 0.75) + 1e-4
    assert got == pytest.approx([0.75 / sd, -0.25 / sd, -0.25 / sd, -0.25 / sd, 0, 0, 0, 0])


def test_the_other_estimators_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert group_advantages(rewards, 4, estimator="grpo_mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(rewards, 4, estimator="rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert group_advantages(rewards, 4, estimator="reinforce").tolist() == rewards.tolist()


@given(
    st.integers(1, 6).flatmap(
        lambda g: st.tuples(
            st.just(g),
            st.lists(st.lists(st.floats(-1e3, 1e3), min_size=g, max_size=g), min_size=1, max_size=5),
        )
    ),
    st.sampled_from(["grpo", "grpo_mean"]),
)
def test_groups_are_centred_ordered_like_their_rewards_and_do_not_touch_each_other(case, estimator):
    group, rows = case
    rewards = np.array(rows).reshape(-1)
    got = group_advantages(rewards, group, estimator=estimator)
    for start in range(0, len(rewards), group):
        at = slice(start, start + group)
        assert np.array_equal(got[at], group_advantages(rewards[at], group, estimator=estimator))
        assert abs(got[at].sum()) < 1e-6
        assert (np.diff(got[at][np.argsort(rewards[at], kind="stable")]) >= 0).all()


def test_equal_rewards_give_exact_zeros():
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1: without care such a group would push the policy at random.
    assert not group_advantages(np.full(6, 0.1), 3).any()


def test_shuffled_advantages_are_the_same_values_elsewhere():
    before = np.arange(50.0)
    after = shuffled(before, np.random.default_rng(0))
    assert sorted(after) == sorted(before) and (after != before).sum() > 40


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("rewards", "group", "estimator", "words"),
    [
        ([1.0, 0.0, 1.0], 2, "grpo", "groups of 2"),
        ([1.0, float("nan")], 2, "grpo", r"positions \[1\] are not finite"),
        ([1.0], 1, "rloo", "at least two"),
        ([1.0, 0.0], 2, "grop", "unknown"),
    ],
)
def test_bad_groups(rewards, group, estimator, words):
    with pytest.raises(DataError, match=words):
        group_advantages(np.array(rewards), group, estimator=estimator)


def test_every_estimator_is_tried_above():
    assert set(ESTIMATORS) == {"grpo", "grpo_mean", "rloo", "reinforce"}
