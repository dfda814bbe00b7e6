"""Train the demo with three seeds and a control, or take existing runs, and print a verdict per run.

Checks: held-out reward starts below 0.5 and rises under GRPO by at least 0.25 on each seed and
0.30 on average; with shuffled advantages it rises by no more than 0.1; each evaluation holds 512 sampled
answers to problems that occur neither among the prompts nor in the corpus; in most batches the longest sample
is at least three times the mean; each run takes at most eight minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)
CONTROL_SEED = 1
START, RISE, MEAN_RISE, CONTROL_RISE = 0.5, 0.25, 0.30, 0.10
ANSWERS, TAIL, SECONDS = 512, 3.0, 8 * 60.0


def run_demo(name: str, seed: int, control: str) -> None:
    """Train once and record the seconds; the environment is installed before."""
    start = time.monotonic()
    command = [str(ROOT / "scripts/demo.sh"), "--seed", str(seed), "--control", control, "--name", name]
    if os.environ.get("INSTALL") == "no":
        command.append("--no-install")
    environment = dict(os.environ)
    if os.environ.get("INSTALL") == "no":
        environment["PYTHON"] = sys.executable
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit(f"the demo {name} failed; its output is above")
    (ROOT / "runs" / name / "seconds.json").write_text(json.dumps(time.monotonic() - start))


def rows_of(name: str) -> list[dict[str, Any]]:
    path = ROOT / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def unseen(seed: int) -> bool:
    """Whether no held-out problem occurs in the training data of this seed."""
    folder = ROOT / "data" / "ledger" / f"seed{seed}"

    def prompts(file: str) -> set[str]:
        return {json.loads(line)["prompt"] for line in (folder / file).read_text().splitlines()}

    held = prompts("heldout.jsonl")
    return len(held) >= ANSWERS and not held & (prompts("corpus.jsonl") | prompts("prompts.jsonl"))


def judge(name: str, seed: int, *, control: bool) -> tuple[float, bool]:
    """Print the figures of a run and the failed checks; returns its rise, and whether all checks hold."""
    rl = [row for row in rows_of(name) if row["phase"] == "rl"]
    evaluated = [row for row in rl if row.get("eval_reward") is not None]
    first, last = evaluated[0], evaluated[-1]
    before, after = first["eval_reward"], last["eval_reward"]
    rise = after - before
    tail = median(row["length_max_over_mean"] for row in rl)
    seconds = json.loads((ROOT / "runs" / name / "seconds.json").read_text())
    checks = {
        "evaluated before the first update and after the last": first["eval_updates"] == 0
        and last["eval_updates"] == last["step"] == rl[-1]["step"],
        f"{ANSWERS} answers per evaluation": all(row["eval_samples"] == ANSWERS for row in evaluated),
        "held-out problems unseen": unseen(seed),
        f"starts below {START}": before < START,
        f"at most {SECONDS / 60:.0f} minutes": seconds <= SECONDS,
        f"longest / mean at least {TAIL:g} in most batches": control or tail >= TAIL,
    }
    if control:
        checks[f"the control rises by at most {CONTROL_RISE}"] = rise <= CONTROL_RISE
    else:
        checks[f"rises by at least {RISE}"] = rise >= RISE
    bad = [text for text, holds in checks.items() if not holds]
    print(
        f"{name:<22} held-out {before:.3f} -> {after:.3f} ({rise:+.3f})  shows work "
        f"{first.get('eval_mark/shows_work', float('nan')):.0%} -> "
        f"{last.get('eval_mark/shows_work', float('nan')):.0%}  longest/mean {tail:.1f}  "
        f"{seconds / 60:.1f} min  {'OK' if not bad else 'FAILS: ' + '; '.join(bad)}",
        flush=True,
    )
    return rise, not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--judge-only", action="store_true", help="do not train, check existing runs/check-*")
    args = parser.parse_args()
    plan = [(f"check-seed{seed}", seed, "none") for seed in SEEDS]
    plan.append((f"check-seed{CONTROL_SEED}-shuffled", CONTROL_SEED, "shuffled"))
    if not args.judge_only:
        for name, seed, control in plan:
            run_demo(name, seed, control)
    print()
    verdicts = [judge(name, seed, control=control != "none") for name, seed, control in plan]
    mean = fmean(rise for (rise, _), (_, _, control) in zip(verdicts, plan, strict=True) if control == "none")
    fine = all(ok for _, ok in verdicts) and mean >= MEAN_RISE
    print(f"{'mean rise':<22} {mean:+.3f}  {'OK' if mean >= MEAN_RISE else f'FAILS: below {MEAN_RISE}'}")
    print("all holds" if fine else "not all holds")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
