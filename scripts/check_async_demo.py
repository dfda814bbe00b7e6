"""Train the demo with asynchronous and with synchronous rollouts, and compare the runs.

    python scripts/check_async_demo.py                 # seed 1, about eight minutes on two cores
    python scripts/check_async_demo.py --seeds 1 2 3
    python scripts/check_async_demo.py --judge-only    # check existing runs

Checks per seed: held-out reward rises by at least 0.25 and ends at most 0.05 below that of the synchronous run after as
many samples; no sample exceeds the allowed staleness; both runs train on every prompt equally often; each run takes at
most five minutes (`--slack 3`: three times that, for a busy machine).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RISE, APART, SECONDS = 0.25, 0.05, 5 * 60.0
CONFIG = "configs/grpo_async_demo.yaml"


def run_demo(seed: int, ratio: int) -> None:
    """Train once; the two runs differ only in async_generation_ratio."""
    data, name = ROOT / "data" / "ledger" / f"seed{seed}", name_of(seed, ratio)
    if not (data / "heldout.jsonl").exists():
        subprocess.run([sys.executable, "examples/ledger/make_data.py", "--out", data, "--seed", str(seed)], cwd=ROOT)
    overrides = {
        "exp_name": name,
        "seed": seed,
        "async_generation_ratio": ratio,
        "rollout_samples": -1,
        "actor_train.data_args.file_name": data / "prompts.jsonl",
        "actor_train.data_args.eval_file_name": data / "heldout.jsonl",
        "warmup.file_name": data / "corpus.jsonl",
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    start = time.monotonic()
    command = [sys.executable, "-m", "roll_batching.cli", "train", "--config", CONFIG, *words]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f"the run {name} failed. Its output is above")
    (ROOT / "runs" / name / "seconds.json").write_text(json.dumps(time.monotonic() - start))


def name_of(seed: int, ratio: int) -> str:
    return f"check-async-seed{seed}" if ratio else f"check-async-seed{seed}-sync"


def lines_of(name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "runs" / name / file).read_text().splitlines()]


def judge(seed: int, slack: float) -> bool:
    """Print the figures of both runs and the failed checks; returns whether all checks hold."""
    names = {ratio: name_of(seed, ratio) for ratio in (0, 1)}
    rl = {
        ratio: [row for row in lines_of(name, "metrics.jsonl") if row["phase"] == "rl"] for ratio, name in names.items()
    }
    held = {ratio: [r["eval_reward"] for r in rows if r.get("eval_reward") is not None] for ratio, rows in rl.items()}
    drawn = {
        ratio: Counter(
            (line["step"], line["prompt"]) for line in lines_of(name, "rollouts.jsonl") if line["kind"] == "train"
        )
        for ratio, name in names.items()
    }
    seconds = {ratio: json.loads((ROOT / "runs" / name / "seconds.json").read_text()) for ratio, name in names.items()}
    rows, rise, apart = rl[1], held[1][-1] - held[1][0], held[1][-1] - held[0][-1]
    checks = {
        f"rises by at least {RISE}": rise >= RISE,
        f"no more than {APART} below the synchronous run": apart >= -APART,
        "as many steps": len(rl[0]) == len(rl[1]),
        "the same prompts in every step": drawn[0] == drawn[1] and bool(drawn[1]),
        "samples at most one step old": max(row["staleness_max"] for row in rows) == 1,
        "none dropped, the sampler never restarted": not any(
            r["dropped_samples"] or r["sampler_restarts"] for r in rows
        ),
        f"at most {SECONDS * slack / 60:g} minutes": max(seconds.values()) <= SECONDS * slack,
    }
    bad = [text for text, holds in checks.items() if not holds]
    print(
        f"seed {seed}  held-out {held[1][0]:.3f} -> {held[1][-1]:.3f} ({rise:+.3f}), synchronous {held[0][-1]:.3f} "
        f"({apart:+.3f})  {seconds[1] / 60:.1f} min, synchronous {seconds[0] / 60:.1f}  "
        f"{'OK' if not bad else 'FAILS: ' + '; '.join(bad)}",
        flush=True,
    )
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the time limit")
    parser.add_argument("--judge-only", action="store_true", help="do not train, check existing runs/check-async-*")
    arguments = parser.parse_args()
    if not arguments.judge_only:
        for seed in arguments.seeds:
            for ratio in (1, 0):
                run_demo(seed, ratio)
    fine = [judge(seed, arguments.slack) for seed in arguments.seeds]
    print("all holds" if all(fine) else "not all holds")
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
