"""The page docs/results.md: records of the GPU checks by device, from the files in results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CHECKS, exceeded_limits
from benchmarks.gpu.kernel_times import seconds_by_kind

HEAD = """# GPU results

`scripts/gpu_checks.sh` writes a file into `results/` on a machine with a GPU. `python scripts/results_page.py` writes
this page from these files. Exceeded limits are shown as measured.
"""
PICTURE = """## Where the time of a step goes

A packed step of the Qwen3-1.7B shape (`--only where_time_goes`), by kind of kernel. Those below the thirty longest
count as other kernels:

![Seconds of a step by kind of kernel](img/gpu_time.png)"""


def number(value: Any) -> str:
    if isinstance(value, float) and value != int(value):
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def verdict(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"**failed**: {record['status']}"
    return f"{len(exceeded_limits(record))} limits exceeded" if exceeded_limits(record) else "passed"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


def steps(result: dict[str, Any]) -> list[str]:
    """Table of a record of bench_step.py."""
    load = result["workload"]
    shape = load["architecture"]
    rows = [
        [
            run["mode"],
            f"{run['tokens_per_second']:,.0f}",
            f"{run['mfu']:.1%}" if run["mfu"] else "-",
            f"{run['seconds_per_step']:.2f}",
            f"{run['padding_share']:.1%}",
            str(run["micro_batches"] // load["steps"]),
            f"{run['peak_memory_bytes'] / 2**30:.1f}",
            f"{1e3 * run['plan_seconds_per_step']:.1f} + {1e3 * run['pack_seconds_per_step']:.1f}",
        ]
        for run in result["modes"]
    ]
    head = ["mode", "real tokens/s", "MFU", "s per step", "padding", "micro-batches", "peak GiB", "plan + pack, ms"]
    return [
        f"{load['samples']} samples a step, at most {load['longest']:,} tokens each, micro-batches of at most "
        f"{load['cap']:,} tokens; {shape['num_layers']} layers of width {shape['hidden_size']:,}, vocabulary "
        f"{shape['vocab_size']:,}, {result['modes'][0]['dtype']}, AdamW with fp32 copies, no recomputation. "
        f"{load['steps']} steps timed after {load['warm_up']} of warm-up. `roll_batching/modeling/cost.py` has the "
        "formula of MFU. The largest relative difference of a loss between modes is "
        f"{result['largest_relative_loss_difference']:.1e}.",
        "",
        *table(head, rows),
    ]


def cases(result: dict[str, Any]) -> list[str]:
    """Table with a row per case, its limited figures and other figures; then the notes of the cases."""
    rows = []
    for case in result["cases"]:
        limited = [f"{name} {value:.2g} (≤ {limit:g})" for name, (value, limit) in case["limits"].items()]
        figures = case["figures"]
        if kinds := seconds_by_kind(case):  # by today's kinds, whichever those of the record were
            kinds = {f"{kind}, seconds": value for kind, value in kinds.items()}
            figures = {"seconds of the step": figures["seconds of the step"], **kinds, "tokens": figures["tokens"]}
        rows.append(
            [case["case"], "; ".join(limited) or "-", "; ".join(f"{k} {number(v)}" for k, v in figures.items())]
        )
    notes = dict.fromkeys(case["notes"] for case in result["cases"] if isinstance(case.get("notes"), str))
    return [*table(["case", "limits", "figures"], rows), *(line for note in notes for line in ("", f"Note: {note}."))]


def section(name: str, what: str, record: dict[str, Any]) -> list[str]:
    lines = ["", f"### {what}", "", f"`--only {name}`: {verdict(record)}, {record['seconds']:.0f} s, commit "]
    lines[-1] += f"{record['machine']['commit']}, {record['machine']['date']}."
    result = record.get("result")
    if result:
        lines += ["", *(steps(result) if "modes" in result else cases(result))]
    if record["status"] != "ok":
        lines += ["", "```text", *record["last words"].splitlines()[-8:], "```"]
    return lines


def reports_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by check of each file in `folder`, by its stem."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    return {path.stem: json.loads(path.read_text())["checks"] for path in files}


def recorded_steps(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds by kind of kernel of the recorded steps, by file."""
    steps = {}
    for stem, checks in reports_of(folder).items():
        for case in checks.get("where_time_goes", {}).get("result", {}).get("cases", []):
            if seconds := seconds_by_kind(case):
                steps[stem] = seconds
    return steps


def page(folder: Path) -> str:
    """The page for all files in `folder`."""
    lines = [HEAD.rstrip()]
    reports = reports_of(folder)
    rows = [
        [check.what, *(verdict(r[check.name]) if check.name in r else "not yet run" for r in reports.values())]
        for check in CHECKS
    ]
    lines += [
        "",
        *table(["check", *(reports or ["any GPU"])], rows if reports else [[*r, "not yet run"] for r in rows]),
    ]
    if recorded_steps(folder):
        lines += ["", PICTURE]
    for device, checks in reports.items():
        machine = next(iter(checks.values()))["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        lines += [
            "",
            f"## {'; '.join(machine['gpus'])}",
            "",
            f"{versions}; {machine['platform']}; `results/{device}.json`",
        ]
        for check in CHECKS:
            if check.name in checks:
                lines += section(check.name, check.what, checks[check.name])
    return "\n".join(lines) + "\n"
