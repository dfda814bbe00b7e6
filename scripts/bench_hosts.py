"""Compares micro-batches of verl, NeMo-RL, slime and ROLL with ours: `python scripts/bench_hosts.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.bench_hosts import main

if __name__ == "__main__":
    sys.exit(main())
