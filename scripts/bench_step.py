"""Time one training step in each batching mode, on the samples of one workload.

    python scripts/bench_step.py --device cpu --json bench.json
    python scripts/bench_step.py --device cuda --json bench.json

Every mode trains the same model from the same weights on the same mini-batches, in a process of its own, so that
peak memory is its own too. Tokens per second count real tokens: padding is work, not output. The losses of the
modes are compared, because a mode that is fast and wrong is no mode.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODES = ("padded", "dynamic", "packed")


@dataclass(frozen=True)
class Workload:
    """A model, and mini-batches with lengths clip(lognormal(median, sigma), shortest, longest)."""

    hidden_size: int
    num_layers: int
    heads: int
    query_groups: int
    ffn: int
    vocab: int
    samples: int
    median: float
    sigma: float
    shortest: int
    longest: int
    cap: int
    warm_up: int
    steps: int

    def lengths(self, step: int) -> np.ndarray:
        """int64 `[samples]`, the same for every mode."""
        draw = np.random.default_rng(step).lognormal(np.log(self.median), self.sigma, self.samples)
        return draw.clip(self.shortest, self.longest).astype(np.int64)


WORKLOADS = {
    "cpu": Workload(128, 4, 4, 2, 352, 512, 64, 96, 0.9, 8, 640, 2560, 2, 6),
    "cuda": Workload(1024, 16, 16, 8, 2816, 32768, 64, 2400, 0.9, 16, 16384, 16384, 3, 8),
}


def worker_config(load: Workload, mode: str) -> Any:
    from roll_batching.config import WorkerConfig

    rows = max(1, load.cap // load.longest)
    settings: dict[str, Any] = {
        "model_args": {
            "architecture": {
                "vocab_size": load.vocab,
                "hidden_size": load.hidden_size,
                "ffn_hidden_size": load.ffn,
                "num_layers": load.num_layers,
                "num_attention_heads": load.heads,
                "num_query_groups": load.query_groups,
                "max_position_embeddings": load.longest,
            }
        },
        "training_args": {
            "learning_rate": 1e-4,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": load.samples // rows,
        },
    }
    if mode == "padded":
        settings["padded_length"] = load.longest
    elif mode == "dynamic":
        settings["use_dynamic_batching_in_train"] = True
        settings["max_tokens_per_microbatch_in_train"] = load.cap
    else:
        settings["use_sequence_packing"] = True
        settings["sequence_packing_args"] = {"max_packed_sequence_length_train": load.cap}
    return WorkerConfig.model_validate(settings)


def batch_of(load: Workload, step: int) -> Any:
    import torch

    from roll_batching.data import SampleBatch

    lengths = torch.from_numpy(load.lengths(step))
    draw = torch.Generator().manual_seed(step)
    count = int(lengths.sum())
    fields = {
        "input_ids": torch.randint(load.vocab, (count,), generator=draw),
        "response_mask": torch.ones(count, dtype=torch.bool),
    }
    return SampleBatch(torch.arange(len(lengths)), lengths, fields, {name: "token" for name in fields})


def measure(load: Workload, mode: str, device: str) -> dict[str, Any]:
    """Train the workload's steps in one mode and report on them."""
    import torch

    from roll_batching.data import LengthTable
    from roll_batching.losses import SFTLoss
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(worker_config(load, mode), seed=1)
    strategy.initialize()
    if strategy.device.type != device:
        raise SystemExit(f"--device {device} was asked for, and the model is on {strategy.device}")
    losses, reports = [], []
    started = 0.0
    for step in range(load.warm_up + load.steps):
        if step == load.warm_up:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        batch = batch_of(load, step)
        plan = strategy.plan(LengthTable.of(batch))
        result = strategy.train_step(batch, plan, SFTLoss())
        losses.append(result.loss)
        reports.append(plan.report)
    if device == "cuda":
        torch.cuda.synchronize()
        peak, name = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    else:
        peak, name = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, processor()
    seconds = time.perf_counter() - started
    timed = reports[load.warm_up :]
    real, computed = sum(r.real_tokens for r in timed), sum(r.computed_tokens for r in timed)
    return {
        "mode": mode,
        "tokens_per_second": real / seconds,
        "peak_memory_bytes": peak,
        "seconds_per_step": seconds / load.steps,
        "real_tokens": real,
        "computed_tokens": computed,
        "padding_share": 1 - real / computed,
        "micro_batches": sum(r.num_micro_batches for r in timed),
        "losses": losses,
        "device_name": name,
        "dtype": str(strategy.dtype).removeprefix("torch."),
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    names = ("roll-batching", "torch", "megatron-core", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results into this file")
    parser.add_argument("--steps", type=int, help="timed steps per mode")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # what each child process is given
    args = parser.parse_args()
    load = WORKLOADS[args.device]
    if args.steps is not None:
        load = Workload(**(asdict(load) | {"steps": args.steps}))
    if args.mode is not None:
        print(json.dumps(measure(load, args.mode, args.device)))
        return

    results = []
    for mode in MODES:
        command = [sys.executable, __file__, "--device", args.device, "--mode", mode, "--steps", str(load.steps)]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            raise SystemExit(f"mode {mode} failed; its output is above")
        results.append(json.loads(child.stdout.splitlines()[-1]))
        r = results[-1]
        print(
            f"{mode:<8} {r['tokens_per_second']:>12,.0f} real tokens/s  {r['seconds_per_step']:.3f} s a step  "
            f"{r['padding_share']:>6.1%} padding  {r['peak_memory_bytes'] / 2**30:.2f} GiB peak"
        )
    losses = np.array([r["losses"] for r in results])
    gap = float((losses.max(0) / losses.min(0) - 1).max())
    print(f"largest relative difference of a step's loss between modes: {gap:.1e}")
    report = {
        "modes": results,
        "largest_relative_loss_difference": gap,
        "workload": asdict(load),
        "machine": {
            "device": results[0]["device_name"],
            "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default"),
            "platform": platform.platform(),
        },
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
