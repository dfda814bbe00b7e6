"""Batches of streams and queues: balance, fill, speed, and exact resuming.

    python benchmarks/bench_streams.py                       # all benchmarks, one table each
    python benchmarks/bench_streams.py --only balance        # one benchmark
    python benchmarks/bench_streams.py --check --trl PATH --cosmos_rl PATH    # exit 1 if a limit does not hold

Classes of other projects are called in this process, from a checkout. Times are CPU times.
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
"""Benchmarks by name: functions of the peers' checkouts that return a `Table`."""
PEERS = ("trl", "cosmos_rl")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit does not hold")
    parser.add_argument("--only", choices=FIGURES, action="append", help="benchmark to run; repeatable. Default: all")
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
