"""NeMo-RL's files of supervised training and of learning from pairs become jobs of these tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, convert_file
from tests.tools.conversion.test_nemo_rl import data_args, loads_quietly

SUPERVISED = """
TASK:
  max_num_steps: STEPS
  max_num_epochs: 3
  val_period: 5
  val_batches: 2
  val_global_batch_size: 16
  val_at_start: false
  seed: 7
policy:
  model_name: models/small
  train_global_batch_size: 16
  train_micro_batch_size: 2
  max_total_sequence_length: 256
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}
  tokenizer: {name: models/small, chat_template: TEMPLATE}
data:
  add_bos: true
  add_generation_prompt: true
  train: {data_path: data/train.jsonl, subset: null, split: train}
  validation: {data_path: data/held_out.jsonl}
  default: {dataset_name: KIND, OWN}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""


def supervised(folder: Path, task: str, kind: str, *, steps: int = 60, template: str = "default", own: str = "a: ~"):
    text = SUPERVISED
    values = {"TASK": task, "KIND": kind, "STEPS": str(steps), "TEMPLATE": template, "OWN": own}
    for name, value in values.items():
        text = text.replace(name, value)
    (folder / "supervised.yaml").write_text(text)
    done = convert_file(folder / "supervised.yaml", ORIGINS["nemo_rl"])
    loads_quietly(done, folder)
    return done


@pytest.mark.config
def test_supervised_training_is_a_job_of_its_own(tmp_path):
    done = supervised(tmp_path, "sft", "ResponseDataset", own="output_key: solution")
    settings = done.settings
    assert (settings["task"], settings["max_steps"], settings["seed"]) == ("sft", 60, 7)
    assert (settings["eval_steps"], settings["eval_samples"], settings["sequence_length"]) == (5, 32, 256)
    assert settings["actor_train"]["data_args"] == data_args(prompt="input", response="solution")
    training = settings["actor_train"]["training_args"]
    assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (2, 4)
    assert {one.key for one in done.left_out_as("refused", "unknown")} == {"data.add_bos"}
    assert "warmup" not in settings and "actor_infer" not in settings
    endless = supervised(tmp_path, "sft", "openai_format", steps=-1, template="'{{ messages }}'")
    assert (endless.settings["num_train_epochs"], "max_steps" in endless.settings) == (3, False)
    assert endless.settings["actor_train"]["data_args"]["messages"] == "messages"
    assert "policy.tokenizer.chat_template" in {one.key for one in endless.left_out_as("refused")}


LOSS_OF_PAIRS = "reference_policy_kl_penalty: 0.2, preference_average_log_probs: true, "


@pytest.mark.config
def test_learning_from_pairs_is_a_job_of_its_own(tmp_path):
    from roll_batching.jobs.objectives.from_config import loss_of
    from roll_batching.losses.fine_tuning import DPOLoss

    task = f"dpo: {{{LOSS_OF_PAIRS}preference_loss_weight: 2, sft_loss_weight: 0.5, sft_average_log_probs: true}}"
    (tmp_path / "loss.yaml").write_text(task)
    done = supervised(tmp_path, "defaults: loss.yaml\ndpo", "BinaryPreferenceDataset", own="prompt_key: context")
    settings = done.settings
    assert (settings["task"], settings["reference"]) == ("dpo", {})
    texts = settings["actor_train"]["data_args"]
    assert (texts["prompt"], texts["chosen"], texts["rejected"], texts["chat"]) == (
        "context",
        "chosen",
        "rejected",
        True,
    )
    training = settings["actor_train"]["training_args"]
    assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (4, 4), "sequences"
    loss = loss_of(load_config(tmp_path / "job.yaml"))
    assert loss == DPOLoss(beta=0.2, average_log_probs=True, sft_coef=0.25, sft_average_log_probs=True)
    assert "dpo.preference_loss_weight" in {one.key for one in done.left_out_as("refused")}, "the loss is halved"
    ranked = supervised(tmp_path, "dpo", "PreferenceDataset")
    assert "one pair a line" in {one.key: one.why for one in ranked.left_out}["data.train"]
    assert [text.split(":")[0] for text in ranked.missing] == ["pretrain", "actor_train.data_args.file_name"]
