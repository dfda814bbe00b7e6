"""RL jobs that train LoRA adapters: killed and resumed, with the policy as its own reference; what they leave."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import tiny
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import rows_of, saved
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

RESUME = "tests.jobs.run.test_resume:run_until"
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def job(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A small RL job with adapters, a reference and a sharded optimizer, on the directory `model`."""
    data = settings(
        folder,
        exp_name=name,
        pretrain=str(folder / "model"),
        reward_function="tests.jobs.run.test_resume:noisy",
        warmup=None,
        max_steps=4,
        save_steps=2,
        actor_train__training_args__learning_rate=1e-2,
        actor_train__strategy_args__strategy_config={"use_distributed_optimizer": True},
        **{**REFERENCE, **changes},
    )
    del data["tokenizer"]
    data["actor_train"]["model_args"] = {"lora_target": "all-linear", "lora_rank": 4}
    return data


@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(folder: Path) -> None:
    from safetensors.torch import load_file

    run_ranks(2, RESUME, {"job": job(folder, "straight"), "generators": 5})
    resumed = job(folder, "killed", resume_from_checkpoint=True)
    outcomes = run_ranks(2, RESUME, {"job": resumed, "generators": 5, "die_after": 3}, check=False, grace=3)
    assert outcomes[1].returncode == -signal.SIGKILL, outcomes[1].output
    run_ranks(2, RESUME, {"job": resumed, "generators": 7})
    expected, found = rows_of(folder, "straight"), rows_of(folder, "killed")
    assert [row["step"] for row in expected] == [1, 2, 3, 4]
    assert not [a["step"] for a, b in zip(expected, found, strict=True) if a != b]
    assert saved(folder, "killed") == ["rl-000002", "rl-000004"]
    checkpoint = folder / "runs" / "killed" / "checkpoints" / "rl-000004"
    assert not (checkpoint / "reference").exists()
    assert json.loads((checkpoint / "strategy.json").read_text())["adapters"]["rank"] == 4
    runs = [folder / "runs" / name for name in ("straight", "killed")]
    adapters, again = (load_file(run / "adapter" / "adapter_model.safetensors") for run in runs)
    assert adapters.keys() == again.keys() and all(torch.equal(adapters[name], again[name]) for name in adapters)
    base, model = (load_file(place / "model.safetensors") for place in (folder / "model", runs[0] / "model"))
    name = "model.layers.0.mlp.gate_proj.weight"
    a, b = (adapters[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(model[name] - base[name], 2.0 * b @ a, atol=1e-6, rtol=1e-4)
    assert torch.equal(model["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert float(b.abs().max()) > 1e-3


@pytest.mark.config
def test_a_reference_without_the_adapters_of_the_start_has_a_notice(folder: Path) -> None:
    from roll_batching.jobs.config.loader import config_from_dict

    data = job(folder, "started")
    data["actor_train"]["model_args"]["adapter_name_or_path"] = str(folder / "adapter")
    notices = {notice.path: notice.text for notice in config_from_dict(data).notices}
    assert "the model without these adapters" in notices["actor_train.model_args.adapter_name_or_path"]
    data |= {"use_kl_loss": False, "kl_loss_coef": 0.0}
    assert "adapter_name_or_path" not in str([notice.path for notice in config_from_dict(data).notices])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["kto", "distill"])
def test_other_tasks_train_adapters(task: str, folder: Path) -> None:
    from tests.jobs.rl import test_distillation, test_kto

    if task == "kto":
        data, measure = test_kto.job(folder, task, max_steps=12), "eval_loss"
    else:
        (folder / "model").rename(folder / "student")
        tiny.write_model(folder / "teacher", "llama3")
        tiny.write_tokenizer(folder / "teacher")
        data, measure = test_distillation.job(folder, task, max_steps=6), "divergence"
    data["actor_train"]["model_args"] |= {"lora_target": "all-linear", "lora_rank": 4}
    data["actor_train"]["training_args"]["learning_rate"] = 1e-2
    run_ranks(1, "tests.jobs.rl.jobs:run", data)
    values = [row[measure] for row in rows_of(folder, task) if row.get(measure) is not None]
    assert values[-1] < 0.9 * values[0], values
