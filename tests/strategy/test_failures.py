"""A rank that dies in the middle of a step ends the job on all ranks within seconds, with the cause said last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ROOT

pytestmark = pytest.mark.bad_input

LAUNCH = """
import sys
from roll_batching.jobs.launch.local import launch
message = launch("tests.strategy.dying", sys.argv[1:], 4 if sys.argv[1] in ("block of ranks", "slices") else 2, {})
if message:
    sys.exit(message)
"""


@pytest.mark.parametrize(
    ("where", "how"),
    [
        pytest.param("forward", "raised", marks=pytest.mark.slow),
        pytest.param("backward", "raised", marks=pytest.mark.slow),
        ("backward", "killed"),
        pytest.param("optimizer step", "raised", marks=pytest.mark.slow),
        pytest.param("block of ranks", "killed", marks=pytest.mark.slow),
        pytest.param("block of ranks", "raised", marks=pytest.mark.slow),
        ("slices", "killed"),
        pytest.param("slices", "raised", marks=pytest.mark.slow),
    ],
)
def test_a_dying_rank_ends_the_job(where: str, how: str, tmp_path: Path, report: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCH, where, how, str(tmp_path)],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (tmp_path / "died").exists(), done.stdout + done.stderr
    seconds = time.time() - float((tmp_path / "died").read_text())
    last = done.stderr.rstrip().splitlines()[-1]
    assert done.returncode != 0
    cause = "signal 9 (SIGKILL)" if how == "killed" else f"died in the {where}"
    assert "rank 1" in last and cause in last
    others = [f"rank {rank}" for rank in (0, 2, 3)]
    assert not any(rank in done.stderr for rank in others) and "onnection" not in done.stderr, (
        "nothing of ranks that lost their peer"
    )
    assert seconds < 15
    report(f"a rank dies in the {where} ({how}): all ended after {seconds:.1f} s: {last}")
