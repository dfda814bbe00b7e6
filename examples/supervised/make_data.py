"""Write the data of the supervised demos: letters to be sorted, `dcab=` with `abcd`, a few of them very many.

    python examples/supervised/make_data.py

Four files of JSON lines: texts (`prompt`, `response`) to learn from and others to measure with, and pairs (`prompt`,
`chosen`: the letters sorted, `rejected`: the same letters, two of them out of place) likewise. The number of letters
follows a clipped lognormal. With `--control` nothing can be learnt: responses belong to other prompts, and a coin
decides which of a pair's answers is the chosen one; the held-out files stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

LETTERS = "abcdefgh"
HELDOUT, TEXTS, PAIRS = 256, 6000, 4000


def drawn(rng: random.Random) -> str:
    """Letters, of which at least two differ."""
    count = min(48, max(3, round(math.exp(rng.gauss(math.log(9), 0.6)))))
    while len(set(word := "".join(rng.choices(LETTERS, k=count)))) < 2:
        pass
    return word


def with_a_fault(rng: random.Random, answer: str) -> str:
    """The answer with two different letters exchanged."""
    while True:
        one, two = rng.sample(range(len(answer)), 2)
        if answer[one] != answer[two]:
            letters = list(answer)
            letters[one], letters[two] = letters[two], letters[one]
            return "".join(letters)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/supervised"), help="folder for the four files")
    parser.add_argument("--control", action="store_true", help="training files from which nothing can be learnt")
    args = parser.parse_args()
    rng = random.Random(1)
    words: dict[str, None] = {}
    while len(words) < HELDOUT + TEXTS:
        words[drawn(rng)] = None
    texts = [{"prompt": f"{word}=", "response": "".join(sorted(word))} for word in words]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": with_a_fault(rng, row["response"])}
        for row in texts[: HELDOUT + PAIRS]
    ]
    if args.control:
        responses = [row["response"] for row in texts[HELDOUT:]]
        rng.shuffle(responses)
        for row, response in zip(texts[HELDOUT:], responses, strict=True):
            row["response"] = response
        for row in pairs[HELDOUT:]:
            if rng.random() < 0.5:
                row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    args.out.mkdir(parents=True, exist_ok=True)
    files = {
        "sft": texts[HELDOUT:],
        "sft_heldout": texts[:HELDOUT],
        "dpo": pairs[HELDOUT:],
        "dpo_heldout": pairs[:HELDOUT],
    }
    for name, rows in files.items():
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} lines")


if __name__ == "__main__":
    main()
