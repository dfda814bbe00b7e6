"""The proof by the hosts' functions, without a checkout: its figures, and what it says of planted differences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import Conversion
from roll_batching.tools.conversion.draft import KeptKey, LeftOut
from tests.campaigns.conversion_proof import compare, ours, samples, script_commands
from tests.campaigns.conversion_proof.prove import HOSTS, make_case
from tests.support.ranks import ROOT

pytestmark = pytest.mark.config
SCRIPT = """#!/bin/bash
set -e
rate=${RATE:-2e-6}
MODEL=(actor_rollout_ref.model.path=/m data.train_files=/d.parquet trainer.total_training_steps=200)
touch "$HOME/touched-by-the-script" made_here
pkill -9 python
kill -9 $$
DEVICE=$(python3 -c 'import torch_npu' && echo npu || echo gpu)
if [ "$DEVICE" = gpu ]; then
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${MODEL[@]}" \\
        actor_rollout_ref.actor.optim.lr=$rate actor_rollout_ref.rollout.n=4 \\
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "$@" 2>&1 | tee log.txt
fi
"""


def checkout_with(folder: Path, script: str = SCRIPT) -> Path:
    (folder / "examples").mkdir(exist_ok=True)
    (folder / "examples" / "run.sh").write_text(script)
    return folder


def test_bash_expands_a_script_and_runs_no_program(tmp_path):
    path = checkout_with(tmp_path) / "examples" / "run.sh"
    program, arguments = script_commands.training_arguments(path, HOSTS["verl"].is_program or str)
    assert program == "verl.trainer.main_ppo"
    assert arguments[-1] == "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "without those of the pipe"
    assert "actor_rollout_ref.actor.optim.lr=2e-6" in arguments and "data.train_files=/d.parquet" in arguments
    assert not (Path.home() / "touched-by-the-script").exists() and not list(path.parent.glob("made_here"))
    path.write_text('[ "$#" -ge 2 ] || exit 1\npython3 -m verl.trainer.main_ppo a=$1\n')
    with pytest.raises(script_commands.NoCommandError, match=r"run\.sh"):
        script_commands.training_arguments(path, HOSTS["verl"].is_program or str)


def test_groups_are_of_every_kind():
    rewards = np.array(samples.rewards_of(8, seed=3)).reshape(samples.GROUPS, 8)
    equal = rewards.max(1) == rewards.min(1)
    assert 10 <= equal.sum() < samples.GROUPS / 2
    assert ((rewards == 1).sum(1) == 1).any() and any(not set(row) <= {0.0, 1.0} for row in rewards)
    assert (np.repeat(equal, 8) >= samples.is_equal_group(8)).all() and samples.is_equal_group(8).any()
    assert samples.request_of(8, 3) == samples.request_of(8, 3) != samples.request_of(8, 4)


def figures_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    case = make_case(HOSTS["verl"], checkout_with(folder) / "examples" / "run.sh", 0, folder)
    return case, ours.figures(case.job, case.request["samples"], 200)


def test_our_figures_are_those_of_the_formulas(tmp_path):
    """The schedule, GRPO and PPO's clipped loss of the script, written down once more."""
    case, found = figures_of(tmp_path)
    step, batch = case.request["samples"]["step"], case.request["samples"]["batch"]
    assert found["batch.mini_batch"] == 1024 and found["batch.optimizer_steps"] == 4 and found["batch.group"] == 4
    assert found["learning_rates"] == [2e-6] * 800
    rewards = np.array(step["rewards"]).reshape(-1, 4)
    scaled = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    mask = np.arange(samples.RESPONSE) < np.array(step["lengths"])[:, None]
    assert np.array(found["advantages"]) == pytest.approx(scaled.reshape(-1, 1) * mask, abs=1e-9)
    mask = np.arange(samples.RESPONSE) < np.array(batch["lengths"])[:, None]
    ratio = np.exp(np.array(batch["log_probs"]) - np.array(batch["old_log_probs"]))
    advantages = np.array(batch["advantages"])[:, None]
    losses = np.maximum(-ratio * advantages, -ratio.clip(0.8, 1.2) * advantages)
    losses = np.where(advantages < 0, np.minimum(losses, -3.0 * advantages), losses)
    assert found["loss"] == pytest.approx((losses * mask).sum() / mask.sum(), rel=1e-6)
    assert np.abs(np.array(found["loss.gradient"])[~mask]).max() == 0 < np.abs(found["loss.gradient"]).max()


