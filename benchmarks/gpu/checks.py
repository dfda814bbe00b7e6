"""Run the checks that need a GPU and record their figures in one file.

    scripts/gpu_checks.sh                     on one H100 or H200, about ten minutes
    python scripts/gpu_checks.py --dry        all checks at tiny sizes on the CPU, to test the command itself
    python scripts/gpu_checks.py --only attention,equality

The file (results/<device>.json) is written after every check, so that an interrupted run keeps its records. Each check
runs in its own process under a time limit. If one fails, the end of its output is recorded, and the others run.
`python scripts/results_page.py` writes docs/results.md from all files in results/. Exits 1 if a check failed or a
figure exceeds its limit.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from roll_batching.tools.doctor.machine import package_versions, visible_gpus

Case = dict[str, Any]
"""{"case": name, "figures": {name: number}, "limits": {name: [value, at most]}, "notes": anything}."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check: a function or a benchmark script, with a time limit."""

    name: str
    what: str
    seconds: float
    """Time limit, after which its process is killed."""
    function: str | None = None
    """`module:function`; called in a new process with (device, dry), returns an iterable of cases."""
    command: Callable[[Path, bool], list[str]] | None = None
    """Command for (output file, dry), which writes the recorded JSON into the file."""


def benchmark(name: str, *full: str, dry: Sequence[str] = ()) -> Callable[[Path, bool], list[str]]:
    def command(out: Path, is_dry: bool) -> list[str]:
        options = ["--device", "cpu", *dry] if is_dry else ["--device", "cuda", *full]
        return [sys.executable, f"benchmarks/{name}", "--json", str(out), *options]

    return command


TINY = ("--workload", "tiny")
TINY_MOE = ("--workload", "tiny-moe")
QWEN = ("--workload", "qwen3-1.7b")
SHORT = ("--tokens", "256", "--vocabulary", "1024", "--rounds", "1")

CHECKS = (
    Check(
        name="attention",
        what="Attention backends against fp64 attention: outputs and gradients",
        seconds=240,
        function="benchmarks.gpu.attention:run",
    ),
    Check(
        name="equality",
        what="Losses, gradients, log-probs, generation and training steps on CUDA against the CPU",
        seconds=240,
        function="benchmarks.gpu.equality:run",
    ),
    Check(
        name="shared_device",
        what="Layouts of two and four processes on one GPU, their tensors sent through the host, against one process",
        seconds=900,
        function="benchmarks.gpu.shared_device:run",
    ),
    Check(
        name="step",
        what="One optimizer step of the Qwen3-1.7B shape on TRL's lengths: padded, dynamic, packed",
        seconds=300,
        command=benchmark("bench_step.py", *QWEN, dry=TINY),
    ),
    Check(
        name="step_8b",
        what="One optimizer step of eight layers of Qwen3-8B's shape on the same lengths",
        seconds=240,
        command=benchmark("bench_step.py", "--workload", "qwen3-8b-layers", dry=TINY),
    ),
    Check(
        name="step_moe",
        what="One optimizer step of four layers of Qwen3-30B-A3B's shape, a mixture of experts, on the same lengths",
        seconds=240,
        command=benchmark("bench_step.py", "--workload", "qwen3-30b-a3b-layers", dry=TINY_MOE),
    ),
    Check(
        name="generation",
        what="Generated tokens per second of the Qwen3-1.7B shape, beside transformers",
        seconds=240,
        function="benchmarks.gpu.generation:run",
    ),
    Check(
        name="fp8",
        what="Packed steps in FP8 beside bf16, both in TransformerEngine's layers: the Qwen3-1.7B shape, multi-latent "
        "attention, gated delta nets",
        seconds=600,
        function="benchmarks.gpu.fp8:run",
    ),
    Check(
        name="recurrent",
        what="The gated delta rule by kernels of flash-linear-attention beside plain torch, over packs and trees",
        seconds=240,
        function="benchmarks.gpu.recurrent:run",
    ),
    Check(
        name="memory",
        what="Rehearsed memory against measured memory of a step",
        seconds=240,
        function="benchmarks.gpu.memory:run",
    ),
    Check(
        name="prefixes",
        what="Updates and log-prob passes of the Qwen3-1.7B shape with prompts computed once and once per sample",
        seconds=300,
        command=benchmark("bench_shared_prefixes.py", dry=SHORT),
    ),
    Check(
        name="prefixes_behind",
        what="The same on Megatron's own model, through our passes and behind a loop that packs, with the kernels of "
        "TransformerEngine at unequal lengths where it is installed",
        seconds=300,
        command=benchmark("bench_prefixes_behind.py", dry=SHORT),
    ),
    Check(
        name="demo",
        what="The shortened demo with NCCL on one GPU: training, checkpoint, resuming",
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
        what="Time per kernel of a packed step of the Qwen3-1.7B shape",
        seconds=150,
        function="benchmarks.gpu.step:where_time_goes",
    ),
    Check(
        name="logprob",
        what="Log-probs and entropies against a plain implementation",
        seconds=90,
        command=benchmark("bench_logprob.py", dry=SHORT),
    ),
    Check(
        name="loss",
        what="Policy loss on one pack against a loop over its sequences",
        seconds=90,
        command=benchmark("bench_loss.py", dry=SHORT),
    ),
)


