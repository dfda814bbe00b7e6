from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_batching.errors import DataError
from roll_batching.jobs.objectives.advantages import (
    AdvantageRule,
    check_advantages,
    compute_advantages,
    shuffled,
    zero_groups,
)

GRPO = AdvantageRule()


def test_grpo_by_hand():
    got = compute_advantages(np.array([1.0, 0, 0, 0, 1, 1, 1, 1]), 4, GRPO)
    sd = np.sqrt((0.75**2 + 3 * 0.25**2) / 3) + 1e-6
    assert got == pytest.approx([0.75 / sd, -0.25 / sd, -0.25 / sd, -0.25 / sd, 0, 0, 0, 0], rel=1e-12)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_grpo_divides_as_roll_verl_and_slime_do(group):
    """By the sample's deviation (torch's own) plus 1e-6: 1.41 times the population's at a group of two."""
    rewards = torch.rand(4 * group, generator=torch.Generator().manual_seed(group), dtype=torch.float64)
    rewards[:group] *= 1e-5  # so small that the epsilon shows
    view = rewards.view(-1, group)
    expected = (view - view.mean(-1, keepdim=True)) / (view.std(-1, keepdim=True) + 1e-6)
    assert compute_advantages(rewards.numpy(), group, GRPO) == pytest.approx(expected.flatten().numpy(), rel=1e-9)


@pytest.mark.parametrize(("mean", "std"), [("batch", "batch"), (None, "batch"), ("group", "batch"), ("batch", None)])
def test_reinforce_normalises_as_roll_does(mean, std):
    """ROLL's `norm_mean_type` and `norm_std_type`; its deviation over the batch is the sample's, plus 1e-6."""
    rewards = 1e-5 * torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = {"batch": rewards.mean(), "group": rewards.view(-1, 3).mean(-1).repeat_interleave(3), None: 0.0}
    expected = (rewards - means[mean]) / (rewards.std() + 1e-6 if std else 1.0)
    got = compute_advantages(rewards.numpy(), 3, AdvantageRule(mean=mean, std=std))
    assert got == pytest.approx(expected.numpy(), rel=1e-9)


@pytest.mark.parametrize("rule", [AdvantageRule(mean=None, std="batch"), AdvantageRule(mean="batch", std="group")])
def test_what_does_not_vary_is_not_divided(rule):
    """Over an epsilon alone a group of equal rewards would count a million times."""
    got = compute_advantages(np.array([0.1, 0.1, 0.1, 0.1]), 2, rule)
    assert abs(got).max() <= 0.1
    if rule.std == "group":
        assert compute_advantages(np.array([1.0, 1, 0, 0]), 2, rule).tolist() == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (AdvantageRule(std=None), [0.5, -0.5, 0, 0]),
        (AdvantageRule(mean=None, std=None), [1, 0, 0, 0]),
        (AdvantageRule(mean="batch", std=None), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageRule(mean="batch", std="batch"), np.array([3, -1, -1, -1]) / (2 + 4e-6)),
        (AdvantageRule(mean=None, std=None, reward_clip=0.3), [0.3, 0, 0, 0]),
        (AdvantageRule(mean="batch", std="batch", reward_clip=1.0), np.array([2 + 4e-6, -1, -1, -1]) / (2 + 4e-6)),
        (AdvantageRule(std=None, advantage_clip=0.1), [0.1, -0.1, 0, 0]),
    ],
)
def test_each_rule_by_hand(rule, expected):
    assert compute_advantages(np.array([1.0, 0, 0, 0]), 2, rule) == pytest.approx(expected)


