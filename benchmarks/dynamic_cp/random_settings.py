"""Random settings that no search was tuned on: kinds of lengths, numbers of ranks, caps, and layouts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.table import Table
from roll_batching.planning import FlopsCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.pack_times import PackTimes

KINDS = ("lognormal", "heavy tail", "two lengths", "all equal", "one giant")
SHAPE = {"num_layers": 16, "hidden_size": 2048, "num_query_groups": 8, "kv_channels": 128}
SEARCH_SECONDS = 10.0
"""Most CPU seconds of a plan; a search that has lost its bound takes minutes."""


@dataclass(frozen=True)
class RandomSetting:
    """A drawn layout, its times, and the lengths of a step."""

    kind: str
    lengths: np.ndarray
    constraints: PlanConstraints
    times: PackTimes


def draw_setting(seed: int, *, most_ranks: int = 512, most_sequences: int = 2048) -> RandomSetting:
    """The setting of a seed; every kind of lengths comes in turn."""
    random = np.random.default_rng([29, seed])
    kind = KINDS[seed % len(KINDS)]
    choices = [ranks for ranks in (4, 6, 8, 12, 16, 24, 48, 64, 96, 160, 512) if ranks <= most_ranks]
    ranks, cap = int(random.choice(choices)), int(random.choice((512, 4096, 8192, 16384)))
    tp_size, pp_size = int(random.choice((1, 2, 8))), int(random.choice((1, 1, 2, 4)))
    meeting = str(random.choice(("end", "end", "experts", "all")))
    constraints = PlanConstraints(
        dp_size=ranks,
        tp_size=tp_size,
        pp_size=pp_size,
        vpp_size=int(random.choice((1, 2))) if pp_size > 1 else 1,
        ep_size=2 if meeting == "experts" else 1,
        fully_sharded=meeting == "all" and pp_size == 1,
        max_tokens=cap,
        max_cp_size=ranks & -ranks,
    )
    count = int(random.integers(1, min(most_sequences, 24 * ranks) + 1))
    longest = constraints.usable_tokens
    lengths = {
        "lognormal": random.lognormal(np.log(cap / 4), 1.0, count),
        "heavy tail": cap / 20 * (1 + random.pareto(1.0, count)),
        "two lengths": np.where(random.random(count) < 0.1, longest, cap / 8),
        "all equal": np.full(count, random.integers(1, cap + 1)),
        "one giant": np.append(np.full(count - 1, cap / 16), longest),
    }[kind]
    cost = FlopsCost.from_model(
        **SHAPE, ffn_hidden_size=8192, num_attention_heads=16, vocab_size=32000, tp_size=tp_size
    )
    times = PackTimes.of_model(
        cost, **SHAPE, tp_size=tp_size, pp_size=pp_size, overlapped_exchange=bool(random.integers(2))
    )
    return RandomSetting(kind, lengths.clip(1, longest).astype(np.int64), constraints, times)


def plan_twice(setting: RandomSetting) -> tuple[Plan, float]:
    """A checked plan that a second call makes again, and the CPU seconds of that call."""
    lengths, constraints = setting.lengths, setting.constraints
    plan = plan_step(lengths, constraints, times=setting.times)
    start = time.process_time()
    again = plan_step(lengths, constraints, times=setting.times)
    seconds = time.process_time() - start
    assert plan == again, "two calls make different plans"
    assert Plan.from_dict(plan.to_dict()) == plan  # checks the invariants
    return plan, seconds


def random_settings(count: int) -> Table:
    """Predicted step times over the best single size in `count` settings, by kind of lengths."""
    table = Table(
        f"Step time over the best single size in {count} random settings",
        ["lengths", "settings", "mean", "smallest", "largest", "CPU seconds of the slowest plan"],
    )
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for seed in range(count):
        setting = draw_setting(seed)
        plan, taken = plan_twice(setting)
        report = plan.report
        if report.predicted_seconds and report.fixed_seconds:
            ratios.setdefault(setting.kind, []).append(report.predicted_seconds / report.fixed_seconds)
            seconds.setdefault(setting.kind, []).append(taken)
    for kind, values in ratios.items():
        shown = [f"{value:.3f}" for value in (np.mean(values), min(values), max(values))]
        table.add(kind, len(values), *shown, f"{max(seconds[kind]):.2f}")
        table.require(max(values) <= 1, f"{kind}: {max(values):.3f} of the best single size (at most 1)")
        table.require(max(seconds[kind]) <= SEARCH_SECONDS, f"{kind}: a plan takes at most {SEARCH_SECONDS:.0f} s")
    return table
