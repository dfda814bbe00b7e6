"""Predicted step times beside those that were recorded on an H100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks import bench_step as bench
from roll_batching.planning import PlanConstraints
from roll_batching.settings import ArchitectureConfig
from roll_batching.simulation import Scenario

RESULTS = ROOT / "results" / "nvidia-h100-80gb-hbm3.json"
"""Recorded on today's lengths; the older file has others, which no code makes any more."""
WORKLOAD = "qwen3-1.7b"


def predicted_seconds(mode: str) -> tuple[float, int, int]:
    """Predicted seconds of a step in one mode, and the real and computed tokens of all timed steps."""
    load = bench.WORKLOADS[WORKLOAD]
    spec = bench.worker_config(load, mode).batching().train
    constraints = PlanConstraints.of(PlanConstraints(dp_size=1, max_tokens=1).dims, spec)
    steps = [
        Scenario(
            lengths=load.lengths(step),
            constraints=constraints,
            architecture=ArchitectureConfig.model_validate(load.architecture),
        ).simulate()
        for step in range(load.steps)
    ]
    reports = [step.plan.report for step in steps]
    return (
        sum(step.seconds for step in steps) / load.steps,
        sum(report.real_tokens for report in reports),
        sum(report.computed_tokens for report in reports),
    )


def recorded_modes(file: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Recorded figures by mode. Seconds of the passes: forward, backward and loss, without the optimizer."""
    modes = json.loads(file.read_text())["checks"]["step"]["result"]["modes"]
    for one in modes:
        phases = one["phase_seconds_per_step"]
        one["seconds_of_passes"] = phases["forward_backward"] + phases["loss"]
    return {one["mode"]: one for one in modes}
