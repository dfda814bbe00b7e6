"""Runs the examples as their pages do: the data, then the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_example(name: str, folder: Path, *overrides: str) -> None:
    """The commands of `examples/NAME` in `folder`, where they leave their files."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        [f"examples/{name}/make_data.py"],
        ["-m", "roll_batching.cli", "train", "--config", f"examples/{name}/config.yaml", *overrides],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
