"""Estimators beside the functions of a peer that compute the same: numbers made once by running these."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.objectives.from_config import advantages_of

REWARDS = np.array([1.0, 0.0, 0.25, 0.5, 0.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3])
TOKENS = np.array([3, 5, 2, 4, 1, 6, 2, 3, 4, 4, 1, 2])

# verl b178a3c, verl/trainer/ppo/core_algos.py, in float64, rewards on each response's last token: compute_rloo_,
# compute_opo_, compute_reinforce_plus_plus_ (gamma 1), compute_reinforce_plus_plus_baseline_, compute_gpg_ and
# compute_grpo_passk_outcome_advantage.
OF_VERL = {
    "rloo": [0.75, -0.5833333333, -0.25, 0.0833333333, -0.3333333333, -0.3333333333, -0.3333333333, 1, 0, 0, 0, 0],
    "opo": [0.6071428571, -0.3928571429, -0.1428571429, 0.1071428571, -0.25, -0.25, -0.25, 0.75, 0, 0, 0, 0],
    "reinforce_plus_plus": [
        1.9589247037, -0.9172742657, -0.1982245233, 0.520825219, -0.9172742657, -0.9172742657, -0.9172742657,
        1.9589247037, -0.0544145748, -0.0544145748, -0.0544145748, -0.0544145748,
    ],
    "reinforce_plus_plus_baseline": [
        1.6899342119, -1.2268035533, -0.497619112, 0.2315653293, -0.6799152223, -0.6799152223, -0.6799152223,
        2.2368225429, 0.049269219, 0.049269219, 0.049269219, 0.049269219,
    ],
    "gpg": [0.84375, -0.65625, -0.28125, 0.09375, -0.375, -0.375, -0.375, 1.125, 0, 0, 0, 0],
    "pass_at_k": [1.1710773447, 0, 0, 0, 0, 0, 0, 1.999996, 0, 0, 0, 0],
}  # fmt: skip


def estimate(name: str, rewards: np.ndarray = REWARDS, group: int = 4, **keys: object) -> np.ndarray:
    job = config_from_dict({"adv_estimator": name, **keys})
    return advantages_of(job)(rewards, group, response_tokens=np.resize(TOKENS, len(rewards)))


@pytest.mark.parametrize("name", OF_VERL)
def test_estimators_give_verls_numbers(name: str) -> None:
    assert estimate(name) == pytest.approx(OF_VERL[name], abs=1e-9)


# NeMo-RL 7ea279a, GRPOAdvantageEstimator, in float64, by use_leave_one_out_baseline and normalize_rewards.
OF_NEMO_RL = {
    "grpo_leave_one_out": [
        2.999988, -1.5275212317, -0.499999, 0.1601278461, -0.5773492692, -0.5773492692, -0.5773492692, 1, 0, 0, 0, 0
    ],
    "rloo": [0.75, -0.5833333333, -0.25, 0.0833333333, -0.3333333333, -0.3333333333, -0.3333333333, 1, 0, 0, 0, 0],
    "grpo": [
        1.3174619931, -1.0246926613, -0.4391539977, 0.1463846659, -0.4999989926, -0.4999989926, -0.4999989926,
        1.4999969777, 0, 0, 0, 0
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NEMO_RL)
def test_estimators_give_nemo_rls_numbers(name: str) -> None:
    """To 3e-8, the rounding of NeMo-RL's count of responses in float32."""
    assert estimate(name) == pytest.approx(OF_NEMO_RL[name], abs=3e-8)


def test_the_only_right_response_is_not_divided_by_a_deviation_of_others_that_is_0() -> None:
    advantages = estimate("grpo_leave_one_out", np.eye(16)[3], 16)
    assert advantages[3] == 1.0
    assert np.delete(advantages, 3) == pytest.approx(np.full(15, -0.2581978897), abs=1e-6)
    # Others of 0.1 and one reward of 1: NeMo-RL's variance, a difference of two means, rounds to 1e-12, and the
    # advantage to 900,000. Equal others are equal here.
    tenths = np.full(13, 0.1)
    tenths[5] = 1.0
    assert estimate("grpo_leave_one_out", tenths, 13)[5] == 0.9
    assert estimate("grpo_leave_one_out", np.array([0.7, 0.2]), 2).tolist() == pytest.approx([0.5, -0.5])


def test_remax_gives_verls_numbers() -> None:
    """verl's compute_remax_outcome_advantage: rewards less that of the greedy answer to the same prompt."""
    estimator = advantages_of(config_from_dict({"adv_estimator": "remax"}))
    assert estimator.greedy
    found = estimator(REWARDS, 4, response_tokens=TOKENS, baselines=np.array([0.5, 1.0, 0.3]))
    assert found == pytest.approx([0.5, -0.5, -0.25, 0, -1, -1, -1, 0, 0, 0, 0, 0])


def test_a_step_of_one_response_is_the_response() -> None:
    """ROLL 8eb27cc, roll/pipeline/agentic/utils.py, compute_discounted_returns: one step per trajectory."""
    keys = {"norm_mean_type": "batch", "norm_std_type": "batch"}
    assert estimate("step_reinforce", **keys).tolist() == estimate("reinforce", **keys).tolist()


def test_pass_at_k_rewards_the_lead_alone() -> None:
    from roll_batching.jobs.objectives.advantages import pass_at_k

    assert pass_at_k(REWARDS, 4, std=False).tolist() == [0.5, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "name", [entry.name for entry in ADVANTAGE_ESTIMATORS if entry.compares and not entry.of_turns]
)
def test_groups_of_equal_rewards_have_exact_zeros_and_groups_of_one_are_refused(name: str) -> None:
    equal = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    if "whiten_advantages" not in ADVANTAGE_ESTIMATORS.get(name).implied:
        assert not estimate(name, equal, 3)[:3].any()
    with pytest.raises(DataError, match="group of one response"):
        estimate(name, equal, 1)


def test_limits_apply_to_every_estimator() -> None:
    clipped = estimate("rloo", advantage_clip=0.5)
    assert clipped.tolist() == np.clip(estimate("rloo"), -0.5, 0.5).tolist() and clipped.max() == 0.5


@pytest.mark.bad_input
def test_what_an_estimator_fixes_may_be_said_and_not_changed() -> None:
    assert not config_from_dict({"adv_estimator": "reinforce_plus_plus", "whiten_advantages": True}).notices
    with pytest.raises(ConfigFileError, match="is group under adv_estimator: reinforce_plus_plus_baseline"):
        config_from_dict({"adv_estimator": "reinforce_plus_plus_baseline", "norm_mean_type": "batch"})
    (told,) = config_from_dict({"adv_estimator": "rloo", "norm_std_type": "group"}).notices
    assert told.path == "norm_std_type" and "of rloo do not depend on it" in told.text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "words"), [("gae", "needs the role `critic`"), ("agentic_reinforce", "choose reinforce")]
)
def test_estimators_that_do_not_exist_here_are_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigFileError, match=words):
        config_from_dict({"adv_estimator": name})
