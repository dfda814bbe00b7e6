"""Time one training step in each batching mode, on the samples of one workload.

    python benchmarks/bench_step.py --device cpu --json bench.json
    python benchmarks/bench_step.py --device cpu --check
    python benchmarks/bench_step.py --device cuda --json bench.json
    python benchmarks/bench_step.py --device cuda --workload qwen3-1.7b --modes packed --cap 16384

Every mode trains the same model from the same weights on the same mini-batches. Each runs in its own process, so that
peak memory is measured per mode. Tokens per second count real tokens, not padding. Losses of the modes are compared.

- padded: rows padded to the largest possible length, as many as the cap holds;
- padded_micro: eight rows at a time, in order, padded to the longest of them;
- dynamic: rectangles of sorted samples under the cap;
- packed: packs under the cap;
- packed_peer: packs as ROLL and NeMo-RL make them for a pipeline: every sequence a multiple of 2 x CP x TP, every pack
  as long as the longest, by modified first-fit-decreasing;
- equal_length: packs of sequences of one length, as many and as long as have the same tokens and the same model FLOPs:
  an upper bound for packed.

On CUDA the table also has MFU. `roll_batching/modeling/cost.py` has its formula, which does not count padding or
recomputation.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings
from roll_batching.tools.doctor.machine import package_versions

hide_known_warnings()  # before Megatron is imported, here and in the ranks

MODES = ("padded", "padded_micro", "dynamic", "packed", "packed_peer", "equal_length")
USUAL = ("padded", "dynamic", "packed")
OF_OTHER_SAMPLES = ("equal_length",)
"""Modes with other samples, whose losses are not compared."""
FASTER = {("packed", "padded"): 2.8, ("packed", "padded_micro"): 2.0, ("dynamic", "padded"): 2.3}
FASTER |= {("packed", "equal_length"): 1 / 1.10}
"""Limits of `--check`: smallest ratio of real tokens per second between two modes."""
HOST_SHARE = 0.01
"""Limit of `--check`: largest share of planning, packing and unpacking in a packed step."""


@dataclass(frozen=True)
class Workload:
    """A model and mini-batches, whose sample lengths depend on seed and step."""

    architecture: dict[str, Any]
    """Settings under `model_args.architecture`."""
    draw: Callable[[np.random.Generator, int], np.ndarray]
    """From a generator and a number of samples to int64 lengths."""
    samples: int
    longest: int
    cap: int
    warm_up: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings under `strategy_args.strategy_config`."""
    warm_up_samples: int | None = None
    """Samples of a warm-up step; None: as many as of a timed step."""

    def lengths(self, step: int, mode: str = "packed") -> np.ndarray:
        """int64 `[samples]`: lengths of a step, equal for all modes except `equal_length`. Timed steps start at 0."""
        lengths = self.draw(np.random.default_rng(abs(step)), self.samples)
        if step < 0:
            lengths = lengths[: self.warm_up_samples]
        if mode == "equal_length":
            total = int(lengths.sum())
            length = round(float((lengths.astype(float) ** 2).sum()) / total)
            return np.full(round(total / length), length)
        return lengths


def lognormal(median: float, sigma: float, shortest: int, longest: int) -> Callable[..., np.ndarray]:
    """Lengths clip(lognormal(median, sigma), shortest, longest)."""

    def draw(r: np.random.Generator, count: int) -> np.ndarray:
        return r.lognormal(np.log(median), sigma, count).clip(shortest, longest).astype(np.int64)

    return draw


def trl_lengths(r: np.random.Generator, count: int) -> np.ndarray:
    """Lengths of TRL's document on long completions: mean 1,597, at most 5,120, a tenth of the responses at 4,096."""
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
UNTIED = {**QWEN3, "tie_word_embeddings": False}
QWEN3_MOE = {**UNTIED, "moe": {"num_experts": 128, "router_topk": 8, "ffn_hidden_size": 768}}

