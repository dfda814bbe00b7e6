"""The demo on one GPU under NCCL, shortened: it trains, saves, and goes on from what it saved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
NAME = "gpu-check"


def job(*changes: str) -> float:
    """One run of the demo's configuration; its seconds."""
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
    """Two steps in one go, and one step and one more after a restart."""
    small = ["eval_steps=2", "eval_samples=32", f"warmup.training_args.max_steps={8 if dry else 40}"]
    small += ["rollout_batch_size=4", "actor_train.training_args.gradient_accumulation_steps=4"] if dry else []
    folder = ROOT / "runs" / NAME
    shutil.rmtree(folder, ignore_errors=True)
    whole = job("max_steps=2", *small)
    expected = rows()
    shutil.rmtree(folder)
    job("max_steps=1", *small)
    resumed = job("max_steps=2", "resume_from_checkpoint=true", *small)
    found = rows()
    shutil.rmtree(folder)
    last, right = found[-1], expected[-1]
    figures = {
        "seconds, warm-up and two steps": whole,
        "seconds, one step after a restart": resumed,
        "loss, in one go": right["loss"],
        "loss, resumed": last["loss"],
        "rows": len(found),
    }
    limits = {"steps missing after a restart": [right["step"] - last["step"], 0]}
    return [{"case": f"demo on one {device.type} device", "figures": figures, "limits": limits, "notes": last}]
