"""Slices of packs beside all other ways to shorten a pipeline's step on as many GPUs, by simulation.

    python benchmarks/bench_slices_compared.py --check
    python benchmarks/bench_slices_compared.py --only workloads

Each way is planned as a job plans it and simulated as `roll-batching simulate` does: times of packs on H100s, and
stages that wait for each other as in the schedule that runs.

- whole packs: one context-parallel rank, Megatron's 1F1B;
- VPP 2 and 4: its interleaved schedule;
- CP c: c context-parallel ranks for all packs, 1 / c of the data-parallel ranks, c times the tokens of a pack;
- sizes per pack: a context-parallel size of each pack's own (`max_cp_size`);
- slices: `pipeline_slices: auto`.

Random: lengths, number of samples, cap, stages, ranks, tensor parallelism and model are drawn from a fixed seed. In one
layout "auto" must not be slower than whole packs. Beside other layouts, figures are reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.table import Table
from roll_batching.errors import PlanError
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.planning.pipeline.execution import execute_plan
from roll_batching.planning.problem import build_problem
from roll_batching.planning.simulated_step import pack_work, slice_work
from roll_batching.settings.model_cost import architecture_cost
from roll_batching.tools.simulation import Scenario, read_architecture
from roll_batching.tools.simulation.models import check_layout

SETTINGS, SEEDS = 60, 3
MODELS = {"qwen3-1.7b": (32, (1, 2)), "qwen3-8b": (32, (1, 2, 4)), "qwen3-32b": (64, (4, 8))}
"""Layers, which divide into the chunks of all layouts, and tensor-parallel sizes."""
KINDS = ("everyday", "wide", "tail", "two lengths", "equal")
CP_SIZES = (1, 2, 4)
"""Context-parallel sizes of layouts with model chunks, and with slices; alone also 8."""
WHOLE, VPP, CP, VPP_CP, PER_PACK = "whole packs", "VPP", "CP", "VPP + CP", "sizes per pack"
SLICES, SLICES_CP = "slices", "slices + CP"
FAMILIES = {(True, True): WHOLE, (False, True): CP, (True, False): VPP, (False, False): VPP_CP}
"""Families of whole packs, by (whether of one context-parallel rank, whether of one model chunk a stage)."""
OTHERS = (WHOLE, VPP, CP, VPP_CP, PER_PACK)


@dataclass(frozen=True)
class Way:
    """A way to run a step, as changes of a layout of whole packs."""

    family: str
    cp: int | str = 1
    chunks: int = 1
    slices: int | str = 1

    @property
    def name(self) -> str:
        """Name for tables, such as `VPP 2, CP 4`."""
        sizes = [f"VPP {self.chunks}"] * (self.chunks > 1) + [f"CP {self.cp}"] * (self.family.endswith("CP"))
        return ", ".join(sizes) or self.family

    def of(self, base: Scenario) -> Scenario:
        """The step on as many GPUs; each has as many tokens of a pack at most. Raises `PlanError`."""
        cap = (base.constraints.max_tokens or 0) * (self.cp if isinstance(self.cp, int) else 1)
        return base.vary({"cp": self.cp, "vpp": self.chunks, "slices": self.slices, "max_tokens": cap})


def ways() -> list[Way]:
    """All ways to run a step."""
    whole = [
        Way(FAMILIES[cp == 1, chunks == 1], cp, chunks)
        for cp, chunks in (*itertools.product(CP_SIZES, (1, 2, 4)), (8, 1))
    ]
    cut = [Way(SLICES if cp == 1 else SLICES_CP, cp, slices="auto") for cp in CP_SIZES]
    return [*whole, Way(PER_PACK, "dynamic"), *cut]


@dataclass(frozen=True)
class Step:
    """Predicted step of one way."""

    seconds: float
    """By simulation."""
    cost: float
    """By the costs and free transfers that plans are made with."""
    slices: float
    """Mean slices of a pack."""


def predict(scenario: Scenario) -> Step:
    """The predicted step. Raises `PlanError` where layout, model or lengths do not allow one."""
    shape, constraints, times = scenario.architecture, scenario.constraints, scenario.times
    check_layout(shape, constraints)
    plan = scenario.plan()
    work = pack_work(plan, times, head=6.0 * shape.hidden_size * shape.vocab_size)
    if plan.slices is not None:
        work = slice_work(plan, plan.slices, work, times, 0.0)
    seconds = _end(plan, work.forward, work.backward, work.transfer)
    cost = architecture_cost(shape, tp_size=constraints.tp_size, cp_size=constraints.cp_size)
    fixed = build_problem(scenario.lengths, constraints, cost=cost).fixed_cost
    units = (plan.costs if plan.slices is None else plan.slices.costs).astype(np.float64) + fixed
    slices = 1.0 if plan.slices is None else float(plan.slices.counts.mean())
    return Step(seconds, 0.0 if constraints.has_cp_per_pack else _end(plan, units, 2 * units, None), slices)


def _end(plan: Plan, forward: np.ndarray, backward: np.ndarray, transfer: np.ndarray | None) -> float:
    timeline = execute_plan(plan, forward, backward, transfer=transfer)
    return max(events[-1].end for of_rank in timeline for events in of_rank)


def predict_all(base: Scenario) -> dict[Way, Step]:
    """Steps of all ways that the layout, the model and the lengths allow."""
    steps = {}
    for way in ways():
        try:
            steps[way] = predict(way.of(base))
        except PlanError:
            continue  # too few ranks for the size, or samples that no rank's cap holds
    return steps


def best_by_family(seconds: Mapping[Way, float]) -> dict[str, Way]:
    """Fastest way of each family."""
    best: dict[str, Way] = {}
    for way in sorted(seconds, key=lambda one: seconds[one]):
        best.setdefault(way.family, way)
    return best


# ---- random settings


def draw_setting(seed: int) -> tuple[str, Scenario]:
    """(Name, step) of a seed; kinds of lengths come in turn."""
    random = np.random.default_rng([31, seed])
    kind, model = KINDS[seed % len(KINDS)], str(random.choice(list(MODELS)))
    layers, tensor_sizes = MODELS[model]
    stages, ranks, tp_size = (int(random.choice(sizes)) for sizes in ((2, 4, 8), (4, 8), tensor_sizes))
    cap, packs = int(random.choice((8192, 16384, 32768, 65536))), float(np.exp(random.uniform(np.log(3), np.log(12))))
    many = 8192
    lengths = {
        "everyday": random.lognormal(np.log(cap / 7), 0.9, many),
        "wide": random.lognormal(np.log(cap / 7), 1.4, many),
        "tail": cap / 20 * (1 + random.pareto(1.0, many)),
        "two lengths": np.where(random.random(many) < 0.1, cap, cap / 8),
        "equal": np.full(many, random.integers(cap // 16, cap + 1)),
    }[kind]
    lengths = lengths.clip(16, cap).astype(np.int64)
    lengths = lengths[: max(ranks, int(np.searchsorted(np.cumsum(lengths), packs * ranks * cap)))]
    constraints = PlanConstraints(
        dp_size=ranks, tp_size=tp_size, pp_size=stages, sequence_parallel=tp_size > 1, max_tokens=cap
    )
    shape = read_architecture(model).model_copy(update={"num_layers": layers})
    name = f"{seed}: {kind}, {len(lengths)} samples, cap {cap}, DP {ranks} x TP {tp_size} x PP {stages}, {model}"
    return name, Scenario(lengths=lengths, constraints=constraints, architecture=shape)


def random_settings(seeds: range, record: dict[str, Any]) -> tuple[Table, Table]:
    """Tables of (slices over whole packs of the same layout, slices over the best of other ways)."""
    results = {}
    for done, seed in enumerate(seeds, 1):
        name, scenario = draw_setting(seed)
        results[name] = predict_all(scenario)
        record[name] = {
            way.name + (", slices" * (way.slices != 1)): step.seconds for way, step in results[name].items()
        }
        print(f"{done} of {len(seeds)}", end="\r", file=sys.stderr, flush=True)
    return _same_layout(results), _all_ways(results)


def _same_layout(results: Mapping[str, Mapping[Way, Step]]) -> Table:
    table = Table(
        f"Step of auto slices over whole packs of the same layout, {len(results)} random settings",
        ["CP", "settings", "cut", "by planner's costs: worst", "by simulation: worst", "median", "best"],
    )
    for cp in CP_SIZES:
        pairs = {}
        for name, steps in results.items():
            of_size = {way.slices: step for way, step in steps.items() if way.cp == cp and way.chunks == 1}
            if len(of_size) == 2:
                pairs[name] = (of_size["auto"], of_size[1])
        planned = {name: cut.cost / whole.cost for name, (cut, whole) in pairs.items()}
        simulated = {name: cut.seconds / whole.seconds for name, (cut, whole) in pairs.items()}
        values = sorted(simulated.values())
        shown = [max(planned.values()), values[-1], float(np.median(values)), values[0]]
        is_cut = sum(cut.slices > 1 for cut, _ in pairs.values())
        table.add(cp, len(pairs), is_cut, *(f"{value:.3f}" for value in shown))
        for by, ratios in (("planner's costs", planned), ("simulation", simulated)):
            worst = max(ratios, key=lambda one: ratios[one])
            message = f"CP {cp}, by {by}: auto takes {ratios[worst]:.4f} of whole packs at worst ({worst})"
            if cp == 1 or by != "simulation":  # the planner knows no exchange of keys, which each slice repeats
                table.require(ratios[worst] <= 1 + 1e-9, message)
    return table


def _all_ways(results: Mapping[str, Mapping[Way, Step]]) -> Table:
    table = Table(
        f"Step over the best of whole packs, VPP, CP, both, and sizes per pack, {len(results)} random settings",
        ["", "worst", "median", "best", "settings in which it is faster"],
    )
    best = [
        {family: steps[way].seconds for family, way in best_by_family({w: s.seconds for w, s in steps.items()}).items()}
        for steps in results.values()
    ]
    others = [min(seconds[family] for family in OTHERS if family in seconds) for seconds in best]
    columns = {
        "slices": [seconds[SLICES] for seconds in best],
        "slices, with CP or without": [min(seconds[SLICES], seconds.get(SLICES_CP, np.inf)) for seconds in best],
    }
    for name, seconds in columns.items():
        ratios = sorted(one / other for one, other in zip(seconds, others, strict=True))
        faster = sum(ratio < 1 for ratio in ratios)
        table.add(name, *(f"{value:.3f}" for value in (ratios[-1], np.median(ratios), ratios[0])), faster)
    wins = Counter(min(seconds, key=lambda family: seconds[family]) for seconds in best)
    table.add("fastest of all: " + ", ".join(f"{family} {count}" for family, count in wins.most_common()), *[""] * 4)
    return table


# ---- workloads


@dataclass(frozen=True)
class Workload:
    """Lengths of a step."""

    name: str
    median: int
    sigma: float
    count: int
    longest: int
    cap: int

    def lengths(self, seed: int) -> np.ndarray:
        """int64[count]"""
        drawn = np.random.default_rng(seed).lognormal(np.log(self.median), self.sigma, self.count)
        return drawn.clip(16, self.longest).astype(np.int64)


WORKLOADS = (
    Workload("everyday, cap 16k", 2400, 0.9, 512, 16384, 16384),
    Workload("agents to 64k, cap 64k", 9000, 0.8, 256, 65536, 65536),
    Workload("tail to 128k, cap 128k", 6000, 1.3, 256, 131072, 131072),
    Workload("tail to 128k, cap 32k", 6000, 1.3, 256, 131072, 32768),
)
CLEAR = 0.01
"""Slices with CP count as "both" where they are faster by this share than slices and CP alone."""


def workloads(seeds: int, record: dict[str, Any]) -> Table:
    """Table of where slices, CP or both win."""
    families = (WHOLE, VPP, CP, VPP_CP, PER_PACK, SLICES, SLICES_CP)
    table = Table(
        f"Seconds of a step, 8B model, 8 data-parallel ranks at CP 1, mean of {seeds} draws, best sizes in brackets",
        ["samples", "PP", *families, "fastest"],
    )
    shape = read_architecture("qwen3-8b").model_copy(update={"num_layers": 32})
    for workload, stages in itertools.product(WORKLOADS, (4, 8)):
        constraints = PlanConstraints(dp_size=8, pp_size=stages, max_tokens=workload.cap)
        steps = [
            predict_all(Scenario(lengths=workload.lengths(seed), constraints=constraints, architecture=shape))
            for seed in range(seeds)
        ]
        everywhere = set.intersection(*(set(of_seed) for of_seed in steps))
        seconds = {way: float(np.mean([of_seed[way].seconds for of_seed in steps])) for way in everywhere}
        best = best_by_family(seconds)
        shown = []
        for family in families:
            way = best.get(family)
            sizes = "" if way is None or way.name == family else f" ({way.name})"
            shown.append("" if way is None else f"{seconds[way]:.2f}{sizes}")
        table.add(workload.name, stages, *shown, _winner({family: seconds[way] for family, way in best.items()}))
        print(table.rows[-1], file=sys.stderr, flush=True)
        record[f"{workload.name}, PP {stages}"] = {family: seconds[way] for family, way in best.items()}
    return table


def _winner(seconds: Mapping[str, float]) -> str:
    """Name of the fastest family; slices with CP must be clearly faster than both alone."""
    alone = {family: value for family, value in seconds.items() if family != SLICES_CP}
    name = min(alone, key=lambda family: alone[family])
    is_both = seconds.get(SLICES_CP, np.inf) < (1 - CLEAR) * alone[name]
    return "both" if is_both else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with --check the exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("random", "workloads"), help="one of the two comparisons")
    parser.add_argument("--settings", type=int, default=SETTINGS, help="number of random settings")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them; others are other settings")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of each workload's lengths")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    hide_known_warnings()
    record: dict[str, Any] = {}
    tables: list[Table] = []
    if options.only != "workloads":
        tables += random_settings(range(options.first, options.first + options.settings), record)
    if options.only != "random":
        tables.append(workloads(options.seeds, record))
    for table in tables:
        table.show()
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
    return int(options.check and any(table.missed for table in tables))


if __name__ == "__main__":
    sys.exit(main())
