"""Run abuses of a job of two processes: every failure must be reported once and in time.

    python scripts/abuse.py                     # all abuses: about an hour on two idle cores
    python scripts/abuse.py --only reward       # abuses whose names contain the word
    python scripts/abuse.py --part 2/3          # every third of the selected abuses, from the second on
    python scripts/abuse.py --json out.json

Each abuse has its own job: a small copy of examples/own_task, started from the command line. Exits 0 if every job ends
with the expected exit code, in time, with one message that has the expected text, leaves no process alive and loses no
data; otherwise 1. `--slack 2` doubles the time limits for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.campaigns.abuse.cases import CASES
from tests.campaigns.abuse.runner import Abuse, Outcome, carry_out


def tabulate(outcomes: Sequence[Outcome], shorten: str) -> Table:
    """Table with one row per abuse; the path `shorten` is abbreviated in messages."""
    table = Table(title="A job of two processes, abused", show_lines=False)
    for heading in ("abuse", "exit", "seconds", "first line of the message", "verdict"):
        right = heading in ("exit", "seconds")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for outcome in outcomes:
        code = "-" if outcome.code is None else str(outcome.code)
        message = outcome.message.replace(shorten, "...")
        message = message if len(message) <= 160 else message[:157] + "..."
        style = "" if outcome.verdict == "ok" else "yellow" if outcome.fine else "red"
        verdict = outcome.verdict.replace(shorten, "...")
        table.add_row(
            escape(outcome.abuse), code, f"{outcome.seconds:.1f}", escape(message), escape(verdict), style=style
        )
    return table


def _part(text: str) -> slice:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return slice(number - 1, None, count)


def main(arguments: Sequence[str] | None = None, cases: Sequence[Abuse] = CASES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="select abuses whose names contain this word")
    parser.add_argument(
        "--part",
        default="1/1",
        type=_part,
        metavar="NUMBER/COUNT",
        help="run every COUNT-th abuse, from NUMBER on",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes to this file")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on time limits, for a busy machine")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases if args.only is None or args.only.lower() in case.name.lower()]
    chosen = chosen[args.part]
    if not chosen:
        parser.error(f"no abuse has {args.only!r} in its name")
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    begun, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="abuse-") as folder:
        for number, case in enumerate(chosen):
            outcome = carry_out(case, Path(folder, f"{number:02d}"), args.slack)
            outcomes.append(outcome)
            print(f"{case.name}: {outcome.verdict} ({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)
        console.print(tabulate(outcomes, folder))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    wrong = [outcome for outcome in outcomes if not outcome.fine]
    skipped = [outcome for outcome in outcomes if outcome.fine and outcome.verdict != "ok"]
    print(
        f"{len(outcomes)} of {len(cases)} abuses in {time.monotonic() - begun:.0f} s: "
        f"{len(outcomes) - len(wrong) - len(skipped)} ok, {len(skipped)} skipped, {len(wrong)} wrong"
    )
    return 1 if wrong else 0
