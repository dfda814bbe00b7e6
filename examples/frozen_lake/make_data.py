"""Write the prompts of the task: one line for each map, which the environment draws by the line's seed.

python examples/frozen_lake/make_data.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MAPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/frozen_lake"), help="folder for the file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "prompts.jsonl"
    lines = [{"prompt": ">", "seed": seed} for seed in range(MAPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines)} lines")


if __name__ == "__main__":
    main()
