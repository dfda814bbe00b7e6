"""Files of other frameworks in fp16: the model's precision, and the loss scale that each of them would use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from tests.tools.conversion import test_slime as slime
from tests.tools.conversion import test_verl as verl

pytestmark = pytest.mark.config

RLVR = {
    "rollout_batch_size": 16,
    "num_return_sequences_in_group": 4,
    "max_steps": 3,
    "pretrain": "/m",
    "adv_estimator": "reinforce",
    "prompt_length": 32,
    "response_length": 32,
    "rewards": {"math": {"worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"}},
}


def from_roll(folder: Path, role: dict[str, Any]) -> Conversion:
    training = {"device_mapping": "list(range(0,2))", "data_args": {"file_name": "/d.jsonl"}, **role}
    (folder / "roll.yaml").write_text(yaml.safe_dump(RLVR | {"actor_train": training}))
    return convert_file(folder / "roll.yaml", ORIGINS["roll"])


DATA = "--prompt-data /d --rm-type math --input-key q --label-key a"
MEGATRON = "model_engine=megatron"
OVERRIDES = f"+{verl.A}.optim.override_optimizer_config"
FILES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "slime": (slime.converted, f"{DATA} --fp16", {"initial_loss_scale": 2.0**32, "loss_scale_window": 1000}),
    "slime, with options": (
        slime.converted,
        f"{DATA} --fp16 --initial-loss-scale 65536 --min-loss-scale 4 --loss-scale-window 50 --hysteresis 3",
        {"initial_loss_scale": 65536.0, "min_loss_scale": 4.0, "loss_scale_window": 50, "hysteresis": 3},
    ),
    "slime, constant": (slime.converted, f"{DATA} --fp16 --loss-scale 128", {"loss_scale": 128.0}),
    "verl, megatron": (
        verl.converted, f"{MEGATRON} {verl.A}.megatron.dtype=float16",
        {"initial_loss_scale": 2.0**15, "loss_scale_window": 1000, "hysteresis": 2},
    ),
    "verl, overridden": (
        verl.converted, f"{MEGATRON} {verl.A}.megatron.dtype=float16 {OVERRIDES}.initial_loss_scale=1024",
        {"initial_loss_scale": 1024.0},
    ),
    "verl, fsdp": (
        verl.converted, f"{verl.A}.fsdp_config.dtype=float16",
        {"initial_loss_scale": 2.0**16, "loss_scale_window": 400, "hysteresis": 1},
    ),
    "roll": (from_roll, {"model_args": {"dtype": "fp16"}}, {"initial_loss_scale": 2.0**32}),
    "roll, training_args": (
        from_roll, {"model_args": {"dtype": "fp32"}, "training_args": {"fp16": True}}, {"initial_loss_scale": 2.0**32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_fp16_is_converted_with_its_loss_scale(name: str, tmp_path: Path) -> None:
    convert, options, expected = FILES[name]
    done = convert(tmp_path, options)
    job = slime.job_of(done, tmp_path)
    assert job.actor_train.model_args.dtype == "fp16"
    found = job.actor_train.training_args
    assert {key: getattr(found, key) for key in expected} == expected
    assert not [key for key in slime.left_out(done) if "fp16" in key or "loss_scale" in key or "loss-scale" in key]
    told = [notice.text for notice in job.notices if "training_args" in notice.path and "scale" in notice.path]
    assert not told or "loss_scale" in options


def test_options_of_the_loss_scale_without_fp16_are_left_out(tmp_path: Path) -> None:
    done = slime.converted(tmp_path, f"{DATA} --initial-loss-scale 65536")
    assert slime.left_out(done, "idle")["--initial-loss-scale"] == "bf16 has no loss scale here"
    job = slime.job_of(done, tmp_path)
    assert job.actor_train.model_args.dtype == "bf16"
    assert job.actor_train.strategy_args.strategy_config.grad_reduce_in_fp32 is None
