"""Environments of ROLL's agentic files: what a converted file plays, and what is left to write; both train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.jobs.config import load_config
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from tests.campaigns.peer_configs import count
from tests.campaigns.peer_configs.jobs import PeerModels, what_stops
from tests.huggingface import tiny
from tests.support.ranks import run_ranks

HERE = "tests.tools.conversion.test_roll_environments:"
CHECKOUT = os.environ.get("ROLL_CHECKOUT")

LAKE: dict[str, Any] = {
    "env_type": "frozen_lake",
    "max_steps": 5,
    "max_tokens_per_step": 6,
    "env_manager_cls": "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager",
    "agent_system_template": "play well",
    "agent_template": "turn {turn_idx} of {{5}}, {actions_left} left, {max_response_length} tokens\n{observation}\n",
    "env_config": {"is_slippery": False, "format_penalty": -0.01, "action_pattern": "<go>(.*?)</go>", "max_steps": 5},
}
STEPS = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
ROOM = LAKE | {
    "env_type": "sokoban",
    "env_manager_cls": STEPS,
    "history_length": 3,
    "agent_template": "{env_instruction}\nafter {step_count}: [{history}]\nnow {current_step}: {current_observation}",
    "env_config": {"dim_room": [6, 6], "num_boxes": 1, "format_penalty": -0.15},
}
GUESS: dict[str, Any] = {
    "env_type": "game:GuessTheNumber-v0",
    "max_steps": 4,
    "max_tokens_per_step": 6,
    "env_manager_cls": "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager",
    "history_length": 4,
    "agent_template": "{history}\n{current_observation}\\boxed{{}}",
    "env_config": {"min_number": 1, "max_number": 9},
}
SHOP = LAKE | {"env_type": "webshop", "env_config": {"observation_mode": "text", "format_penalty": -0.05}}


def converted(folder: Path, environment: dict[str, Any], **more: Any) -> Conversion:
    """A file of ROLL with one environment of training, converted."""
    file = {
        "rollout_batch_size": 8,
        "val_batch_size": 4,
        "sequence_length": 640,
        "max_steps": 2,
        "seed": 3,
        "adv_estimator": "grpo",
        "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        "custom_envs": {"One": environment, "Two": LAKE},
        "train_env_manager": {
            "group_size": 4,
            "tags": ["One"],
            "num_env_groups": 2,
            "num_groups_partition": [2],
            "generating_args": {"max_new_tokens": 9, "temperature": 0.9, "num_return_sequences": 1},
        },
        "val_env_manager": {"group_size": 1, "tags": ["One"], "generating_args": {"temperature": 0.2}},
        "actor_train": {
            "strategy_args": {"strategy_name": "megatron_train"},
            "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        },
        "actor_infer": {"strategy_args": {"strategy_name": "vllm"}},
        "max_actions": 5,
        **more,
    }
    (folder / "file.yaml").write_text(yaml.safe_dump(file))
    return convert_file(folder / "file.yaml", ORIGINS["roll"])


def changes(done: Conversion) -> dict[str, str]:
    return {one.to: one.meaning for one in done.changed}


@pytest.mark.config
def test_an_episode_reads_what_rolls_manager_shows(tmp_path: Path) -> None:
    done = converted(tmp_path, LAKE)
    arguments = done.settings["rollout_args"]
    assert done.settings["rollout_function"] == "roll_batching.jobs.rollouts.environments:rollout"
    assert arguments["environment"] == "roll_batching.jobs.rollouts.environments:FrozenLake"
    assert arguments["environment_args"] == {"size": 4, "ice": 0.8, "is_slippery": False, "has_words": True}
    assert arguments["observation_format"] == "turn {turn} of {5}, {turns_left} left, 6 tokens\n{observation}\n"
    assert (arguments["action_pattern"], arguments["format_penalty"]) == ("<go>(.*?)</go>", -0.01)
    assert (arguments["system"], arguments["max_turns"], arguments["chat"]) == ("play well", 5, True)
    assert "history" not in arguments and not any("rollout" in text or "data_args" in text for text in done.missing)
    assert "in corners" in changes(done)["rollout_args.environment"]


@pytest.mark.config
def test_counts_lengths_and_sampling_are_rolls(tmp_path: Path) -> None:
    done = converted(tmp_path, LAKE)
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    job = load_config(tmp_path / "job.yaml")
    assert (job.rollout_batch_size, job.group_size, job.eval_samples) == (2, 4, 4)
    assert job.actor_train.data_args.prompts == range(4), "a seed of its own for each group of both steps"
    assert job.actor_train.data_args.held_out_prompts(job.eval_samples) == range(4, 8)
    assert job.response_length == 6, "the smaller of two limits of a turn"
    assert (job.actor_infer.generating_args.temperature, job.validation.generating_args.temperature) == (0.9, 0.2)
    left_out = {one.key: one.kind for one in done.left_out}
    assert left_out["max_actions"] == "idle" and "refused" not in left_out.values()


@pytest.mark.config
def test_turns_are_samples_whose_text_tells_earlier_ones(tmp_path: Path) -> None:
    done = converted(tmp_path, ROOM, adv_estimator="gigpo")
    arguments = done.settings["rollout_args"]
    assert arguments["environment"] == "roll_batching.jobs.rollouts.games:Sokoban" and arguments["history"] == 2
    assert arguments["environment_args"] == {"size": [6, 6], "boxes": 1}
    text = "{instruction}\nafter {turns_done}: [{history}]\nnow {turn}: {observation}"
    assert arguments["observation_format"] == text and arguments["action_pattern"] == "<answer>(.*?)</answer>"
    assert "without a valid action" in changes(done)["rollout_args.history"]
    assert done.settings["adv_estimator"] == "gigpo"


@pytest.mark.config
def test_returns_of_single_turns_are_told(tmp_path: Path) -> None:
    more: dict[str, Any] = {"adv_estimator": "step_reinforce", "step_reward_gamma": 1.0}
    assert "turns behind it" in changes(converted(tmp_path, ROOM, **more))["adv_estimator"]
    assert "adv_estimator" not in changes(converted(tmp_path, ROOM | {"max_steps": 1}, **more))


@pytest.mark.config
def test_games_of_gem_keep_their_names_and_arguments(tmp_path: Path) -> None:
    done = converted(tmp_path, GUESS)
    arguments = done.settings["rollout_args"]
    assert arguments["environment"] == "roll_batching.jobs.rollouts.games:Gem"
    assert arguments["environment_args"] == {"name": "game:GuessTheNumber-v0", "min_number": 1, "max_number": 9}
    assert arguments["observation_format"] == "{history}\n{observation}\\boxed{}" and arguments["history"] == 3
    assert "action_pattern" not in arguments and "system" not in arguments
    assert "gem-llm" in changes(done)["rollout_args.environment"]


@pytest.mark.config
@pytest.mark.parametrize(
    ("environment", "key", "words"),
    [
        (SHOP, "rollout_args.environment", "reset(*, seed, options) and step(action) for ROLL's webshop "),
        (LAKE | {"env_manager_cls": "a.VLTrajEnvManager"}, "rollout_function", "write VLTrajEnvManager of One as one"),
        ({}, "rollout_function", "write the environments of custom_envs as one"),
    ],
)
def test_what_is_left_to_write_is_named(tmp_path: Path, environment: dict[str, Any], key: str, words: str) -> None:
    missing = [text for text in converted(tmp_path, environment).missing if text.startswith(f"{key}: is missing")]
    assert len(missing) == 1 and words in missing[0] and "docs/rollouts.md" in missing[0]


@pytest.mark.config
@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"agent_template": "{goal} {observation}"}, "custom_envs.One.agent_template", "cannot be filled"),
        ({"agent_template": "{history} {observation}"}, "custom_envs.One.agent_template", "cannot be filled"),
        ({"agent_template": "{observation.x}"}, "custom_envs.One.agent_template", "cannot be filled"),
        ({"agent_template": "go"}, "custom_envs.One.agent_template", "no place for the observation"),
        ({"env_config": {"grid_lookup": {0: "W"}}}, "custom_envs.One.env_config.grid_lookup", "no such argument"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, more: dict[str, Any], key: str, words: str) -> None:
    refused = {one.key: one.why for one in converted(tmp_path, LAKE | more).left_out_as("refused")}
    assert list(refused) == [key] and words in refused[key]


@pytest.mark.config
def test_other_environments_of_a_file_are_named(tmp_path: Path) -> None:
    manager = {"group_size": 4, "tags": ["One", "Two"]}
    done = converted(tmp_path, LAKE, train_env_manager=manager, val_env_manager={"tags": ["Two"]})
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    assert refused.keys() == {"train_env_manager.tags", "val_env_manager.tags"}
    assert all("['Two']" in why and "One" in why for why in refused.values())


# ---- training


class Shop:
    """What a user writes for an environment of ROLL's own: the reward is a digit's share of the model's text."""

    def __init__(self, observation_mode: str) -> None:
        self.mode, self.count, self.seed = observation_mode, 0, -1

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return self.mode, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"seed{self.seed}", sum(map(ord, action)) % 10 / 10, self.count == 2, False, {}


