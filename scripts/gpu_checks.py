"""Checks that need a GPU, recorded in results/<device>.json: `python scripts/gpu_checks.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.gpu.checks import main

if __name__ == "__main__":
    sys.exit(main())
