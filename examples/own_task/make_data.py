"""Write the data of the task: letters to be sorted, such as `cab=` with the answer `abc`.

    python examples/own_task/make_data.py

Three JSONL files: prompts for training and held-out prompts (`prompt`, `answer`; further keys are passed to the
reward), and documents for the supervised warm-up (`prompt`, `response`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/own_task"), help="folder for the three files")
    args = parser.parse_args()
    rng = random.Random(1)
    words: dict[str, None] = {}
    while len(words) < 9000:
        words["".join(rng.choices("abcdef", k=rng.randint(3, 12)))] = None
    everything = [(f"{word}=", "".join(sorted(word))) for word in words]
    prompts = [{"prompt": prompt, "answer": answer} for prompt, answer in everything]
    corpus = [{"prompt": prompt, "response": answer} for prompt, answer in everything[2256:]]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("heldout", prompts[:256]), ("prompts", prompts[256:2256]), ("corpus", corpus)):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} lines")


if __name__ == "__main__":
    main()
