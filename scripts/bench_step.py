"""Time one training step in each batching mode, on the samples of one workload.

    python scripts/bench_step.py --device cpu --json bench.json
    python scripts/bench_step.py --device cuda --json bench.json
    python scripts/bench_step.py --device cuda --workload qwen3-1.7b --modes packed --cap 16384

Every mode trains the same model from the same weights on the same mini-batches, in a process of its own, so that
peak memory is its own too. Tokens per second count real tokens: padding is work, not output. The losses of the
modes are compared, because a mode that is fast and wrong is no mode.

On CUDA the share of the device's arithmetic that was useful (MFU) is what the real tokens ask for, over the time that
the step took and the device's dense bf16 rate by its datasheet: 6 N per token, N the parameters that multiply (the
head counts, the input embedding does not), and 6 x layers x heads x head width x L^2 for the causal attention of a
sequence of L tokens. Recomputation and padding count nothing.
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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

MODES = ("padded", "dynamic", "packed")


@dataclass(frozen=True)
class Workload:
    """A model, and mini-batches of samples whose lengths a seed and the step decide."""

    architecture: dict[str, Any]
    """Settings under `model_args.architecture`."""
    draw: Callable[[np.random.Generator, int], np.ndarray]
    """From a generator and a number of samples to their lengths, int64."""
    samples: int
    longest: int
    cap: int
    warm_up: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings under `strategy_args.strategy_config`."""

    def lengths(self, step: int) -> np.ndarray:
        """int64 `[samples]`, the same for every mode."""
        return self.draw(np.random.default_rng(step), self.samples)


def lognormal(median: float, sigma: float, shortest: int, longest: int) -> Callable[..., np.ndarray]:
    """Lengths clip(lognormal(median, sigma), shortest, longest)."""

    def draw(r: np.random.Generator, count: int) -> np.ndarray:
        return r.lognormal(np.log(median), sigma, count).clip(shortest, longest).astype(np.int64)

    return draw


def trl_lengths(r: np.random.Generator, count: int) -> np.ndarray:
    """The lengths of TRL's document on long completions: mean 1,597, at most 5,120, a tenth of the answers at 4,096."""
    answers = r.lognormal(np.log(700), 0.9, count).clip(16, 4096)
    answers[r.random(count) < 0.1] = 4096
    prompts = r.lognormal(np.log(256), 0.43, count).clip(16, 1024)
    return answers.astype(np.int64) + prompts.astype(np.int64)


def decoder(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        **more,
    }


QWEN3 = {"kv_channels": 128, "qk_layernorm": True, "tie_word_embeddings": True, "rotary_base": 1e6}

