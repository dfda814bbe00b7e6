"""The shortened demo on one GPU with NCCL: training, checkpoint and resuming."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks import ROOT

NAME = "gpu-check"


def job(*changes: str) -> float:
    """Train with the demo's configuration; returns the seconds."""
    data = ROOT / "data" / "ledger" / "gpu-check"
    if not data.exists():
        subprocess.run([sys.executable, "examples/ledger/make_data.py", "--out", str(data)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "roll_batching.cli", "train", "--config", "configs/demo_grpo.yaml"]
    command += [f"exp_name={NAME}", "actor_train.device_mapping=[0]", "save_steps=1"]
    command += [f"actor_train.data_args.file_name={data}/prompts.jsonl"]
    command += [f"actor_train.data_args.eval_file_name={data}/heldout.jsonl"]
    command += [f"warmup.file_name={data}/corpus.jsonl", *changes]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return time.monotonic() - started


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "runs" / NAME / "metrics.jsonl").read_text().splitlines()]


def run(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    """Train a short warm-up and one step, then resume for one more step."""
    small = ["eval_steps=1", "eval_samples=32", f"warmup.training_args.max_steps={8 if dry else 40}"]
    small += ["rollout_batch_size=4", "actor_train.training_args.gradient_accumulation_steps=4"] if dry else []
    folder = ROOT / "runs" / NAME
    shutil.rmtree(folder, ignore_errors=True)
    first = job("max_steps=1", *small)
    before = rows()
    resumed = job("max_steps=2", "resume_from_checkpoint=true", *small)
    after = rows()
    shutil.rmtree(folder)
    figures = {"seconds, warm-up and one step": first, "seconds, one step after a restart": resumed}
    limits = {
        "rows lost by the restart": [sum(row not in after for row in before), 0],
        "steps missing": [2 - after[-1]["step"], 0],
    }
    case = f"demo on one {device.type} device"
    return [
        {"case": case, "figures": figures, "limits": limits, "notes": [row for row in after if row["phase"] == "rl"]}
    ]
