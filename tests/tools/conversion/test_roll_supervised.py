"""ROLL's files of supervised training and of learning from pairs become jobs of these tasks."""

from __future__ import annotations

import pytest

from tests.tools.conversion.test_roll import converted, loads_quietly

SFT = """
hydra: {run: {dir: .}}
sequence_length: 256
pretrain: models/small
prompt_key: question
query_key: more
response_key: reply
save_steps: 5
sft_train:
  training_args: {num_train_epochs: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  data_args: {file_name: data/code.jsonl, template: qwen}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}
  use_sequence_packing: true
  device_mapping: list(range(0,4))
validation:
  data_args: {file_name: data/held_out.jsonl}
"""
DPO = """
sequence_length: 512
pretrain: models/small
max_steps: 50
ipo: IPO
beta: 0.2
label_smoothing: 0.1
chosen_key: good
rejected_key: bad
validation:
  data_args: {file_name: data/held_out.jsonl}
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 16, num_train_epochs: 10}
  data_args: {file_name: [data/pairs.jsonl]}
  strategy_args: {strategy_name: megatron_train}
  device_mapping: list(range(0,4))
reference:
  strategy_args: {strategy_name: megatron_infer}
  device_mapping: list(range(0,4))
"""


@pytest.mark.config
def test_supervised_training_is_a_job_of_its_own(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(SFT)
    done = converted(path)
    loads_quietly(done, tmp_path)
    settings = done.settings
    assert (settings["task"], settings["num_train_epochs"], settings["save_steps"]) == ("sft", 2, 5)
    assert settings["actor_train"]["data_args"] == {
        "file_name": "data/code.jsonl",
        "eval_file_name": "data/held_out.jsonl",
        "chat": True,
        "prompt": "question",
        "query": "more",
        "response": "reply",
    }
    assert settings["actor_train"]["training_args"]["gradient_accumulation_steps"] == 4
    assert not done.left_out_as("refused", "unknown")
    assert {one.key for one in done.changed} >= {"sequence_length", "data_args.template"}
    assert [text.split(":")[0] for text in done.missing] == ["pretrain"], "nothing but the model is missing"


@pytest.mark.config
@pytest.mark.parametrize("ipo", [False, True])
def test_learning_from_pairs_is_a_job_of_its_own(tmp_path, ipo):
    path = tmp_path / "dpo.yaml"
    path.write_text(DPO.replace("IPO", str(ipo).lower()))
    done = converted(path)
    loads_quietly(done, tmp_path)
    settings = done.settings
    smoothing = {} if ipo else {"label_smoothing": 0.1}
    assert (settings["task"], settings["max_steps"]) == ("dpo", 50)
    assert (settings["loss_function"], settings["loss_args"]) == ("ipo" if ipo else "dpo", {"beta": 0.2, **smoothing})
    texts = settings["actor_train"]["data_args"]
    assert (texts["prompt"], texts["chosen"], texts["rejected"], texts["chat"]) == ("instruction", "good", "bad", True)
    assert texts["eval_file_name"] == "data/held_out.jsonl"
    rows = "actor_train.training_args.per_device_train_batch_size"
    assert settings["actor_train"]["training_args"]["per_device_train_batch_size"] == 32, "sequences, not pairs"
    assert "two of each pair" in {one.key: one.meaning for one in done.changed}[rows]
    assert not done.left_out_as("refused", "unknown")
    assert [text.split(":")[0] for text in done.missing] == ["pretrain"]
