"""Predicted step times beside those that were recorded on an H100."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks import bench_step as bench
from roll_batching.planning import PlanConstraints
from roll_batching.settings import ArchitectureConfig
from roll_batching.tools.simulation import Scenario, simulate_plan

RESULTS = ROOT / "results" / "nvidia-h100-80gb-hbm3.json"
"""Recorded on today's lengths; the older file has others, which no code makes any more."""
WORKLOAD = "qwen3-1.7b"


@dataclass(frozen=True)
class Predicted:
    """Mean of the timed steps of one mode."""

    seconds: float
    seconds_with_padded_head: float
    """If the output head computed padding, as the layers do."""
    real_tokens: int
    """Of all timed steps."""
    computed_tokens: int


def predict(mode: str) -> Predicted:
    """Predicted steps in one mode."""
    load = bench.WORKLOADS[WORKLOAD]
    spec = bench.worker_config(load, mode).batching().train
    constraints = PlanConstraints.of(PlanConstraints(dp_size=1, max_tokens=1).dims, spec)
    scenarios = [
        Scenario(
            lengths=load.lengths(step),
            constraints=constraints,
            architecture=ArchitectureConfig.model_validate(load.architecture),
        )
        for step in range(load.steps)
    ]
    steps = [scenario.simulate() for scenario in scenarios]
    padded = [simulate_plan(step.plan, one.times) for step, one in zip(steps, scenarios, strict=True)]
    reports = [step.plan.report for step in steps]
    return Predicted(
        seconds=sum(step.seconds for step in steps) / load.steps,
        seconds_with_padded_head=sum(step.seconds for step in padded) / load.steps,
        real_tokens=sum(report.real_tokens for report in reports),
        computed_tokens=sum(report.computed_tokens for report in reports),
    )


def recorded_modes(file: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Recorded figures by mode. Seconds of the passes: forward, backward and loss, without the optimizer."""
    modes = json.loads(file.read_text())["checks"]["step"]["result"]["modes"]
    for one in modes:
        phases = one["phase_seconds_per_step"]
        one["seconds_of_passes"] = phases["forward_backward"] + phases["loss"]
    return {one["mode"]: one for one in modes}
