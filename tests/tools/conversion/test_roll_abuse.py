"""Files that pass for ROLL's and are not: one error that names the key, or a converted file that loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from tests.tools.conversion.test_roll_defaults import FILES

pytestmark = [pytest.mark.config, pytest.mark.bad_input]


def converted(folder: Path, pipeline: str, changes: dict[str, Any]) -> Conversion:
    """The file of `pipeline` with `changes` by dotted key, converted; what is converted loads."""
    file = yaml.safe_load(FILES[pipeline])
    for key, value in changes.items():
        *sections, last = key.split(".")
        here = file
        for part in sections:
            here = here.setdefault(part, {})
        here[last] = value
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(file))
    done = convert_file(path, ORIGINS["roll"])
    (folder / "job.yaml").write_text(done.to_yaml())
    load_config(folder / "job.yaml")
    return done


@pytest.mark.parametrize(
    ("pipeline", "key", "value"),
    [
        ("rlvr", "actor_train.pg_variant", ["topr"]),
        ("rlvr", "actor_train.pg_variant", {"topr": 1}),
        ("rlvr", "actor_train.topr_negative_weight", "heavy"),
        ("rlvr", "rewards.math.tag_included", 3),
        ("rlvr", "rewards.math.worker_cls", None),
        ("rlvr", "rewards", ["math"]),
        ("rlvr", "actor_train.data_args.domain_interleave_probs", {"math": float("nan")}),
        ("rlvr", "actor_train.data_args.domain_interleave_probs", {"math": True, "judge": True}),
        ("rlvr", "actor_train.data_args.file_name", [None, 3]),
        ("rlvr", "actor_infer.generating_args.temperature", float("nan")),
        ("rlvr", "actor_infer.generating_args.num_return_sequences", "many"),
        ("rlvr", "actor_infer.generating_args", ["temperature"]),
        ("rlvr", "num_return_sequences_in_group", {"size": 8}),
        ("rlvr", "adv_estimator", ["grpo"]),
        ("rlvr", "norm_std_type", ["batch"]),
        ("rlvr", "max_ckpt_to_keep", True),
        ("rlvr", "max_ckpt_to_keep", -1),
        ("rlvr", "sequence_length", 8),
        ("rlvr", "val_sequence_length", 1),
        ("rlvr", "pretrain", ["models/a"]),
        ("rlvr", "validation", 7),
        ("rlvr", "actor_train", None),
        ("rlvr", "actor_train.training_args", None),
        ("rlvr", "actor_train.strategy_args", ["megatron_train"]),
        ("rlvr", "reference.strategy_args.strategy_name", {"megatron": 1}),
        ("rlvr", "train_infer_correction", [1]),
        ("rlvr", "train_infer_correction.is_weight", True),
        ("rlvr", "train_infer_correction.filters", [None, 3, "ratio"]),
        ("rlvr", "train_infer_correction.filters", {"enabled": True}),
        ("rlvr", "train_infer_correction.filters", [{"enabled": True, "ratio_low": True}]),
        ("rlvr", "train_infer_correction.is_weight", {"enabled": True, "uper_bound": 2.0}),
        ("dpo", "actor_train.training_args.per_device_train_batch_size", True),
        ("dpo", "actor_train.training_args.per_device_train_batch_size", "8"),
        ("dpo", "beta", float("inf")),
        ("dpo", "chosen_key", 5),
        ("sft", "sft_train", ["a"]),
        ("sft", "sft_train.training_args.num_train_epochs", "two"),
        ("sft", "prompt_key", {"a": 1}),
    ],
)
def test_a_value_of_the_wrong_kind_is_left_out_by_name(tmp_path, pipeline, key, value):
    done = converted(tmp_path, pipeline, {key: value})
    assert "(the whole file)" not in {one.key for one in done.left_out}
    assert all(isinstance(one.why, str) and len(one.why) < 700 for one in done.left_out)
    if key.startswith("train_infer"):
        assert any(one.key.startswith(key) or key.startswith(one.key) for one in done.left_out_as("refused"))


def test_a_size_of_pairs_that_is_no_number_is_not_doubled(tmp_path):
    key = "actor_train.training_args.per_device_train_batch_size"
    done = converted(tmp_path, "dpo", {key: True})
    assert done.settings["actor_train"]["training_args"]["per_device_train_batch_size"] == 2, "one pair"
    assert key in {one.key for one in done.left_out_as("refused")}


def test_a_response_without_room_is_not_made_negative(tmp_path):
    done = converted(tmp_path, "rlvr", {"sequence_length": 8, "prompt_length": 32})
    assert "-24" not in str(done.settings)
    assert {one.key for one in done.left_out_as("refused")} & {"sequence_length", "response_length"}


def test_data_files_that_must_not_be_opened_are_not(tmp_path):
    pipe, folder, long = tmp_path / "judge.pipe", tmp_path / "folder.jsonl", tmp_path / "long.jsonl"
    os.mkfifo(pipe)
    folder.mkdir()
    long.write_text('{"tag": "' + "x" * (3 << 20))
    files = [str(pipe), str(folder), str(long), "/dev/zero", str(tmp_path / "no" / ".." / "judge.jsonl")]
    rewards = {"math": {"worker_cls": "a.MathRuleRewardWorker"}, "judge": {"worker_cls": "a.DetectionRewardWorker"}}
    done = converted(tmp_path, "rlvr", {"rewards": rewards, "actor_train.data_args.file_name": files})
    kept = done.settings["actor_train"]["data_args"]["file_name"]
    assert kept == [str(folder), str(long), "/dev/zero"], "the others' names say whose prompts they hold"


@pytest.mark.parametrize(
    "text", ["{}\n", "[]\n", "null\n", '"tag"\n', '{"tag": null}\n', '{"tag": ["a"]}\n', "\x00\xff"]
)
def test_a_data_file_whose_lines_name_no_domain_is_kept(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    rewards = {"math": {"worker_cls": "a.MathRuleRewardWorker"}, "judge": {"worker_cls": "a.DetectionRewardWorker"}}
    done = converted(tmp_path, "rlvr", {"rewards": rewards, "actor_train.data_args.file_name": [str(file)]})
    assert done.settings["actor_train"]["data_args"]["file_name"] == [str(file)]


@pytest.mark.parametrize(
    ("framework", "text", "words"),
    [
        ("roll", "defaults: [file]\nexp_name: a\n", "file.yaml: defaults: inherit from each other"),
        ("roll", "", "is empty: there is nothing to convert"),
        ("roll", "policy: {model_name: a}\ngrpo: {}\n", "was written for NeMo-RL: convert it with --from nemo_rl"),
        ("nemo_rl", "", "is empty: there is nothing to convert"),
        ("nemo_rl", FILES["rlvr"], "was written for ROLL: convert it with --from roll"),
        ("nemo_rl", "defaults: gone.yaml\n", "file.yaml: defaults: names gone.yaml, but the file .* does not exist"),
    ],
)
def test_a_file_that_is_not_of_the_framework_is_one_error(tmp_path, framework, text, words):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        convert_file(path, ORIGINS[framework])
