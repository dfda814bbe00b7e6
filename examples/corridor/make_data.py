"""Write the prompts of the task: every start and every other goal of the corridor, such as `1>3=`.

python examples/corridor/make_data.py
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/corridor"), help="folder for the file")
    args = parser.parse_args()
    walks = [
        {"prompt": f"{start}>{goal}=", "start": start, "goal": goal}
        for start, goal in itertools.permutations(range(5), 2)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "prompts.jsonl"
    path.write_text("".join(json.dumps(walk) + "\n" for walk in walks), encoding="utf-8")
    print(f"{path}: {len(walks)} lines")


if __name__ == "__main__":
    main()
