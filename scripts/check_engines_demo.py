"""Train the engines demo under torchrun and on Ray with one server, and compare the rewards.

    python scripts/check_engines_demo.py                # about ten minutes on two cores
    python scripts/check_engines_demo.py max_steps=5    # name.path=value changes any setting of both
    python scripts/check_engines_demo.py --judge-only   # check existing runs

Two training ranks use one server of the tests, which implements SGLang's documented API. Checks: both runs have bitwise
equal rewards at every step, and the reward rises by at least 0.1 (mean of the last five steps minus mean of the first
five).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/grpo_engines_demo.yaml"
MODEL = "data/hf_model/tiny-qwen3"
CLI = ["-m", "roll_batching.cli", "train", "--config", CONFIG]
WAYS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *CLI],
    "ray": [*CLI, "--launcher", "ray", "--address", "local", "--nproc", "2"],
}
RISE, ENDS = 0.1, 5


def train(way: str, url: str, overrides: list[str]) -> None:
    words = [f"exp_name={name_of(way)}", f"actor_infer.engine_args.urls=[{url}]", *overrides]
    if subprocess.run([sys.executable, *WAYS[way], *words], cwd=ROOT).returncode:
        raise SystemExit(f"the run {name_of(way)} failed; its output is above")


def name_of(way: str) -> str:
    return f"check-engines-{way}"


def rewards(way: str) -> list[float]:
    lines = (ROOT / "runs" / name_of(way) / "metrics.jsonl").read_text().splitlines()
    return [row["reward"] for row in map(json.loads, lines) if row["phase"] == "rl"]


def judge() -> bool:
    """Print the figures of both runs and the failed checks; returns whether all checks hold."""
    torchrun, ray = rewards("torchrun"), rewards("ray")
    apart = max(abs(one - other) for one, other in zip(torchrun, ray, strict=True))
    first, last = (sum(part) / len(part) for part in (torchrun[:ENDS], torchrun[-ENDS:]))
    checks = {"the same rewards to the bit": torchrun == ray, f"they rise by at least {RISE}": last - first >= RISE}
    bad = [text for text, holds in checks.items() if not holds]
    print(
        f"{len(torchrun)} steps, reward {first:.3f} -> {last:.3f} (means of {ENDS} steps), torchrun and Ray at most "
        f"{apart:g} apart: {'OK' if not bad else 'FAILS: ' + '; '.join(bad)}"
    )
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="name.path=value")
    parser.add_argument("--judge-only", action="store_true", help="do not train, check existing runs/check-engines-*")
    arguments = parser.parse_args()
    if not arguments.judge_only:
        if not (ROOT / MODEL).exists():
            subprocess.run([sys.executable, "examples/hf_model/make_model.py"], cwd=ROOT, check=True)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.engines.server", MODEL], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            (url,) = json.loads(server.stdout.readline())
            for way in WAYS:
                train(way, url, arguments.overrides)
        finally:
            server.kill()
            server.wait()
    sys.exit(0 if judge() else 1)


if __name__ == "__main__":
    main()