@st.composite
def grouped_rewards(draw):
    group = draw(st.integers(2, 6))
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


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_whitening_is_over_tokens_as_reinforce_plus_plus_has_it(size):
    """verl's, slime's and ROLL's masked_whiten: the sample's variance over tokens, plus 1e-8 under the root."""
    tokens = np.array([10, 30, 5, 5])
    rewards = size * np.array([1.0, 0, 3, 0])
    got = compute_advantages(rewards, 2, AdvantageRule(std=None, whiten=True), response_tokens=tokens)
    centred = torch.from_numpy(np.repeat(size * np.array([0.5, -0.5, 1.5, -1.5]), tokens))
    expected = (centred - centred.mean()) * torch.rsqrt(centred.var() + 1e-8)
    assert np.repeat(got, tokens) == pytest.approx(expected.numpy(), rel=1e-9)


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
        ([1.0, 0.0], 1, GRPO, "group of one response"),
        ([1.0, 0.0], 1, AdvantageRule(mean="group", std=None), "group of one response"),
        ([1.0, 0.0], 1, AdvantageRule(mean="batch", std="group"), "group of one response"),
    ],
)
def test_bad_groups(rewards, group, rule, words):
    with pytest.raises(DataError, match=words):
        compute_advantages(np.array(rewards), group, rule)


@pytest.mark.parametrize("tokens", [[1, 0], [0, 0]])
def test_fewer_than_two_tokens_are_not_whitened_as_in_roll(tokens):
    rule = AdvantageRule(std=None, whiten=True)
    got = compute_advantages(np.array([1.0, 0.0]), 2, rule, response_tokens=np.array(tokens))
    assert got.tolist() == [0.5, -0.5]


def test_one_response_per_prompt_serves_where_groups_are_not_compared():
    rule = AdvantageRule(mean="batch", std="batch")
    assert compute_advantages(np.array([1.0, 0.0]), 1, rule) == pytest.approx(np.array([1, -1]) / np.sqrt(2), rel=1e-5)


def test_an_estimator_that_works_in_place_leaves_the_rewards_alone(monkeypatch):
    from roll_batching.jobs.config.loader import config_from_dict
    from roll_batching.jobs.objectives import from_config

    def in_place(rewards, group_size, *, response_tokens):
        rewards -= rewards.mean()
        response_tokens[:] = 0
        return rewards

    monkeypatch.setattr(from_config.ADVANTAGE_ESTIMATORS, "load", lambda name: in_place)
    rewards, tokens = np.array([1.0, 3.0]), np.array([4, 5])
    estimate = from_config.advantages_of(config_from_dict({"adv_estimator": "own:in_place"}))
    assert estimate(rewards, 2, response_tokens=tokens).tolist() == [-1, 1]
    assert (rewards.tolist(), tokens.tolist()) == ([1, 3], [4, 5])


@pytest.mark.parametrize(
    ("made", "words"),
    [([1.0], "shape (1,)"), ([1.0, np.nan], "not finite"), (["a", "b"], "not numbers"), (None, "shape ()")],
)
def test_what_an_estimator_returns_is_checked(made, words):
    with pytest.raises(DataError) as caught:
        check_advantages(made, np.zeros(2), "own:estimate")
    assert "own:estimate" in str(caught.value) and words in str(caught.value)


def test_the_keys_of_a_registered_estimator_reach_it():
    from roll_batching.jobs.config.loader import config_from_dict
    from roll_batching.jobs.objectives.from_config import advantages_of

    rewards, tokens = np.array([1.0, 0, 0, 0, 1, 1, 0, 5]), np.arange(1, 9)
    limits = {"reward_clip": 0.7, "advantage_clip": 0.5, "whiten_advantages": True}
    for keys, rule in (
        ({}, GRPO),
        ({"norm_std_type": "batch"}, AdvantageRule(std="batch")),
        (limits, AdvantageRule(reward_clip=0.7, advantage_clip=0.5, whiten=True)),
        ({"adv_estimator": "reinforce"}, AdvantageRule(mean=None, std=None)),
        ({"adv_estimator": "reinforce", "norm_mean_type": "batch"}, AdvantageRule(mean="batch", std=None)),
    ):
        expected = compute_advantages(rewards, 4, rule, response_tokens=tokens)
        found = advantages_of(config_from_dict(keys))(rewards, 4, response_tokens=tokens)
        assert found.tolist() == expected.tolist(), keys
