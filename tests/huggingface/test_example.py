"""`examples/train_hf_model.sh` does what it says: from a model directory to one that transformers loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.observe.run_files import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "hf_model" / "config.yaml"
PUBLIC = sorted(ROOT / "examples" / name for name in ("gsm8k/config.yaml", "sft_chat/config.yaml", "dpo/config.yaml"))

pytestmark = pytest.mark.models


@pytest.mark.parametrize("file", [CONFIG, *PUBLIC, ROOT / "examples" / "gsm8k" / "cpu.yaml"], ids=str)
def test_its_settings_have_no_notices(file):
    assert load_config(file).notices == ()


@pytest.mark.slow
def test_the_public_examples_run_on_problems_of_our_own(tmp_path, report):
    """The commands of their page, on the CPU: GRPO raises the reward, supervised losses and pairs follow."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line.strip() for line in (ROOT / "examples" / "gsm8k" / "README.md").read_text().splitlines()]
    commands = [line for line in lines if line.startswith(("python ", "roll-batching "))]
    assert len(commands) == 4
    for command in commands:
        words = command.replace("roll-batching", "python -W ignore -m roll_batching").split()
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    rows = {name: read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("gsm8k_cpu", "sft_chat", "dpo")}
    rewards = [row["eval_reward"] for row in rows["gsm8k_cpu"] if row.get("eval_reward") is not None]
    assert rewards[-1] > rewards[0] + 0.3, rewards
    losses = {name: [row["eval_loss"] for row in rows[name] if row.get("eval_loss") is not None] for name in rows}
    assert losses["sft_chat"][-1] < 0.5 * losses["sft_chat"][0] and losses["dpo"][-1] < losses["dpo"][0]
    report(f"held-out reward {rewards[0]:.2f} to {rewards[-1]:.2f}; losses {losses['sft_chat']}, {losses['dpo']}")


@pytest.mark.slow
def test_the_script_makes_trains_writes_and_loads_a_model(report):
    command = [str(ROOT / "examples" / "train_hf_model.sh"), "--no-install"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=290, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = re.findall(r"(\d+)% digits", done.stdout)
    assert len(shares) == 2 and all(int(share) > 80 for share in shares)
    report(next(line for line in done.stdout.splitlines() if "digits" in line))
