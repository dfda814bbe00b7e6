"""ROLL's agentic files: trajectories and their groups, the comparison of rewards, and rollout_function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.objectives.from_config import advantages_of
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file

pytestmark = pytest.mark.config

FILE: dict[str, Any] = {
    "rollout_batch_size": 64,
    "sequence_length": 512,
    "max_steps": 10,
    "adv_estimator": "grpo",
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
    "custom_envs": {"Game": {"env_type": "game"}},
    "train_env_manager": {"group_size": 8, "tags": ["Game"], "num_env_groups": 8, "num_groups_partition": [8]},
    "val_env_manager": {"group_size": 1, "tags": ["Game"]},
    "actor_train": {
        "strategy_args": {"strategy_name": "megatron_train"},
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "device_mapping": "list(range(0,2))",
    },
    "actor_infer": {"generating_args": {"max_new_tokens": 64}, "strategy_args": {"strategy_name": "vllm"}},
}


def converted(folder: Path, **more: Any) -> Conversion:
    file = {key: value for key, value in (FILE | more).items() if value is not None}
    (folder / "file.yaml").write_text(yaml.safe_dump(file))
    return convert_file(folder / "file.yaml", ORIGINS["roll"])


def job_of(done: Conversion, folder: Path) -> JobConfig:
    (folder / "job.yaml").write_text(done.to_yaml())
    return load_config(folder / "job.yaml")


def test_trajectories_are_counted_in_groups(tmp_path: Path) -> None:
    done = converted(tmp_path, num_return_sequences_in_group=4)
    job = job_of(done, tmp_path)
    assert (job.rollout_batch_size, job.group_size, job.samples_per_rollout) == (8, 8, 64)
    assert "64 trajectories in groups of 8" in {one.key: one.meaning for one in done.changed}["rollout_batch_size"]
    idle = {one.key: one.why for one in done.left_out_as("idle")}
    assert "train_env_manager.group_size" in idle["num_return_sequences_in_group"]


def test_the_schedule_spans_rolls_optimizer_steps(tmp_path: Path) -> None:
    """`set_max_steps` of roll/configs/base_config.py, over the ranks."""
    from roll_batching.jobs.objectives.from_config import schedule_of

    job = job_of(converted(tmp_path, ppo_epochs=2), tmp_path)
    assert schedule_of(job, 2).max_steps == 10 * 64 * 2 // (2 * 4) // 2


@pytest.mark.parametrize(("size", "trajectories"), [(7, 64), (0, 64), ("many", 64)])
def test_groups_that_roll_refuses_are_left_out(tmp_path: Path, size: Any, trajectories: int) -> None:
    done = converted(tmp_path, train_env_manager={"group_size": size}, rollout_batch_size=trajectories)
    refused = {one.key for one in done.left_out_as("refused")}
    assert refused & {"rollout_batch_size", "train_env_manager.group_size"}


def test_a_file_without_groups_has_groups_of_one(tmp_path: Path) -> None:
    more = {"train_env_manager": {"tags": ["Game"]}, "adv_estimator": "reinforce", "reward_normalization": None}
    job = job_of(converted(tmp_path, **more), tmp_path)
    assert (job.rollout_batch_size, job.group_size, job.norm_mean_type, job.norm_std_type) == (64, 1, None, None)


REWARDS = np.array([1.0, 0, 0, 0, 2, 2, 2, 2, 0, 0.5, 1, 3])
BATCH = (REWARDS - REWARDS.mean()) / (REWARDS.std(ddof=1) + 1e-6)
GROUPS = REWARDS.reshape(3, 4)
CENTRED = (GROUPS - GROUPS.mean(1, keepdims=True)).ravel()
SCALED = CENTRED / (np.repeat(GROUPS.std(1, ddof=1), 4) + 1e-6)
NORMS: dict[str, tuple[dict[str, Any] | None, np.ndarray]] = {
    "group": ({"grouping": "traj_group_id", "method": "mean_std"}, SCALED),
    "clipped": ({"grouping": "traj_group_id", "method": "asym_clip"}, SCALED),
    "mean of the group": ({"grouping": "traj_group_id", "method": "mean"}, CENTRED),
    "batch": ({"grouping": "batch", "method": "mean_std"}, BATCH),
    "environment": ({"grouping": "tags", "method": "mean_std"}, BATCH),
    "none": ({"grouping": "traj_group_id", "method": "identity"}, REWARDS),
    "by default": (None, REWARDS),
    "named scopes": (
        {"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch"},
        CENTRED / (REWARDS.std(ddof=1) + 1e-6),
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("estimator", ["grpo", "reinforce"])
def test_reward_normalization_decides_the_advantages(tmp_path: Path, name: str, estimator: str) -> None:
    """`agentic_reward_norm` of ROLL, whatever adv_estimator and the top-level norm_mean_type say."""
    section, expected = NORMS[name]
    manager = {"group_size": 4, "tags": ["Game"]}
    done = converted(
        tmp_path,
        adv_estimator=estimator,
        reward_normalization=section,
        train_env_manager=manager,
        norm_mean_type="batch",
        rollout_batch_size=12,
    )
    found = advantages_of(job_of(done, tmp_path))(REWARDS, 4, response_tokens=np.ones(12, dtype=int))
    assert found == pytest.approx(expected, abs=1e-9)


def test_groups_of_environments_are_told(tmp_path: Path) -> None:
    section = {"grouping": "tags", "method": "mean_std"}
    done = converted(tmp_path, reward_normalization=section, train_env_manager={"tags": ["a", "b"], "group_size": 8})
    assert "those with the same tags" in {one.key: one.meaning for one in done.changed}["reward_normalization.method"]


def test_what_is_missing_is_a_rollout_function(tmp_path: Path) -> None:
    agent = {"Game": {"env_type": "game", "env_manager_cls": "roll.AgentNativeStepEnvManager"}}
    done = converted(tmp_path, custom_envs=agent, batch_adjust_mode="copy", use_token_reward=True)
    assert any(text.startswith("rollout_function: is missing") and "docs/rollouts.md" in text for text in done.missing)
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    for key in ("custom_envs", "train_env_manager", "val_env_manager", "use_token_reward"):
        assert "rollout_function" in refused[key] and "(docs/rollouts.md)" in refused[key]
    assert "not supported" not in " ".join(refused.values()) and "batch_adjust_mode" not in refused


PACKED = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": 1024}}
DIVISORS: dict[str, tuple[dict[str, Any], int, str]] = {
    "padded": ({}, 511, ""),
    "packed": (PACKED, 511, "that of each micro-batch or packed sequence"),
    "dynamic": (
        {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 1024},
        511,
        "micro-batch",
    ),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_the_sum_of_all_sequences_has_rolls_divisor(tmp_path: Path, name: str) -> None:
    batching, divisor, told = DIVISORS[name]
    role = FILE["actor_train"] | batching
    done = converted(tmp_path, loss_agg_mode="seq-mean-token-sum-norm", actor_train=role)
    job = job_of(done, tmp_path)
    assert (job.loss_agg_mode, job.loss_agg_length) == ("token-sum", divisor)
    assert told in " ".join(one.meaning for one in done.changed if one.to == "loss_agg_length")


@pytest.mark.parametrize(("discount", "is_refused"), [(None, True), (0.9, True), (1.0, False)])
def test_discounts_of_turns_are_the_rollout_functions(tmp_path: Path, discount: float | None, is_refused: bool) -> None:
    done = converted(tmp_path, adv_estimator="step_reinforce", step_reward_gamma=discount)
    told = {one.key: one.why for one in done.left_out_as("refused")}.get("step_reward_gamma")
    assert (told is not None) == is_refused and (told is None or "rollout_function returns discounted ones" in told)
