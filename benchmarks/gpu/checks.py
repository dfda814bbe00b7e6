"""Everything that only a GPU can show, in one command and one file.

    scripts/gpu_checks.sh                     on one H100 or H200, about ten minutes
    python scripts/gpu_checks.py --dry        everything tiny, on the CPU: does the command itself work?
    python scripts/gpu_checks.py --only attention,equality

The file (results/<device>.json) is written anew after every check, so that a run that is cut off leaves what it had.
Each check runs in a process of its own under a time limit; one that fails is recorded with its last words, and the
others go on. `python scripts/results_page.py` makes docs/results.md of all files in results/. Exits 1 when a check
failed or a limit was broken.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT

Case = dict[str, Any]
"""{"case": name, "figures": {name: number}, "limits": {name: [value, at most]}, "notes": anything}."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One entry of the file."""

    name: str
    what: str
    seconds: float
    """Its process is killed after this time."""
    function: str | None = None
    """`module:function(device, dry) -> an iterable of cases`, called in a fresh process."""
    command: Callable[[Path, bool], list[str]] | None = None
    """Or a script that writes JSON to this path; what it wrote is recorded."""


def benchmark(name: str, *full: str, dry: Sequence[str] = ()) -> Callable[[Path, bool], list[str]]:
    def command(out: Path, is_dry: bool) -> list[str]:
        options = ["--device", "cpu", *dry] if is_dry else ["--device", "cuda", *full]
        return [sys.executable, f"benchmarks/{name}", "--json", str(out), *options]

    return command


TINY = ("--workload", "tiny")
QWEN = ("--workload", "qwen3-1.7b")
SHORT = ("--tokens", "256", "--vocabulary", "1024", "--rounds", "1")

CHECKS = (
    Check(
        name="attention",
        what="Attention backends against attention in fp32, outputs and gradients",
        seconds=120,
        function="benchmarks.gpu.attention:run",
    ),
    Check(
        name="equality",
        what="Losses, gradients, log-probs, generation and training steps on CUDA against the CPU",
        seconds=240,
        function="benchmarks.gpu.equality:run",
    ),
    Check(
        name="step",
        what="One optimizer step of the Qwen3-1.7B shape on TRL's lengths: padded, dynamic, packed",
        seconds=300,
        command=benchmark("bench_step.py", *QWEN, dry=TINY),
    ),
    Check(
        name="memory",
        what="Rehearsed memory against what the step takes",
        seconds=240,
        function="benchmarks.gpu.memory:run",
    ),
    Check(
        name="demo",
        what="The demo under NCCL on one GPU, shortened, saved and resumed",
        seconds=300,
        function="benchmarks.gpu.demo:run",
    ),
    Check(
        name="host_reads",
        what="Host reads inside Megatron's schedule",
        seconds=120,
        function="benchmarks.gpu.step:host_reads",
    ),
    Check(
        name="where_time_goes",
        what="Where a packed step of the Qwen3-1.7B shape spends its time",
        seconds=150,
        function="benchmarks.gpu.step:where_time_goes",
    ),
    Check(
        name="logprob",
        what="Log-probs and entropies against the plain path",
        seconds=90,
        command=benchmark("bench_logprob.py", dry=SHORT),
    ),
    Check(
        name="loss",
        what="A policy loss on one pack against a loop over its sequences",
        seconds=90,
        command=benchmark("bench_loss.py", dry=SHORT),
    ),
)


def machine() -> dict[str, Any]:
    """Device, versions and commit, without importing torch into this process."""
    names = ("roll-batching", "torch", "triton", "megatron-core", "numpy", "transformer-engine", "flash-attn")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {
        "gpus": gpus,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "versions": versions,
        "commit": os.environ.get("GPU_CHECKS_COMMIT") or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit that is checked out, with a + when files differ from it."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_here(check: Check, out: Path, dry: bool) -> None:
    """In the check's own process: call it and write its cases."""
    import torch

    from roll_batching.distributed.parallel_layout import start_processes

    assert check.function is not None
    module, function = check.function.split(":")
    device = start_processes()
    if not dry and device.type != "cuda":
        raise SystemExit("no GPU is visible: --dry runs everything tiny on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    cases: list[Case] = []
    for case in getattr(importlib.import_module(module), function)(device, dry):
        cases.append(case)  # written one by one: what a time limit cuts off is not lost
        out.write_text(json.dumps({"cases": cases}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def perform(check: Check, dry: bool) -> dict[str, Any]:
    """What is recorded of a check: its status, its cases, and its last words when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        if check.command is not None:
            command = check.command(out, dry)
        else:
            command = [sys.executable, "-m", "benchmarks.gpu.checks", "--inside", check.name, "--out", str(out)] + [
                "--dry"
            ] * dry
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment["PYTHONWARNINGS"] = "ignore"
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
        started = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
            try:
                status = "ok" if child.wait(check.seconds) == 0 else f"exit code {child.returncode}"
            except subprocess.TimeoutExpired:
                status = f"not done after {check.seconds:g} s"
            finally:
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                child.wait()
        record: dict[str, Any] = {"what": check.what, "status": status, "seconds": time.monotonic() - started}
        if out.exists():
            record["result"] = json.loads(out.read_text())
        if status != "ok":
            record["last words"] = log.read_text(errors="replace")[-6000:]
    return record


def broken(record: dict[str, Any]) -> list[str]:
    """Limits that a check's figures do not keep."""
    return [
        f"{case['case']}: {name} is {value:.3g}, at most {limit:g} is right"
        for case in record.get("result", {}).get("cases", [])
        for name, (value, limit) in case["limits"].items()
        if not value <= limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file; default: results/<device>.json")
    parser.add_argument("--dry", action="store_true", help="everything tiny on the CPU")
    parser.add_argument("--only", help="names of checks, separated by commas; others stay as the file has them")
    parser.add_argument("--inside", choices=[c.name for c in CHECKS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        run_here(next(c for c in CHECKS if c.name == given.inside), given.out, given.dry)
        return 0
    names = given.only.split(",") if given.only else [c.name for c in CHECKS]
    if unknown := set(names) - {c.name for c in CHECKS}:
        parser.error(f"no such checks: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CHECKS)}")
    here = machine()
    if not here["gpus"] and not given.dry:
        parser.error("nvidia-smi shows no GPU here; --dry runs everything tiny on the CPU")
    device = re.sub(r"[^a-z0-9]+", "-", (here["gpus"] or ["dry"])[0].split(",")[0].lower())
    path = given.out or ROOT / "results" / f"{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if given.only and path.exists() else {"checks": {}}
    failed = False
    for check in CHECKS:
        if check.name not in names:
            continue
        print(f"{check.name:<16} {check.what} ...", flush=True)
        try:
            record = perform(check, given.dry)
        except Exception:  # whatever it is, the others go on
            record = {"what": check.what, "status": "failed to start", "last words": traceback.format_exc()}
        record["machine"] = here
        report["checks"][check.name] = record
        path.write_text(json.dumps(report, indent=1) + "\n")
        # Figures of a benchmark of tiny sizes say nothing.
        complaints = [] if given.dry and check.command else broken(record)
        failed |= record["status"] != "ok" or bool(complaints)
        print(f"{'':<16} {record['status']}, {record.get('seconds', 0):.0f} s", flush=True)
        for line in complaints + record.get("last words", "").splitlines()[-12:]:
            print(f"{'':<16} {line}", flush=True)
    print(f"written: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
