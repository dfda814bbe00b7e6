"""Measure the fixed cost of a micro-batch in tokens: `fixed` of the planner's cost model.

    python benchmarks/bench_fixed.py --json benchmarks/fixed_cpu.json
    python benchmarks/bench_fixed.py --device cuda --workload qwen3-1.7b

The difference between training steps of one and of several equal micro-batches is the time of a micro-batch; costs per
step cancel. `fit_cost` fits the times of many sizes. On a CPU they are processor time of one thread, because other work
may share the machine. The fixed cost decides K in a pipeline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported, here and in the ranks

MORE = 5
"""Micro-batches of the longer step; the shorter step has one."""
REPEATS = 5
"""Timed steps of each kind; the fastest counts."""
SHAPES = ((32,), (32, 32), (128,), (64,) * 4, (256,), (32,) * 16, (512,), (128,) * 8, (1024,), (512,) * 4, (2048,))
"""Sequence lengths of the measured micro-batches at a cap of 2,560; scaled by `cap / 2560`."""


def seconds_of(strategy: Any, lengths: tuple[int, ...], count: int, device: str) -> float:
    """Seconds of a training step of `count` micro-batches of `lengths`."""
    import numpy as np
    import torch

    from roll_batching.losses import SFTLoss
    from roll_batching.planning import Plan
    from roll_batching.samples import SampleBatch

    sizes = np.tile(np.asarray(lengths, dtype=np.int64), count)
    total = int(sizes.sum())
    fields = {"input_ids": torch.arange(total) % 512, "response_mask": torch.ones(total, dtype=torch.bool)}
    batch = SampleBatch(torch.arange(len(sizes)), torch.from_numpy(sizes), fields, {name: "token" for name in fields})
    bins = [np.arange(len(sizes)).reshape(count, len(lengths)).tolist()]
    plan = Plan.from_bins(bins, sizes, strategy.constraints(), cost=strategy.cost)
    clock = time.perf_counter if device == "cuda" else time.process_time
    started = clock()
    strategy.train_step(batch, plan, SFTLoss())
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def measure(load: Any, device: str) -> dict[str, Any]:
    """Times of all shapes, and the fitted cost."""
    from benchmarks.bench_step import worker_config
    from roll_batching.planning import fit_cost
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(worker_config(load, "packed"), seed=1)
    strategy.initialize()
    shapes = [tuple(length * load.cap // 2560 for length in shape) for shape in SHAPES]
    for shape in shapes:
        seconds_of(strategy, shape, 1, device)  # warm-up
    times = []
    for shape in shapes:
        one, more = (min(seconds_of(strategy, shape, count, device) for _ in range(REPEATS)) for count in (1, MORE))
        times.append(max(more - one, 1e-9) / (MORE - 1))
        print(f"{sum(shape):>7} tokens in {len(shape):>2} sequences: {times[-1] * 1e3:8.2f} ms")
    cost = fit_cost(shapes, times)
    assumed = strategy.cost.fixed / strategy.cost.linear
    figures = {
        "fixed, milliseconds": cost.fixed / 1e15,
        "fixed, tokens": cost.fixed / cost.linear if cost.linear else None,
        "linear, microseconds per token": cost.linear / 1e12,
        "residual": cost.residual,
        "the job's own cost: fixed, tokens": assumed,
    }
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    return {"shapes": [{"lengths": list(s), "seconds": t} for s, t in zip(shapes, times, strict=True)], **figures}


def main() -> None:
    from benchmarks.bench_step import WORKLOADS
    from roll_batching.tools.doctor.machine import package_versions

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workload", choices=WORKLOADS, help="default: the workload named as the device")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.device == "cpu":
        import torch

        torch.set_num_threads(1)
    load = WORKLOADS[args.workload or args.device]
    result = measure(replace(load, longest=load.cap), args.device)
    report = {
        "workload": args.workload or args.device,
        "cores": os.cpu_count(),
        "versions": package_versions(),
        **result,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
