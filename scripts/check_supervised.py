"""Train the SFT and DPO demos and a control of each, or take existing runs, and print a verdict per run.

Checks: SFT reduces the held-out loss from above 2 nats per token to below 0.1. DPO starts at a loss of log 2 and ranks
at least 95% of the held-out pairs correctly. On the control data, from which nothing can be learned, the held-out loss
stays above 0.8, and at most 65% of the pairs are ranked correctly. Held-out texts do not occur in the training data.
Each run takes at most five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = tuple((task, control) for task in ("sft", "dpo") for control in (False, True))
START, LEARNT, UNLEARNT = 2.0, 0.1, 0.8
RANKED, RANKED_CONTROL = 0.95, 0.65
SECONDS = 5 * 60.0


def name_of(task: str, control: bool) -> str:
    return f"check-{task}{'-control' if control else ''}"


def data_of(control: bool) -> Path:
    return Path("data") / ("supervised-control" if control else "supervised")


def run(task: str, control: bool) -> None:
    """Train once and record the seconds."""
    data, name = data_of(control), name_of(task, control)
    subprocess.run(
        [sys.executable, "examples/supervised/make_data.py", "--out", str(data), *(["--control"] if control else [])],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    start = time.monotonic()
    command = [sys.executable, "-m", "roll_batching.cli", task, "--config", f"configs/{task}_demo.yaml"]
    command += [f"exp_name={name}", f"actor_train.data_args.file_name={data}/{task}.jsonl"]
    command += [f"actor_train.data_args.eval_file_name={data}/{task}_heldout.jsonl"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"the run {name} failed; its output is above")
    (ROOT / "runs" / name / "seconds.json").write_text(json.dumps(time.monotonic() - start))


def unseen(task: str, control: bool) -> bool:
    """Whether no held-out prompt occurs in the training data."""
    files = [ROOT / data_of(control) / f"{task}{part}.jsonl" for part in ("", "_heldout")]
    trained, held = ({json.loads(line)["prompt"] for line in file.read_text().splitlines()} for file in files)
    return len(held) == 256 and not trained & held


def judge(task: str, control: bool) -> bool:
    """Print the figures of a run and the failed checks; returns whether all checks hold."""
    name = name_of(task, control)
    lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    evaluated = [row for row in rows if row.get("eval_loss") is not None]
    first, last = evaluated[0], evaluated[-1]
    before, after = first["eval_loss"], last["eval_loss"]
    seconds = json.loads((ROOT / "runs" / name / "seconds.json").read_text())
    checks = {
        "measured before the first update and after the last": first["eval_updates"] == 0
        and last["eval_updates"] == rows[-1]["step"],
        "held-out texts unseen": unseen(task, control),
        f"at most {SECONDS / 60:.0f} minutes": seconds <= SECONDS,
    }
    if task == "sft":
        checks[f"starts above {START}"] = before > START
        checks[f"ends above {UNLEARNT}" if control else f"ends below {LEARNT}"] = (
            after > UNLEARNT if control else after < LEARNT
        )
        figures = f"held-out loss {before:.3f} -> {after:.3f}"
    else:
        share = last["eval_reward_accuracy"]
        checks["starts at log 2"] = math.isclose(before, math.log(2), rel_tol=1e-4)
        limit = (
            f"at most {RANKED_CONTROL:.0%} ranked correctly" if control else f"at least {RANKED:.0%} ranked correctly"
        )
        checks[limit] = share <= RANKED_CONTROL if control else share >= RANKED
        figures = f"held-out loss {before:.3f} -> {after:.3f}, pairs ranked correctly {share:.0%}"
    bad = [text for text, holds in checks.items() if not holds]
    verdict = "OK" if not bad else "FAILS: " + "; ".join(bad)
    print(f"{name:<18} {figures:<58} {seconds / 60:.1f} min  {verdict}", flush=True)
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--judge-only", action="store_true", help="do not train, check existing runs/check-*")
    args = parser.parse_args()
    if not args.judge_only:
        for task, control in RUNS:
            run(task, control)
    print()
    fine = all([judge(task, control) for task, control in RUNS])
    print("all holds" if fine else "not all holds")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
