"""Writes docs/results.md from the files in results/, which scripts/gpu_checks.sh records."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs in a checkout that is not installed

from benchmarks.gpu.results import page

if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page(ROOT / "results"))
