"""The limits of all benchmarks that run on a CPU: `./scripts/slow_suite.sh benchmarks` runs them one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "planner": ["--seeds", "1"],
    "planner_prefixes": [],
    "shared_prefixes": ["--device", "cpu"],
    "prefixes_behind": ["--device", "cpu"],
    "logprob": ["--device", "cpu"],
    "loss": ["--device", "cpu"],
    "step": ["--device", "cpu"],
    "simulation": [],
    "streams": [],
    "driver": [],
    "slices": ["--only", "planned"],  # processes that sleep or compute need a quiet machine
    "slices_compared": ["--only", "random", "--settings", "20"],
    "recurrent": ["--only", "step"],  # likewise
    "cp_steps": [],
    "dynamic_cp": [],
}
"""Arguments beside `--check`. `bench_hosts.py --check` needs checkouts of the hosts."""


@pytest.mark.slow
@pytest.mark.benchmarks
@pytest.mark.parametrize("name", COMMANDS)
def test_the_limits_hold(name, report):
    command = [sys.executable, f"benchmarks/bench_{name}.py", "--check", *COMMANDS[name]]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report(done.stdout[-1500:])


def test_every_benchmark_with_limits_has_a_turn():
    files = (path for path in (ROOT / "benchmarks").glob("bench_*.py") if '"--check"' in path.read_text())
    names = {path.stem.removeprefix("bench_") for path in files} | {
        "shared_prefixes",
        "prefixes_behind",
        "logprob",
        "loss",
    }
    assert names - {"hosts"} == set(COMMANDS)