def trained(folder: Path, done: Conversion, **more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and lines of rollouts.jsonl of the converted job with a tiny model."""
    model = folder / "model"
    tiny.write_model(model, "qwen2")
    tiny.edit_config(model, max_position_embeddings=1024)
    tiny.write_tokenizer(model)
    job = done.settings
    job["rollout_args"] |= more
    del job["actor_infer"]["strategy_args"]
    run = {"pretrain": str(model), "exp_name": "run", "output_dir": str(folder / "runs"), "rollout_samples": -1}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | run))
    run_ranks(1, "tests.jobs.rl.jobs:run", load_config(folder / "job.yaml").model_dump(exclude_unset=True))
    lines = (folder / "runs" / "run" / "rollouts.jsonl").read_text().splitlines()
    return read_metrics(folder / "runs" / "run" / "metrics.jsonl"), [json.loads(line) for line in lines]


@pytest.mark.models
@pytest.mark.parametrize("environment", [LAKE, ROOM, SHOP], ids=["lake", "room", "shop"])
def test_a_converted_file_trains(environment: dict[str, Any], tmp_path: Path) -> None:
    """Both steps and the evaluation; groups share a seed, and rewards are the environment's with its penalties."""
    more = {"action_pattern": "(.*)"} if environment is SHOP else {}
    done = converted(tmp_path, environment, adv_estimator="gigpo" if environment is ROOM else "grpo")
    metrics, lines = trained(tmp_path, done, **({"environment": HERE + "Shop", **more} if more else {}))
    steps = [row for row in metrics if "loss" in row]
    assert len(steps) == 2 and any("eval_reward" in row for row in metrics)
    training = [line for line in lines if line["kind"] == "train"]
    assert len(training) == 16 and {line["prompt"] for line in training} == set("0123"), "four seeds of four rollouts"
    assert {line["prompt"] for line in lines if line["kind"] == "eval"} == set("4567")
    if environment is SHOP:
        assert all(row["turns_mean"] == 2 and row["grad_norm"] > 0 for row in steps) and steps[0]["reward"] > 0.1
        assert all(f"seed{line['prompt']}" in line["response"] for line in lines)
        return
    penalty = -0.01 if environment is LAKE else -0.25
    for line in training:  # no answer of a random model has the form of an action
        assert line["reward"] == pytest.approx(penalty * line["turns"]) and line["turns"] >= 2
        assert line["samples"] == (1 if environment is LAKE else line["turns"])
    assert {row["mark/valid"] for row in steps} == {0}


@pytest.mark.config
@pytest.mark.skipif(CHECKOUT is None, reason="ROLL_CHECKOUT names no checkout of ROLL")
def test_files_of_the_checkout_start(tmp_path: Path, report: Any) -> None:
    """Those with environments that exist here pass all checks before a model is built; others say what is missing."""
    os.environ.setdefault("HF_HOME", "/nonexistent")
    models, started, named = PeerModels(tmp_path / "models"), [], []
    files = [path for path in count.roll_files(Path(str(CHECKOUT))) if count.kind_of(path) == "agentic"]
    for path in files:
        done = convert_file(path, ORIGINS["roll"])
        if any(text.startswith(("rollout_function", "rollout_args.environment")) for text in done.missing):
            named.append(path)
        else:
            assert what_stops(done.settings, models, tmp_path) == [], path
            started.append(path)
    report(f"of ROLL's {len(files)} agentic files {len(started)} start, and {len(named)} say what to write")
    assert len(started) >= 17 and len(started) + len(named) == len(files)