PLANTED: dict[str, Any] = {
    "learning_rates": lambda rates: [rate * (1 + 1e-3 * (number == 640)) for number, rate in enumerate(rates)],
    "advantages": lambda rows: [[value * 1.001 for value in row] for row in rows],
    "loss": lambda loss: loss * 1.001,
    "loss.gradient": lambda rows: [*rows[:-1], [value + 1e-4 for value in rows[-1]]],
    "batch.mini_batch": lambda size: size + 1,
    "batch.micro_batch": lambda _: None,
    "sampling.temperature": lambda value: value - 0.1,
    "sampling.top_k": lambda _: float("nan"),
    "batch.packed": lambda value: not value,
    "optimizer.betas": lambda betas: [betas[0], 0.95],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_and_has_no_reason(tmp_path, name):
    case, found = figures_of(tmp_path)
    assert [one.figure for one in compare.differences("f", found, found, case.conversion, 200)] == []
    host = {**found, name: PLANTED[name](found[name])}
    (one,) = compare.differences("f", host, found, case.conversion, 200)
    assert (one.figure, one.reason) == (name, "") and one.size > compare.TOLERANCE


def test_only_the_conversions_own_sentence_about_this_figure_is_a_reason():
    host, mine = {"validation.response_length": 16, "sampling.temperature": 0.5}, {"validation.response_length": 8}
    mine["sampling.temperature"] = 1
    said = Conversion("f", {})
    said.left_out.append(LeftOut("--eval-max-response-len", "is 16, more than the job's response_length 8", "refused"))
    said.changed.append(KeptKey("x", "actor_infer.generating_args.temperature", "another meaning"))
    found = {one.figure: one.reason for one in compare.differences("f", host, mine, said, 200)}
    assert "more than the job's" in found["validation.response_length"] and not found["sampling.temperature"]
    said.left_out[0] = LeftOut("--eval-max-response-len", "is not read", "idle")
    assert not next(iter(compare.differences("f", host, mine, said, 200))).reason


def test_a_schedule_may_move_inside_of_an_rl_step_only_towards_the_next():
    host = {"learning_rates": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]}
    mine = {"learning_rates": [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]}
    (one,) = compare.differences("f", host, mine, Conversion("f", {}), 3)
    assert one.figure == compare.WITHIN and one.reason
    mine["learning_rates"][3] = 2.1
    found = {one.figure: one.reason for one in compare.differences("f", host, mine, Conversion("f", {}), 3)}
    assert found["learning_rates"] == "" and found[compare.WITHIN]


def test_noise_of_equal_rewards_has_a_reason_and_a_limit():
    ours_zero = [[0.0]] * (4 * samples.GROUPS)
    noise = np.where(samples.is_equal_group(4)[:, None], 0.06, 0.0)
    for size, explained in ((1.0, True), (10.0, False)):
        host = {"advantages": (noise * size).tolist()}
        mine = {"advantages": ours_zero, "batch.group": 4}
        (one,) = compare.differences("f", host, mine, Conversion("f", {}), 200)
        assert one.figure == compare.EQUAL and bool(one.reason) == explained


@pytest.mark.parametrize("planted", [False, True])
def test_the_command_prints_a_table_and_ends_with_1_for_an_unexplained_difference(tmp_path, planted):
    """The process of the host is a program that answers with our own figures, one of them changed."""
    case, found = figures_of(tmp_path)
    figures = {**found, "batch.prompts": 7} if planted else found
    (tmp_path / "answers.json").write_text(json.dumps({"answers": [figures], "stand_ins": ["a_package"]}))
    host = tmp_path / "host"
    host.write_text(f"#!/bin/sh\ncat > {tmp_path}/requests.json\ncat {tmp_path}/answers.json\n")
    host.chmod(0o755)
    command = [sys.executable, ROOT / "scripts" / "prove_conversion.py", "--verl", tmp_path, "--python", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == int(planted), done.stdout + done.stderr
    assert "1 files compared" in done.stdout and "a_package" in done.stdout
    assert ("batch.prompts: 7 there, 1024 here" in done.stdout) == planted == ("WITHOUT A REASON" in done.stdout)
    (request,) = json.loads((tmp_path / "requests.json").read_text())
    assert request["samples"] == case.request["samples"] and "actor_rollout_ref.rollout.n=4" in request["arguments"]


def test_a_job_that_stops_at_its_first_step_is_a_difference(tmp_path):
    case, _ = figures_of(tmp_path)
    single = case.job.model_copy(update={"num_return_sequences_in_group": 1})
    found = ours.figures(single, samples.request_of(1, 0), 200)
    assert found["advantages"].startswith("stops: ")
    host = {"advantages": [[0.0]]}
    (one,) = compare.differences("f", host, found, case.conversion, 200)
    assert one.reason == "" and load_config(tmp_path / "job.yaml").group_size == 4