WORKLOADS = {
    "cpu": Workload(decoder(128, 4, 4, 2, 352, 512), lognormal(96, 0.9, 8, 640), 64, 640, 2560, 2, 6),
    "trl": Workload(decoder(128, 4, 4, 2, 352, 512), trl_lengths, 256, 5120, 16384, 1, 1, warm_up_samples=16),
    "cuda": Workload(decoder(1024, 16, 16, 8, 2816, 32768), lognormal(2400, 0.9, 16, 16384), 64, 16384, 16384, 3, 8),
    "qwen3-1.7b": Workload(decoder(2048, 28, 16, 8, 6144, 151936, **QWEN3), trl_lengths, 64, 5120, 10240, 1, 3),
    # Layers of larger models, as many as one GPU of 80 GiB trains with AdamW.
    "qwen3-8b-layers": Workload(decoder(4096, 8, 32, 8, 12288, 151936, **UNTIED), trl_lengths, 64, 5120, 10240, 1, 3),
    "qwen3-30b-a3b-layers": Workload(
        decoder(2048, 4, 32, 4, 6144, 151936, **QWEN3_MOE), trl_lengths, 64, 5120, 10240, 1, 3
    ),
    "tiny": Workload(decoder(64, 2, 4, 2, 96, 512, **QWEN3), lognormal(40, 0.9, 8, 160), 8, 160, 480, 1, 1),
    "tiny-moe": Workload(
        decoder(64, 2, 4, 2, 96, 512, **UNTIED, moe={"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 32}),
        lognormal(40, 0.9, 8, 160),
        8,
        160,
        480,
        1,
        1,
    ),
}


def worker_config(load: Workload, mode: str) -> Any:
    from roll_batching.jobs.config import WorkerConfig

    rows = 8 if mode == "padded_micro" else max(1, load.cap // load.longest)
    architecture = {**load.architecture, "max_position_embeddings": load.longest}
    megatron = dict(load.settings)
    settings: dict[str, Any] = {
        "model_args": {"architecture": architecture},
        "training_args": {
            "learning_rate": 1e-4,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": max(1, load.samples // rows),
        },
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": megatron},
    }
    if mode == "padded":
        settings["padded_length"] = load.longest
    elif mode == "padded_micro":
        settings["padded_length"] = "longest"
    elif mode == "dynamic":
        settings["use_dynamic_batching_in_train"] = True
        settings["max_tokens_per_microbatch_in_train"] = load.cap
    else:
        settings["use_sequence_packing"] = True
        packing: dict[str, Any] = {"max_packed_sequence_length_train": load.cap}
        if mode == "packed_peer":
            packing["algorithm"] = "modified_first_fit_decreasing"
            settings["planning_args"] = {"sequence_multiple": "2*cp*tp"}
        settings["sequence_packing_args"] = packing
    return WorkerConfig.model_validate(settings)


def batch_of(load: Workload, step: int, mode: str = "packed") -> Any:
    import torch

    from roll_batching.samples import SampleBatch

    lengths = torch.from_numpy(load.lengths(step, mode))
    draw = torch.Generator().manual_seed(abs(step))
    count = int(lengths.sum())
    fields = {
        "input_ids": torch.randint(load.architecture["vocab_size"], (count,), generator=draw),
        "response_mask": torch.ones(count, dtype=torch.bool),
    }
    return SampleBatch(torch.arange(len(lengths)), lengths, fields, {name: "token" for name in fields})


def measure(load: Workload, mode: str, device: str) -> dict[str, Any]:
    """Train the steps of the workload in one mode and return its figures."""
    import torch

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import LengthTable
    from roll_batching.strategy import MegatronTrainStrategy

    steps = range(-load.warm_up, load.steps)
    batches = {step: batch_of(load, step, mode) for step in steps}
    strategy = MegatronTrainStrategy(worker_config(load, mode), seed=1)
    strategy.initialize()
    if strategy.device.type != device:
        raise SystemExit(f"--device {device} was asked for, and the model is on {strategy.device}")
    results, reports, started = [], [], 0.0
    for step in steps:
        if step == 0:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            results, reports, started = [], [], time.perf_counter()
        plan = strategy.plan(LengthTable.of(batches[step]))
        if mode == "packed_peer":
            plan = replace(plan, tokens=np.full_like(plan.tokens, plan.tokens.max()))
        results.append(strategy.train_step(batches[step], plan, SFTLoss()))
        reports.append(plan.report)
    if device == "cuda":
        torch.cuda.synchronize()
        peak, name = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    else:
        peak, name = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, processor()
    seconds = time.perf_counter() - started
    real, computed = sum(r.real_tokens for r in reports), sum(r.computed_tokens for r in reports)
    phases = {phase: sum(r.phases[phase] for r in results) / load.steps for phase in results[0].phases}
    useful = sum(r.flops for r in results) / seconds
    rate = results[0].device_rate
    return {
        "mode": mode,
        "useful_flops_per_second": useful,
        "mfu": None if rate is None else useful / rate,
        "phase_seconds_per_step": phases,
        "plan_seconds_per_step": phases["plan"],
        "pack_seconds_per_step": phases["pack"],
        "unpack_seconds_per_step": unpacking(batches[load.steps - 1], plan),
        "tokens_per_second": real / seconds,
        "peak_memory_bytes": peak,
        "seconds_per_step": seconds / load.steps,
        "real_tokens": real,
        "computed_tokens": computed,
        "padding_share": sum(r.padding_tokens for r in reports) / computed,
        "micro_batches": sum(r.num_micro_batches for r in reports),
        "losses": [r.loss for r in results],
        "device_name": name,
        "dtype": str(strategy.dtype).removeprefix("torch."),
    }


def unpacking(batch: Any, plan: Any) -> float:
    """Seconds to unpack one number per token into samples, as after a log-prob pass."""
    import torch

    from roll_batching.packing.batch import pack_step, unpack_results

    packs = pack_step(batch, plan, dp_rank=0, device=torch.device("cpu"))
    results = [torch.zeros(pack.layout.tokens, 1) for pack in packs]
    started = time.perf_counter()
    unpack_results(batch, plan, [pack.layout for pack in packs], results)
    return time.perf_counter() - started


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def check(results: list[dict[str, Any]]) -> bool:
    """Print the figures of `--check` with their limits; returns whether all hold."""
    by_mode = {r["mode"]: r for r in results}
    rows = []
    for (fast, slow), least in FASTER.items():
        found = by_mode[fast]["tokens_per_second"] / by_mode[slow]["tokens_per_second"]
        rows.append(
            (f"{fast}, real tokens per second in those of {slow}", f"at least {least:.2f}", found, found >= least)
        )
    packed = by_mode["packed"]
    host = sum(packed[f"{what}_seconds_per_step"] for what in ("plan", "pack", "unpack")) / packed["seconds_per_step"]
    rows.append(("plan, pack and unpack in a packed step", f"at most {HOST_SHARE:.2%}", host, host <= HOST_SHARE))
    print("\n| figure | asked | found | holds |\n|---|---|---|---|")
    for what, asked, found, holds in rows:
        shown = f"{found:.2%}" if "%" in asked else f"{found:.2f}"
        print(f"| {what} | {asked} | {shown} | {'yes' if holds else 'NO'} |")
    return all(holds for *_, holds in rows)


def shown(r: dict[str, Any]) -> str:
    share = {phase: seconds / r["seconds_per_step"] for phase, seconds in r["phase_seconds_per_step"].items()}
    return (
        f"{r['mode']:<12} {r['tokens_per_second']:>12,.0f} real tokens/s  {r['seconds_per_step']:.3f} s a step  "
        f"{r['padding_share']:>6.1%} padding  {r['peak_memory_bytes'] / 2**30:.2f} GiB peak"
        + (f"  {r['mfu']:.1%} MFU" if r["mfu"] else "")
        + "\n             "
        + ", ".join(f"{phase.replace('_', '-')} {part:.1%}" for phase, part in share.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--steps", type=int, help="timed steps per mode")
    parser.add_argument(
        "--workload", choices=WORKLOADS, help="default: the workload named as the device; with --check, trl"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, help=f"default: {' '.join(USUAL)}; with --check, all")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
    parser.add_argument("--cap", type=int, help="tokens of a micro-batch")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # set for the child process of a mode
    args = parser.parse_args()
    changes = {name: value for name in ("steps", "cap") if (value := getattr(args, name)) is not None}
    load = replace(WORKLOADS[args.workload or ("trl" if args.check else args.device)], **changes)
    if args.mode is not None:
        print(json.dumps(measure(load, args.mode, args.device)))
        return

    results = []
    for mode in args.modes or (MODES if args.check else USUAL):
        command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if child.returncode:
            raise SystemExit(f"mode {mode} failed; its output is above")
        results.append(json.loads(child.stdout.splitlines()[-1]))
        print(shown(results[-1]), flush=True)
    losses = np.array([r["losses"] for r in results if r["mode"] not in OF_OTHER_SAMPLES])
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
        "versions": package_versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.check and not check(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