def machine() -> dict[str, Any]:
    """GPUs, versions and commit; does not import torch into this process."""
    return {
        "gpus": visible_gpus(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "versions": package_versions(),
        "commit": os.environ.get("GPU_CHECKS_COMMIT") or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """Commit of the checkout, with a + if files differ from it."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_function(check: Check, out: Path, dry: bool) -> None:
    """Call the function of `check` in this process and write its cases to `out`."""
    import torch

    from roll_batching.distributed.parallel_layout import start_processes

    assert check.function is not None
    module, function = check.function.split(":")
    device = start_processes()
    if not dry and device.type != "cuda":
        raise SystemExit("no GPU is visible. --dry runs all checks at tiny sizes on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    cases: list[Case] = []
    for case in getattr(importlib.import_module(module), function)(device, dry):
        cases.append(case)  # written after every case, so that a time limit loses only the current one
        out.write_text(json.dumps({"cases": cases}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_check(check: Check, dry: bool) -> dict[str, Any]:
    """Run a check in a new process; returns its record: status, cases, and the end of the output if it failed."""
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
                status = f"not done after {check.seconds:.0f} s"
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


def exceeded_limits(record: dict[str, Any]) -> list[str]:
    """Messages for the figures of a record that exceed their limits; NaN exceeds every limit."""
    return [
        f"{case['case']}: {name} is {value:.3g}, above the limit {limit:g}"
        for case in record.get("result", {}).get("cases", [])
        for name, (value, limit) in case["limits"].items()
        if not value <= limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="output file; default: results/<device>.json")
    parser.add_argument("--dry", action="store_true", help="run all checks at tiny sizes on the CPU")
    parser.add_argument("--only", help="comma-separated names of checks; the file keeps its other records")
    parser.add_argument("--within", type=float, help="seconds for all checks: their time limits are scaled to add up")
    parser.add_argument("--inside", choices=[c.name for c in CHECKS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        run_function(next(c for c in CHECKS if c.name == args.inside), args.out, args.dry)
        return 0
    names = args.only.split(",") if args.only else [c.name for c in CHECKS]
    if unknown := set(names) - {c.name for c in CHECKS}:
        parser.error(f"no such checks: {', '.join(sorted(unknown))}; choose from {', '.join(c.name for c in CHECKS)}")
    this_machine = machine()
    if not this_machine["gpus"] and not args.dry:
        parser.error("nvidia-smi shows no GPU. --dry runs all checks at tiny sizes on the CPU")
    device = re.sub(r"[^a-z0-9]+", "-", (this_machine["gpus"] or ["dry"])[0].split(",")[0].lower())
    path = args.out or ROOT / "results" / f"{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if args.only and path.exists() else {"checks": {}}
    failed, started = False, time.monotonic()
    chosen = [check for check in CHECKS if check.name in names]
    scale = min(1.0, args.within / sum(check.seconds for check in chosen)) if args.within else 1.0
    ends = itertools.accumulate(check.seconds * scale for check in chosen)
    for check, end in zip(chosen, ends, strict=True):
        if args.within:  # what the checks before left is for this one
            check = replace(check, seconds=max(end - (time.monotonic() - started), 1.0))
        print(f"{check.name:<16} {check.what} ...", flush=True)
        try:
            record = run_check(check, args.dry)
        except Exception:  # the other checks still run
            record = {"what": check.what, "status": "failed to start", "last words": traceback.format_exc()}
        # The limits of benchmarks hold for full sizes only.
        complaints = [] if args.dry and check.command else exceeded_limits(record)
        record |= {"machine": this_machine, "exceeded": complaints}
        report["checks"][check.name] = record
        path.write_text(json.dumps(report, indent=1) + "\n")
        failed |= record["status"] != "ok" or bool(complaints)
        print(f"{'':<16} {record['status']}, {record.get('seconds', 0):.0f} s", flush=True)
        for line in complaints + record.get("last words", "").splitlines()[-12:]:
            print(f"{'':<16} {line}", flush=True)
    print(f"written: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
