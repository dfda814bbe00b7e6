"""Writes docs/results.md and its picture from the files in results/, which scripts/gpu_checks.sh records."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs in a checkout that is not installed

from benchmarks.gpu.kernel_times import draw
from benchmarks.gpu.results import page, recorded_steps

if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(ROOT / "results"))
    if steps := recorded_steps(ROOT / "results"):
        draw(steps, ROOT / "docs" / "img" / "gpu_time.png")
