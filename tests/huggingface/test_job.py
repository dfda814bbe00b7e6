"""A job that starts from a model directory: settings, training, what it leaves."""

from __future__ import annotations

import pytest
import torch

from roll_batching.errors import CheckpointError
from roll_batching.huggingface.stored import StoredTensors
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.huggingface.test_export import check_equal, tensors
from tests.jobs.rl.jobs import settings, write_data
from tests.support.commands import run_command
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def job(folder, *, model_args=None, **changes):
    """The tiny job of `tests.jobs.rl.jobs`, from the directory `model`."""
    data = settings(folder, pretrain=str(folder / "model"), reward_function="tests.jobs.rl.jobs:length", **changes)
    del data["tokenizer"]
    data["actor_train"]["model_args"] = model_args or {}
    return data


def test_architecture_weights_and_tokenizer_come_from_the_directory(folder):
    config = config_from_dict(job(folder))
    model = config.actor_train.model_args
    assert model.model_name_or_path == str(folder / "model") and model.architecture.kv_channels == 16
    assert config.actor_infer.model_args == model
    assert config.tokenizer.type == "hf" and config.tokenizer.name_or_path == str(folder / "model")
    assert config_from_dict(config.to_dict()).actor_train == config.actor_train


def test_a_job_trains_it_and_leaves_the_model(folder, report):
    tensor_parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    run_ranks(
        2,
        "tests.jobs.rl.jobs:run",
        job(folder, save_steps=2, actor_train__strategy_args__strategy_config=tensor_parallel),
    )
    run = folder / "runs" / "tiny"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["warmup", "warmup", "rl", "rl"]
    assert rows[0]["loss"] > rows[1]["loss"]
    done = run_command("export", run, "--to", folder / "later")
    assert done.returncode == 0, done.stderr
    assert "rl-000002 (phase rl, step 2)" in done.stdout
    check_equal(folder / "later", run / "model")
    moved = tensors(run / "model")[0]["model.norm.weight"] - tensors(folder / "model")[0]["model.norm.weight"]
    assert moved.abs().max() > 1e-4
    report(done.stdout.strip())


@pytest.mark.bad_input
def test_what_is_written_beside_it_must_agree(folder, report):
    agreeing = {"architecture": {"hidden_size": 32, "hidden_dropout": 0.1}}
    data = job(folder, actor_train__logprob_plan="own")
    data["actor_train"]["model_args"] = agreeing
    assert config_from_dict(data).actor_train.model_args.architecture.hidden_dropout == 0.1
    data["actor_train"]["model_args"] = {"architecture": {"hidden_size": 64, "rope_scaling": {"type": "linear"}}}
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(data)
    paths = {".".join(problem.path[-2:]): problem.message for problem in caught.value.problems}
    assert paths.keys() == {"architecture.hidden_size", "architecture.rope_scaling"}
    assert len(caught.value.problems) == 2
    assert "is 64, and config.json" in paths["architecture.hidden_size"]
    report(str(caught.value))


@pytest.mark.bad_input
def test_a_directory_that_is_not_there_is_missed_when_the_job_is_run(folder, report):
    data = job(folder) | {"pretrain": "Some/Model"}
    config = config_from_dict(data)
    with pytest.raises(ConfigFileError, match="pretrain: 'Some/Model' is neither a directory") as caught:
        config.check_runnable()
    report(str(caught.value))


@pytest.mark.bad_input
def test_fields_that_are_not_computed_here_are_named_together(folder, report):
    tiny.edit_config(
        folder / "model", attention_bias=True, hidden_act="gelu", novelty=3, rope_parameters={"rope_type": "dynamic"}
    )
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job(folder))
    (problem,) = caught.value.problems
    assert problem.path == ("pretrain",)
    for words in (
        "attention_bias: True",
        "hidden_act: 'gelu'",
        "novelty: 3 is an unknown field",
        "rope_type 'dynamic'",
    ):
        assert words in problem.message
    report(str(caught.value))


@pytest.mark.bad_input
def test_sequences_beyond_a_window_are_refused_where_attention_has_no_windows(folder, report):
    tiny.edit_config(
        folder / "model", use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 4
    )
    architecture = config_from_dict(job(folder, response_length=40)).actor_train.model_args.architecture
    assert architecture.sliding_window == 64 and architecture.window_layers is None
    tiny.edit_config(folder / "model", use_sliding_window=True, sliding_window=30)
    with pytest.raises(AssertionError, match="a sample has 40 tokens and the model a sliding window of 30") as caught:
        own = (str(folder / "model"), Layout(), "tests.support.own_attention:MaskedSoftmax", "packed")
        run_ranks(1, "tests.huggingface.ranks:log_probs_by", own)
    report(str(caught.value).strip().splitlines()[-1])


@pytest.mark.bad_input
def test_tensors_that_do_not_fit_are_named_together_on_all_ranks(folder, report):
    from safetensors.torch import load_file, save_file

    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
    tensors["model.norm.weight"] = torch.ones(31)
    tensors["model.layers.2.self_attn.q_proj.bias"] = torch.ones(64)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, "tests.jobs.rl.jobs:run", job(folder))
    said = str(caught.value)
    for words in (
        "model.layers.0-3.self_attn.q_norm.weight is missing",
        "model.norm.weight is [31], not [32]",
        "model.layers.2.self_attn.q_proj.bias is not part of this model",
    ):
        assert said.count(words) >= 2
    assert "inv_freq" not in said and "ranks 0, 1" in said
    report(next(line for line in said.splitlines() if "q_norm" in line))


@pytest.mark.bad_input
def test_files_that_cannot_be_read_are_named(folder, report):
    model = folder / "model"
    whole = (model / "model.safetensors").read_bytes()
    breakages = {
        "cut off": lambda: (model / "model.safetensors").write_bytes(whole[: len(whole) // 2]),
        "not safetensors": lambda: (model / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(99)),
        "pickled": lambda: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
        "none": lambda: (model / "pytorch_model.bin").unlink(),
        "a file of the index": lambda: (model / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
        ),
    }
    words = {
        "cut off": "model.safetensors cannot be read",
        "not safetensors": "model.safetensors cannot be read",
        "pickled": "holds pytorch_model.bin, a pickle, which is not read",
        "none": "holds neither model.safetensors nor model.safetensors.index.json",
        "a file of the index": "model-00001-of-00002.safetensors cannot be read",
    }
    for name, breaks in breakages.items():
        breaks()
        with pytest.raises(CheckpointError, match=words[name]) as caught:
            StoredTensors(model)
        report(f"{name}: {caught.value}")


def test_rounded_weights_are_told_of(folder, report):
    tiny.write_tokenizer(folder / "model")
    data = job(folder, warmup=None, max_steps=1, eval_samples=0, model_args={"dtype": "bf16"})
    (outcome,) = run_ranks(1, "tests.jobs.rl.jobs:run", data, check=False)
    assert outcome.returncode == 0, outcome.output
    line = next(line for line in outcome.output.splitlines() if "weights are rounded" in line)
    assert "['F32']" in line and "bfloat16" in line
    report(line)
