"""What a rehearsal says a step needs, against what the step takes on the device.

Rehearsed where no device is seen, from two and three layers; then run for real, whole, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.bench_step import WORKLOADS, Workload
from roll_batching.jobs.config import config_from_dict
from roll_batching.rehearsal.job import rehearse_job
from roll_batching.rehearsal.rank import observe
from roll_batching.rehearsal.task import RankTask

GIB = 1 << 30
CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, full recompute": {"recompute_granularity": "full"},
}
"""And what they set under `strategy_config`."""


def job_of(load: Workload, megatron: dict[str, Any]) -> dict[str, Any]:
    """Reinforcement learning with a frozen reference on the workload's model, whose caps are the workload's."""
    model = {"architecture": {**load.architecture, "max_position_embeddings": load.longest}}
    batching = {
        "use_sequence_packing": True,
        "sequence_packing_args": {
            "max_packed_sequence_length_train": load.cap,
            "max_packed_sequence_length_forward": load.cap,
        },
    }
    return {
        "max_steps": 2,
        "prompt_length": load.longest // 5,
        "response_length": load.longest - load.longest // 5,
        "use_kl_loss": True,
        "actor_train": {
            "model_args": model,
            "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": 4},
            "strategy_args": {"strategy_config": megatron},
            **batching,
        },
        "reference": {"model_args": model, **batching},
    }


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    load = WORKLOADS["tiny" if dry else "qwen3-1.7b"]
    for name, megatron in CASES.items():
        plain = job_of(load, megatron)
        said = rehearse_job(config_from_dict(plain), world_size=1, device=device.type)
        yield {"case": name, **compared(said, measured(plain, device.type))}


def compared(said: Any, found: dict[str, float]) -> dict[str, Any]:
    figures = {
        "rehearsed GiB": said.worst.peak / GIB,
        "measured GiB": found["allocated"] / GIB,
        "rehearsed GiB with margins": said.worst.need / GIB,
        "GiB in use on the device": found["in use"] / GIB,
    }
    limits = {
        "rehearsed beside measured": [abs(said.worst.peak / found["allocated"] - 1), 0.05],
        "in use beside rehearsed with margins": [found["in use"] / said.worst.need, 1.0],
    }
    return {
        "figures": figures,
        "limits": limits,
        "notes": {"peak": said.worst.peak_phase, "kept": said.worst.report.kept},
    }


def measured(job: dict[str, Any], device: str) -> dict[str, float]:
    """Bytes that the same passes take, by the device's allocator (on a CPU: by the storages that were seen)."""
    child = [sys.executable, "-m", "benchmarks.gpu.memory", json.dumps(job), device]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit("the measured step failed; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def main(job: str, device: str) -> None:
    from roll_batching.distributed.parallel_layout import start_processes

    start_processes()
    task = RankTask(job=config_from_dict(json.loads(job)), rank=0, world_size=1, device=device)  # type: ignore[arg-type]
    report = observe(task, with_values=True)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found = {"allocated": torch.cuda.max_memory_allocated(), "in use": total - free}
    else:
        peak = max(peak.bytes for peak in report.peaks.values())
        found = {"allocated": peak, "in use": peak}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
