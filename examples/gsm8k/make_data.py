"""Write a tiny Qwen3 and word problems in GSM8K's form, for runs of two minutes on a CPU.

    python examples/gsm8k/make_data.py

`problems.jsonl` has forty problems, `heldout.jsonl` forty others (`question`, `answer` with `#### 7` at its end).
`chats.jsonl` has solutions as `messages`, `pairs.jsonl` a right (`chosen`) and a wrong (`rejected`) solution as whole
chats; no problem is in two files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.hf_model.make_model import CHARACTERS, write_model  # noqa: E402

NAMES = ("ada", "ben", "cleo", "dan", "eve", "finn", "gus", "hana")
THINGS = ("pens", "figs", "eggs", "keys", "cups", "maps")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"), help="folder for model and problems")
    args = parser.parse_args()
    write_model(args.out / "tiny-qwen3", CHARACTERS + "+=")
    problems, chats, pairs = [], [], []
    rng = random.Random(1)
    combinations = list(itertools.product(NAMES, THINGS, range(1, 9), range(1, 9)))
    rng.shuffle(combinations)
    for name, things, first, more in combinations:
        if (total := first + more) > 9:
            continue
        question = f"{name} has {first} {things} and gets {more} more. how many {things} now?"
        answer = f"{name} has {first}+{more}=<<{first}+{more}={total}>>{total} {things}.\n#### {total}"
        problems.append({"question": question, "answer": answer})
        user, wrong = {"role": "user", "content": question}, rng.choice([n for n in range(2, 10) if n != total])
        good, bad = (
            [user, {"role": "assistant", "content": f"{first}+{more}={end}"}] for end in (total, wrong)
        )  # fmt: skip
        chats.append({"messages": good})
        pairs.append({"chosen": good, "rejected": bad})
    files = {"problems": problems[:40], "heldout": problems[40:80], "chats": chats[80:1000], "pairs": pairs[1000:]}
    for name, rows in files.items():
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} lines")


if __name__ == "__main__":
    main()
