"""Host reads and kernel times of a training step."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.bench_step import WORKLOADS, Workload, batch_of, trl_lengths, worker_config
from benchmarks.gpu.kernel_times import kind_of
from roll_batching.losses import PolicyLoss, SFTLoss
from roll_batching.samples import LengthTable
from roll_batching.strategy import MegatronTrainStrategy
from roll_batching.tools.doctor.host_reads import count_host_reads

SMALL = replace(WORKLOADS["cuda"], draw=trl_lengths, samples=12, longest=5120, cap=10240)


def built(load: Workload, mode: str = "packed") -> MegatronTrainStrategy:
    strategy = MegatronTrainStrategy(worker_config(load, mode), seed=1)
    strategy.initialize()
    return strategy


def host_reads(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Host reads inside and outside Megatron's schedule, per training step and log-prob pass, in every mode."""
    load = WORKLOADS["tiny"] if dry else SMALL
    policy = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, entropy_coef=0.01)
    for mode in ("packed", "dynamic", "padded"):
        strategy = built(load, mode)
        batch = batch_of(load, 0)
        for name in ("advantages", "old_log_probs", "ref_log_probs"):
            kind = "sample" if name == "advantages" else "next_token"
            count = len(batch) if kind == "sample" else batch.num_tokens
            batch = batch.with_fields({name: torch.randn(count)}, {name: kind})
        plan = strategy.plan(LengthTable.of(batch))
        strategy.train_step(batch, plan, policy)
        for what in ("train_step", "compute_log_probs"):
            train = partial(strategy.train_step, batch, plan, policy)
            passes = train if what == "train_step" else partial(strategy.compute_log_probs, batch, plan)
            inside, around = count_host_reads(passes)
            yield {
                "case": f"{what}, {mode}, {plan.num_micro_batches} micro-batches",
                "figures": {"host reads around the schedule": sum(around.places.values())},
                "limits": {"host reads inside the schedule": [sum(inside.places.values()), 0]},
                "notes": {"inside": dict(inside.places), "around": dict(around.places)},
            }


def where_time_goes(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    """Profile a packed step of the 1.7B shape: time by kind of kernel, and idle time."""
    load = replace(WORKLOADS["tiny" if dry else "qwen3-1.7b"], warm_up=2)
    strategy = built(load)
    for step in range(load.warm_up):
        batch = batch_of(load, step)
        plan = strategy.plan(LengthTable.of(batch))
        strategy.train_step(batch, plan, SFTLoss())
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        started = time.perf_counter()
        result = strategy.train_step(batch, plan, SFTLoss())
        seconds = time.perf_counter() - started
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_kind: collections.Counter[str] = collections.Counter()
    by_name: collections.Counter[str] = collections.Counter()
    spans = []
    for event in kernels:
        length = event.time_range.end - event.time_range.start
        if event.is_user_annotation:
            continue
        by_kind[kind_of(event.name)] += length
        by_name[event.name[:90]] += length
        spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    begin = spans[0][0] if spans else 0.0
    busy, until, gaps = 0.0, begin, []
    for start, end in spans:
        if start > until:
            gaps.append((start - until, until - begin))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    gaps.sort(reverse=True)
    operators = sorted(profile.key_averages(group_by_input_shape=True), key=lambda e: -e.self_device_time_total)
    figures = {"seconds of the step": seconds, "share with a kernel running": busy / 1e6 / seconds}
    figures |= {f"{kind}, seconds": value / 1e6 for kind, value in by_kind.most_common()}
    figures["tokens"] = result.tokens
    figures["seconds from the first kernel to the last"] = (until - begin) / 1e6
    notes = {
        "longest gaps, seconds": [
            (length / 1e6, f"{at / 1e6:.3f} s after the first kernel") for length, at in gaps[:12]
        ],
        "kernels, seconds": {name: value / 1e6 for name, value in by_name.most_common(30)},
        "operators, seconds": {
            f"{e.key} {str(e.input_shapes)[:70]} x{e.count}": e.self_device_time_total / 1e6 for e in operators[:40]
        },
    }
    return [{"case": f"packed, {len(plan.lengths)} samples", "figures": figures, "limits": {}, "notes": notes}]
