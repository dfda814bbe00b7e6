"""Keys of ROLL's that do here what they do there, and what the loader says about files of its kind."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict, load_config
from roll_batching.jobs.config.objective_rules import advantage_arguments
from roll_batching.jobs.config.yaml_source import parse_yaml, resolve_references
from roll_batching.jobs.objectives.advantages import outside_difficulty, reinforce
from tests.jobs.config.jobs import changed

REWARDS = np.array([1.0, 0.0, 3.0, 2.0, 5.0, 5.0])
SHIFTED = REWARDS - 16 / 6
DEVIATION = REWARDS.std(ddof=1) + 1e-6


@pytest.mark.config
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, SHIFTED / DEVIATION),
        ({"reward_shift": True}, SHIFTED),
        ({"reward_scale": True}, REWARDS / DEVIATION),
        ({"reward_shift": True, "reward_scale": True}, SHIFTED),
    ],
    ids=["both", "shift", "scale", "shift goes first"],
)
def test_reward_norm_is_rolls(keys, expected):
    """The formulas of ROLL's `reward_postprocess` before commit 7b97eef8, whose standard deviation is the sample's."""
    job = config_from_dict(changed({"adv_estimator": "reinforce", "reward_norm": "batch", **keys}))
    estimate = partial(reinforce, **advantage_arguments(job))
    np.testing.assert_allclose(estimate(REWARDS, 2, response_tokens=np.ones(6)), expected, rtol=1e-12)


@pytest.mark.config
def test_difficulty_mask_leaves_out_prompts_that_are_too_easy_or_too_hard():
    rewards = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.2, 0.0])
    outside = outside_difficulty(rewards, 2, 0.1, 0.95)
    assert outside.tolist() == [False, False, True, True, True, True, True, True], "a mean on a bound is outside, too"
    assert not outside_difficulty(rewards, 1, 0.1, 0.95).any()


@pytest.mark.config
def test_packing_alone_takes_its_cap_from_sequence_length_and_says_so():
    changes = {
        "actor_train.sequence_packing_args": None,
        "actor_train.training_args": {"per_device_train_batch_size": 2},
        "sequence_length": 1500,
        "prompt_length": 500,
    }
    job = config_from_dict(changed(changes))
    assert job.actor_train.batching().train.max_tokens == 3000
    (said,) = [notice.text for notice in job.notices if notice.path == "actor_train.use_sequence_packing"]
    assert "3000 tokens" in said and "sequence_length" in said


@pytest.mark.config
def test_dynamic_passes_without_gradient_take_trainings_cap():
    changes = {
        "actor_train.use_sequence_packing": False,
        "actor_train.use_dynamic_batching": True,
        "actor_train.max_tokens_per_microbatch_in_train": 512,
    }
    assert config_from_dict(changed(changes)).actor_train.batching().infer.max_tokens == 512


@pytest.mark.config
def test_minus_one_is_all_tokens():
    job = config_from_dict(changed({"actor_infer.generating_args": {"top_k": -1}}))
    assert job.actor_infer.generating_args.top_k == 0


@pytest.mark.config
def test_epochs_of_a_warm_up_are_steps_once_the_corpus_is_known():
    warmup = {"file_name": "a.jsonl", "num_train_epochs": 1.5}
    job = config_from_dict(changed({"warmup": warmup}))
    assert job.warmup.scheduled(documents=25, mini_batch=8).max_steps == 5
    for wrong in ({"file_name": "a.jsonl"}, {**warmup, "training_args": {"max_steps": 3}}):
        with pytest.raises(ConfigError, match="num_train_epochs"):
            config_from_dict(changed({"warmup": wrong}))


@pytest.mark.config
@pytest.mark.bad_input
def test_a_reference_to_nothing_hides_no_other_problem(tmp_path):
    (tmp_path / "job.yaml").write_text("pretrain: ${custom_env.model}\nmax_stepz: 3\nactor_train: {logprob_plan: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "job.yaml")
    text = str(caught.value)
    assert "3 problems" in text
    for words in ("job.yaml:1: pretrain: ${custom_env.model} names no key", "max_steps", "logprob_plan"):
        assert words in text
    source = parse_yaml("a: ${b}\n", "x")
    resolve_references(source)
    assert source.data == {"a": None} and len(source.faults) == 1


@pytest.mark.config
@pytest.mark.bad_input
def test_hints_never_point_at_another_roles_key():
    with pytest.raises(ConfigError) as caught:
        config_from_dict(changed({"reference.strategy_args.strategy_config.learning_rate": 1, "custom_envs": {}}))
    text = str(caught.value)
    assert "reference.training_args.learning_rate" in text
    assert "warmup" not in text and "actor_train" not in text and "system_envs" not in text, text
