"""Rehearsed memory of a step against its measured memory on the device.

The rehearsal extrapolates from two and three layers without a GPU. The real step has all layers and its own process.
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
from roll_batching.tools.rehearsal.job import rehearse_job
from roll_batching.tools.rehearsal.rank import observe
from roll_batching.tools.rehearsal.task import RankTask

GIB = 1 << 30
CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, full recompute": {"recompute_granularity": "full"},
}
"""Cases with their settings under `strategy_config`."""


def job_of(load: Workload, megatron: dict[str, Any]) -> dict[str, Any]:
    """RL job with a reference, with the model and the caps of the workload."""
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
        "actor_infer": {"generating_args": {"max_tokens_in_cache": 8 * load.cap}},  # one GPU has no room for all
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
        rehearsal = rehearse_job(config_from_dict(plain), world_size=1, device=device.type)
        yield {"case": name, **compared(rehearsal, measured(plain, device.type))}


def compared(rehearsal: Any, measured_bytes: dict[str, float]) -> dict[str, Any]:
    figures = {
        "rehearsed GiB": rehearsal.worst.peak / GIB,
        "measured GiB": measured_bytes["allocated"] / GIB,
        "rehearsed GiB with margins": rehearsal.worst.need / GIB,
        "GiB in use on the device": measured_bytes["in use"] / GIB,
    }
    limits = {
        "rehearsed beside measured": [abs(rehearsal.worst.peak / measured_bytes["allocated"] - 1), 0.05],
        "in use beside rehearsed with margins": [measured_bytes["in use"] / rehearsal.worst.need, 1.0],
    }
    return {
        "figures": figures,
        "limits": limits,
        "notes": {"peak": rehearsal.worst.peak_phase, "kept": rehearsal.worst.report.kept},
    }


def measured(job: dict[str, Any], device: str) -> dict[str, float]:
    """Measured bytes of the same passes: of CUDA's allocator, or of the recorded storages on a CPU."""
    child = [sys.executable, "-m", "benchmarks.gpu.memory", json.dumps(job), device]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit("the measured step failed. Its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def main(job: str, device: str) -> None:
    from roll_batching.distributed.parallel_layout import start_processes

    start_processes()
    task = RankTask(config=config_from_dict(json.loads(job)), rank=0, world_size=1, device=device)  # type: ignore[arg-type]
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
