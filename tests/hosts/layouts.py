"""Compares a host's loss in a layout with the same on a plain model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2": {},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP 2": {"context_parallel_size": 2},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "VPP 2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP 1 to 2": {"max_cp_size": 2},
    "EP 2": {"expert_model_parallel_size": 2, "experts": True},
}


def cases(variants: list[str]) -> list[tuple[str, str, int]]:
    """(layout, variant, steps): the first variant everywhere and for ten steps, the others under data parallelism."""
    every = [(layout, variants[0], 10 if layout == "DP 2" else 2) for layout in LAYOUTS]
    return [*every, *(("DP 2", variant, 2) for variant in variants[1:])]


def check(host: str, layout: str, variant: str, steps: int, env: dict[str, str] | None = None) -> None:
    """Asserts that losses, gradients and log-probs are those of the plain model."""
    from tests.hosts.losses import batch
    from tests.support.models import worst_difference

    experts = bool(LAYOUTS[layout].get("experts"))
    options: dict[str, Any] = {"env": env, "fresh": True, "timeout": 400}
    (plain,) = run_ranks(1, "tests.hosts.losses:plainly", payload=(host, variant, experts, steps), **options)
    reports = run_ranks(2, "tests.hosts.losses:planned", payload=(host, variant, LAYOUTS[layout], steps), **options)
    for report in reports:
        worst, name = worst_difference({**report["gradients"], "spread": 0}, {**plain["gradients"], "spread": 0})
        assert worst < 2e-5, name
        assert report["spread"] < 1e-6
    by_rank = {report["rank"]: report for report in reports if report["last"]}
    for step in range(steps):
        total = sum(report["losses"][step] for report in by_rank.values())
        assert total == pytest.approx(plain["losses"][step], rel=1e-6, abs=1e-6 if step < 2 else 2e-5)
    # Adam's steps are of one size however small a gradient is: rounding of near-zero ones grows with every step.
    for name, limit in (("first_pass", 1e-6), ("last_pass", 1e-4)):
        for rows, log_probs in (report[name] for report in by_rank.values()):
            right = plain[name][rows]
            gap = (log_probs - right).abs() / right.abs().clamp(min=1.0) * batch()["attention_mask"][rows, 1:]
            assert float(gap.max()) < limit, name
