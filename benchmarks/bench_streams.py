"""Batches of streams and queues: how even, how full, how fast, and whether resuming is exact.

    python benchmarks/bench_streams.py                       # every figure, a table each
    python benchmarks/bench_streams.py --only balance        # one of them
    python benchmarks/bench_streams.py --check --trl PATH --cosmos_rl PATH    # exit 0 exactly when every limit holds

Other projects' own classes are called in this process, from a checkout's path. Times are CPU times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.streams.balance import balance
from benchmarks.streams.formation import formation
from benchmarks.streams.resume import resume

FIGURES = {"balance": balance, "formation": formation, "resume": resume}
"""By name, a function of the peers' checkouts that returns its `Table`."""
PEERS = ("trl", "cosmos_rl")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    parser.add_argument("--only", choices=FIGURES, action="append", help="a figure to look at, instead of all")
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, help=f"a checkout of {name}")
    arguments = parser.parse_args()
    peers = {name: path for name in PEERS if (path := getattr(arguments, name)) is not None}
    missed: list[str] = []
    for name in arguments.only or FIGURES:
        table = FIGURES[name](peers)
        table.show()
        missed += [f"{name}: {words}" for words in table.missed]
    print("\nall limits hold" if not missed else "\nmissed:\n  " + "\n  ".join(missed))
    sys.exit(1 if missed and arguments.check else 0)


if __name__ == "__main__":
    main()
