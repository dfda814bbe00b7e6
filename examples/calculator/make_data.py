"""Write the data of the task: sums of three numbers, such as `5+8+4=` with the answer `17`.

    python examples/calculator/make_data.py

Three JSONL files: prompts for training and held-out prompts (`prompt`, `answer`), and documents for the supervised
warm-up (`prompt`, `response`), which show how the calculator is called. One in three ends too early, so that RL has
something to improve.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path


def response(a: int, b: int, c: int, rng: random.Random) -> str:
    """A document's response: in two of three, both calls and the answer; else one that ends too early."""
    first = f"?{a}+{b};{a + b};"
    if rng.random() < 1 / 3:
        return f"{first}#{a + b}"
    return f"{first}?{a + b}+{c};{a + b + c};#{a + b + c}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/calculator"), help="folder for the three files")
    args = parser.parse_args()
    rng = random.Random(1)
    sums = list(itertools.product(range(1, 20), repeat=3))
    rng.shuffle(sums)
    prompts = [{"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)} for a, b, c in sums]
    corpus = [{"prompt": f"{a}+{b}+{c}=", "response": response(a, b, c, rng)} for a, b, c in sums[1128:]]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("heldout", prompts[:128]), ("prompts", prompts[128:1128]), ("corpus", corpus)):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} lines")


if __name__ == "__main__":
    main()
