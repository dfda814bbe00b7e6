"""Write the data of the demo: running sums, answered directly or step by step.

    python examples/ledger/make_data.py --out data/ledger --seed 1

The prompt `a+9b+7c-4=` lists the entries of a ledger that starts at 0; the answer is its final total. A
*terse* response names the total at once, `#12`. A *worked* one carries it along, entry by entry, and then
names it: `a00+9=09;b09+7=16;c16-4=12;#12`. Both are correct; a small model learns only the worked form.
Totals stay between 0 and 99 and the number of entries follows a clipped lognormal, so that a few responses
are very long.

It writes three JSONL files, which are equal on every machine for equal arguments:

    corpus.jsonl    documents for the supervised warm-up: prompt, response
    prompts.jsonl   problems for reinforcement learning: prompt, answer, entries
    heldout.jsonl   held-out problems, none of them in the other two: prompt, answer, entries

The held-out problems have a fixed seed, so that runs with different seeds are evaluated on the same problems.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TAGS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = "0123456789+-=;#" + TAGS
HELDOUT_SEED = 1_000_003


class Problem(NamedTuple):
    """One ledger: the prompt, both responses, and the total."""

    prompt: str
    worked: str
    terse: str
    answer: str
    entries: int


def draw(rng: random.Random, fewest: int, most: int, median: float, sigma: float) -> Problem:
    """A random ledger of `fewest` to `most` entries (lognormal with this median and sigma, clipped)."""
    entries = min(most, max(fewest, round(math.exp(rng.gauss(math.log(median), sigma)))))
    total, prompt, work = 0, "", ""
    for tag in TAGS[:entries]:
        amount = rng.randint(1, 9)
        add = total < amount or (total + amount <= 99 and rng.random() < 0.6)
        before, total = total, total + amount if add else total - amount
        entry = f"{'+' if add else '-'}{amount}"
        prompt += tag + entry
        work += f"{tag}{before:02d}{entry}={total:02d};"
    answer = f"{total:02d}"
    return Problem(prompt + "=", f"{work}#{answer}", f"#{answer}", answer, entries)


def distinct(rng: random.Random, taken: set[str], args: argparse.Namespace) -> Iterator[Problem]:
    """Endless random problems whose prompts are not in `taken`."""
    while True:
        problem = draw(rng, args.fewest, args.most, args.median, args.sigma)
        if problem.prompt not in taken:
            yield problem


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} lines")


def as_question(problem: Problem) -> dict[str, object]:
    return {"prompt": problem.prompt, "answer": problem.answer, "entries": problem.entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/ledger"), help="folder for the three files")
    parser.add_argument("--seed", type=int, default=1, help="seed of the corpus and the prompts")
    parser.add_argument("--documents", type=int, default=60_000, help="lines of the corpus")
    parser.add_argument("--worked-share", type=float, default=0.35, help="share of documents that show their work")
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--fewest", type=int, default=5, help="entries of the shortest problem")
    parser.add_argument("--most", type=int, default=len(TAGS), help="entries of the longest problem (at most 26)")
    parser.add_argument("--median", type=float, default=3.0, help="of the lognormal before clipping")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the lognormal before clipping")
    args = parser.parse_args()
    if not 1 <= args.fewest <= args.most <= len(TAGS):
        parser.error(f"1 <= --fewest <= --most <= {len(TAGS)} must hold")

    held: dict[str, Problem] = {}
    for problem in distinct(random.Random(HELDOUT_SEED), set(), args):
        if len(held) == args.heldout:
            break
        held.setdefault(problem.prompt, problem)

    rng = random.Random(args.seed)
    source = distinct(rng, set(held), args)
    corpus: list[dict[str, object]] = []
    for _ in range(args.documents):
        problem, shows_work = next(source), rng.random() < args.worked_share
        corpus.append({"prompt": problem.prompt, "response": problem.worked if shows_work else problem.terse})
    prompts = [as_question(next(source)) for _ in range(args.prompts)]

    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "corpus.jsonl", corpus)
    write(args.out / "prompts.jsonl", prompts)
    write(args.out / "heldout.jsonl", [as_question(problem) for problem in held.values()])


if __name__ == "__main__":
    main()
