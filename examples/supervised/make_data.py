"""Write the data of the SFT and DPO demos: letters to sort, such as `dcab=` with the response `abcd`.

    python examples/supervised/make_data.py

Four JSONL files: texts (`prompt`, `response`) for training and held-out texts; pairs (`prompt`, `chosen`: the sorted
letters, `rejected`: two of them exchanged) likewise. The number of letters follows a clipped lognormal. With
`--control` nothing can be learned: responses are shuffled among prompts, and chosen and rejected are exchanged at
random. The held-out files do not change.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

LETTERS = "abcdefgh"
HELDOUT, TEXTS, PAIRS = 256, 6000, 4000


def draw_word(rng: random.Random) -> str:
    """Random letters, at least two of them different."""
    count = min(48, max(3, round(math.exp(rng.gauss(math.log(9), 0.6)))))
    while len(set(word := "".join(rng.choices(LETTERS, k=count)))) < 2:
        pass
    return word


def exchange_letters(rng: random.Random, answer: str) -> str:
    """`answer` with two different letters exchanged."""
    while True:
        one, two = rng.sample(range(len(answer)), 2)
        if answer[one] != answer[two]:
            letters = list(answer)
            letters[one], letters[two] = letters[two], letters[one]
            return "".join(letters)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/supervised"), help="folder for the four files")
    parser.add_argument("--control", action="store_true", help="training files from which nothing can be learned")
    args = parser.parse_args()
    rng = random.Random(1)
    words: dict[str, None] = {}
    while len(words) < HELDOUT + TEXTS:
        words[draw_word(rng)] = None
    texts = [{"prompt": f"{word}=", "response": "".join(sorted(word))} for word in words]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": exchange_letters(rng, row["response"])}
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