WORKLOADS = {
    "cpu": Workload(decoder(128, 4, 4, 2, 352, 512), lognormal(96, 0.9, 8, 640), 64, 640, 2560, 2, 6),
    "cuda": Workload(decoder(1024, 16, 16, 8, 2816, 32768), lognormal(2400, 0.9, 16, 16384), 64, 16384, 16384, 3, 8),
    "qwen3-1.7b": Workload(decoder(2048, 28, 16, 8, 6144, 151936, **QWEN3), trl_lengths, 64, 5120, 10240, 1, 3),
    "tiny": Workload(decoder(64, 2, 4, 2, 96, 512, **QWEN3), lognormal(40, 0.9, 8, 160), 8, 160, 480, 1, 1),
}
BF16_RATE = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""FLOP per second, dense bf16, by the datasheets of the SXM parts."""


def worker_config(load: Workload, mode: str) -> Any:
    from roll_batching.config import WorkerConfig

    rows = max(1, load.cap // load.longest)
    architecture = {**load.architecture, "max_position_embeddings": load.longest}
    settings: dict[str, Any] = {
        "model_args": {"architecture": architecture},
        "training_args": {
            "learning_rate": 1e-4,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": load.samples // rows,
        },
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": load.settings},
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


def flops(load: Workload, lengths: np.ndarray) -> float:
    """What forward and backward passes over sequences of these lengths ask for; see the top of this file."""
    a = load.architecture
    hidden, heads, layers = a["hidden_size"], a["num_attention_heads"], a["num_layers"]
    width = a.get("kv_channels", hidden // heads)
    projections = hidden * width * (2 * heads + 2 * a["num_query_groups"])
    weights = layers * (projections + 3 * hidden * a["ffn_hidden_size"]) + hidden * a["vocab_size"]
    lengths = lengths.astype(np.float64)
    return float(6 * weights * lengths.sum() + 6 * layers * heads * width * (lengths**2).sum())


def batch_of(load: Workload, step: int) -> Any:
    import torch

    from roll_batching.data import SampleBatch

    lengths = torch.from_numpy(load.lengths(step))
    draw = torch.Generator().manual_seed(step)
    count = int(lengths.sum())
    fields = {
        "input_ids": torch.randint(load.architecture["vocab_size"], (count,), generator=draw),
        "response_mask": torch.ones(count, dtype=torch.bool),
    }
    return SampleBatch(torch.arange(len(lengths)), lengths, fields, {name: "token" for name in fields})


def measure(load: Workload, mode: str, device: str) -> dict[str, Any]:
    """Train the workload's steps in one mode and report on them."""
    import torch

    from roll_batching.data import LengthTable
    from roll_batching.losses import SFTLoss
    from roll_batching.strategy import MegatronTrainStrategy, infer

    batches = [batch_of(load, step) for step in range(load.warm_up + load.steps)]
    strategy = MegatronTrainStrategy(worker_config(load, mode), seed=1)
    strategy.initialize()
    if strategy.device.type != device:
        raise SystemExit(f"--device {device} was asked for, and the model is on {strategy.device}")
    losses, reports, packing = [], [], []
    started = planning = 0.0
    pack_inputs = infer.pack_inputs

    def timed_packing(*args: Any) -> Any:
        before = time.perf_counter()
        try:
            return pack_inputs(*args)
        finally:
            packing.append(time.perf_counter() - before)

    infer.pack_inputs = timed_packing
    for step in range(load.warm_up + load.steps):
        if step == load.warm_up:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            planning = 0.0
            packing.clear()
            started = time.perf_counter()
        batch = batches[step]
        before = time.perf_counter()
        plan = strategy.plan(LengthTable.of(batch))
        planning += time.perf_counter() - before
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
    useful = sum(flops(load, load.lengths(step)) for step in range(load.warm_up, load.warm_up + load.steps)) / seconds
    rate = next((rate for chip, rate in BF16_RATE.items() if chip in name), None)
    return {
        "mode": mode,
        "useful_flops_per_second": useful,
        "mfu": useful / rate if rate and device == "cuda" else None,
        "plan_seconds_per_step": planning / load.steps,
        "pack_seconds_per_step": sum(packing) / load.steps,
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
    parser.add_argument("--workload", choices=WORKLOADS, help="default: that of the device's name")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cap", type=int, help="tokens of a micro-batch")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # what each child process is given
    args = parser.parse_args()
    changes = {name: value for name in ("steps", "cap") if (value := getattr(args, name)) is not None}
    load = replace(WORKLOADS[args.workload or args.device], **changes)
    if args.mode is not None:
        print(json.dumps(measure(load, args.mode, args.device)))
        return

    results = []
    for mode in args.modes:
        command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            raise SystemExit(f"mode {mode} failed; its output is above")
        results.append(json.loads(child.stdout.splitlines()[-1]))
        r = results[-1]
        print(
            f"{mode:<8} {r['tokens_per_second']:>12,.0f} real tokens/s  {r['seconds_per_step']:.3f} s a step  "
            f"{r['padding_share']:>6.1%} padding  {r['peak_memory_bytes'] / 2**30:.2f} GiB peak"
            + (f"  {r['mfu']:.1%} MFU" if r["mfu"] else "")
        )
    losses = np.array([r["losses"] for r in results])
    gap = float((losses.max(0) / losses.min(0) - 1).max())
    print(f"largest relative difference of a step's loss between modes: {gap:.1e}")
    report = {
        "modes": results,
        "largest_relative_loss_difference": gap,
        "workload": {name: value for name, value in vars(load).items() if name != "draw"},
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
