"""Files of the kind of NeMo-RL that are broken or odd: an error by name, or what is meant, never a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from roll_batching.errors import ConfigError, PlanError
from roll_batching.integrations.nemo_rl_names import get_packer, shard_by_batch_size
from roll_batching.jobs.config import load_config
from roll_batching.samples import SampleBatch
from roll_batching.tools.conversion import ORIGINS, convert_file
from roll_batching.tools.conversion.nemo_rl_batching import convert_policy
from tests.tools.conversion.test_nemo_rl_defaults import converted, file_of, job_of

pytestmark = [pytest.mark.config, pytest.mark.bad_input]


def changed(key: str, value: Any, task: str = "grpo") -> dict[str, Any]:
    file = file_of(task)
    here = file
    *sections, last = key.split(".")
    for part in sections:
        here = here.setdefault(part, {})
    here[last] = value
    return file


WRONG_KIND = {
    "cluster.gpus_per_node": "eight",
    "cluster.gpus_per_node ": None,
    "cluster.num_nodes": 1.5,
    "policy.train_global_batch_size": "64",
    "policy.train_micro_batch_size": 0,
    "policy.train_micro_batch_size ": True,
    "policy.megatron_cfg": "on",
    "policy.generation": ["vllm"],
    "policy.tokenizer": "models/small",
    "policy.optimizer": "adamw",
    "policy.dtensor_cfg": None,
    "policy.dtensor_cfg.tensor_parallel_size": "two",
    "policy.dtensor_cfg.tensor_parallel_size ": 0,
    "policy.generation.colocated": False,
    "policy.generation.vllm_cfg": [1],
    "policy.generation.vllm_kwargs": "fast",
    "policy.scheduler": ["cosine"],
    "policy.max_total_sequence_length": "long",
    "grpo": None,
    "grpo.adv_estimator": "grpo",
    "grpo.adv_estimator ": None,
    "grpo.async_grpo": True,
    "grpo.val_period": "often",
    "grpo.advantage_clip_high": "much",
    "grpo.max_val_samples": -3,
    "grpo.dynamic_sampling_max_gen_batches": True,
    "grpo.dynamic_sampling_max_gen_batches ": 2.5,
    "grpo.batch_multiplier": float("nan"),
    "grpo.batch_multiplier ": float("inf"),
    "grpo.batch_multiplier  ": 1e308,
    "env.nemo_gym": True,
    "loss_fn": None,
    "loss_fn.truncated_importance_sampling_type": "tss",
    "loss_fn.reference_policy_kl_penalty": "0.01",
    "data": None,
    "data.default": "math",
    "data.train": "train.jsonl",
    "data.train ": [[1], None],
    "data.train.data_path": 5,
    "env": "math",
    "env.math": None,
    "checkpointing": None,
    "checkpointing.save_period": "daily",
    "logger": "wandb",
    "async_rl": {"sampler": "in_order"},
    "async_rl ": {"sampler": {"name": "windowed", "max_staleness_versions": "few"}},
}


@pytest.mark.parametrize("key", WRONG_KIND)
def test_values_of_the_wrong_kind_are_named_or_left_out(tmp_path, key):
    file = changed(key.strip(), WRONG_KIND[key])
    if "multiplier" in key or "dynamic" in key:
        file["grpo"]["use_dynamic_sampling"] = True
    if key == "env.nemo_gym":
        file["env"]["should_use_nemo_gym"] = True
    if key == "loss_fn.truncated_importance_sampling_type":
        file["loss_fn"] |= {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
    try:
        done = converted(tmp_path, file)
    except ConfigError as error:
        assert key.strip().rpartition(".")[2] in str(error)
        return
    assert "(the whole file)" not in {one.key for one in done.left_out}
    if "multiplier" in key or "dynamic" in key:
        assert key.strip() in {one.key for one in done.left_out_as("refused")}
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    load_config(tmp_path / "job.yaml")


@pytest.mark.parametrize("name", ["microbatch_order", "train_mb_tokens", "algorithm"])
@pytest.mark.parametrize("value", [float("nan"), "..", -1, {"a": 1}])
def test_settings_of_packing_that_are_none(tmp_path, name, value):
    file = changed(f"policy.sequence_packing.{name}", value)
    try:
        done = converted(tmp_path, file)
    except ConfigError as error:
        assert name in str(error)
        return
    assert any(name in one.key for one in done.left_out), "left out, and said"


def test_budgets_that_are_no_counts_are_refused_by_the_layer():
    for value in (float("nan"), float("inf"), True, 0, -5, 10.5, "many", [1024]):
        with pytest.raises(PlanError, match="train_mb_tokens"):
            convert_policy({"sequence_packing": {"enabled": True, "train_mb_tokens": value}})
    with pytest.raises(PlanError, match="sequence_packing is"):
        convert_policy({"sequence_packing": [1]})


def test_packers_refuse_lengths_that_are_none():
    packer = get_packer("first_fit_decreasing", 100)
    for lengths in ([10, -1], [10.5], [101], [float("nan")], ["10"]):
        with pytest.raises((PlanError, ValueError, TypeError)):
            packer.pack(lengths)  # type: ignore[arg-type]
    for capacity in (0, -5, float("nan")):
        with pytest.raises(PlanError):
            get_packer("concatenative", capacity).pack([1])  # type: ignore[arg-type]


def batch_of(*lengths: int) -> SampleBatch:
    return SampleBatch.from_lists({"tokens": [np.arange(one) for one in lengths]}, schema={"tokens": "token"})


def test_shards_of_impossible_sizes_are_refused():
    packing = {"max_tokens_per_microbatch": 64, "algorithm": "first_fit_decreasing"}
    batch = batch_of(8, 8, 8, 8)
    for shards, size in ((0, None), (-1, None), (2, 0), (2, -4), (3, None)):
        with pytest.raises(PlanError):
            shard_by_batch_size(batch, shards, size, sequence_packing_args=packing)
    for key in ("max_tokens_per_microbatch", "algorithm"):
        left = {name: value for name, value in packing.items() if name != key}
        with pytest.raises(PlanError, match=key):
            shard_by_batch_size(batch, 2, sequence_packing_args=left)


def test_inheritance_from_nowhere_and_from_above(tmp_path):
    folder = tmp_path / "below"
    folder.mkdir()
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(file_of("sft")))
    (folder / "child.yaml").write_text("defaults: ../base.yaml\nsft: {max_num_steps: 7}\n")
    assert convert_file(folder / "child.yaml", ORIGINS["nemo_rl"]).settings["max_steps"] == 7
    for parent in ("gone.yaml", "..", "5", "[{a: 1}]"):
        (folder / "child.yaml").write_text(f"defaults: {parent}\n")
        with pytest.raises(ConfigError):
            convert_file(folder / "child.yaml", ORIGINS["nemo_rl"])


def test_a_default_that_reaches_into_what_is_no_section(tmp_path):
    for value in (None, False, [], "x"):
        job = job_of(tmp_path, changed("grpo.async_grpo", value))
        assert not job.async_generation_ratio


def test_a_resumed_conversion_is_the_same(tmp_path):
    file = file_of("dpo")
    first = converted(tmp_path, file)
    second = converted(tmp_path, file)
    assert first.to_yaml() == second.to_yaml() and first.to_json() == second.to_json()


def test_what_numbers_say_stays_what_they_say(tmp_path):
    for value in (float("nan"), float("inf"), -1e9):
        file = changed("loss_fn.ratio_clip_min", value)
        done = converted(tmp_path, file)
        assert "loss_fn.ratio_clip_min" in {one.key for one in done.left_out_as("refused")}


def test_two_algorithms_in_one_file_are_said(tmp_path):
    file = file_of("grpo") | {"sft": {}}
    done = converted(tmp_path, file)
    assert done.settings.get("task") == "sft"
    assert "grpo" in {one.key.partition(".")[0] for one in done.left_out_as("refused", "unknown")}


def test_a_megatron_file_without_an_optimizer(tmp_path):
    file = changed("policy.megatron_cfg", {"enabled": True})
    file["policy"]["dtensor_cfg"] = {"enabled": False}
    training = job_of(tmp_path, file).actor_train.training_args
    assert training.learning_rate == load_config_default(tmp_path), "not that of DTensor's optimizer"


def load_config_default(folder: Path) -> float:
    (folder / "empty.yaml").write_text("{}\n")
    return load_config(folder / "empty.yaml").actor_train.training_args.learning_rate
