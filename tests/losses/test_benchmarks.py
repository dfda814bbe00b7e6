"""The benchmarks of the loss path run, agree with the plain formulas and count memory right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.measure import LiveBytes
from tests.support.ranks import ROOT

pytestmark = pytest.mark.loss


@pytest.mark.parametrize("name, cases", [pytest.param("bench_logprob", 6, marks=pytest.mark.slow), ("bench_loss", 2)])
def test_the_benchmark_runs_and_its_gradients_agree(name: str, cases: int, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--device", "cpu", "--rounds", "1", "--json", str(file)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    subprocess.run(
        [*command, "--tokens", "300", "--vocabulary", "1500"], cwd=ROOT, env=environment, check=True, timeout=170
    )
    found = json.loads(file.read_text())
    assert len(found["cases"]) == cases and {"torch", "cores", "clock"} <= set(found["environment"])
    compared = [v for case in found["cases"] for k, v in case["limits"].items() if "difference" in k]
    assert compared and all(value <= limit for value, limit in compared)


def test_live_bytes_count_what_is_alive_at_once() -> None:
    older = torch.zeros(1000)
    with LiveBytes() as live:
        a = older[10:] * 1  # a view of older memory counts nothing
        b = a + 1
        del a
        c = torch.empty(500)
        c.copy_(b[:500])
    assert live.peak == 2 * 990 * 4
    assert live.now == 990 * 4 + 500 * 4
