"""Time of a training step by kind of CUDA kernel, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = {
    "attention": ("flash", "fmha"),  # before matrix products: flash attention's names mention CUTLASS
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "splitk", "cublas"),
    "norms": ("layer_norm", "rms_norm", "gammabeta"),
    "optimizer": ("multi_tensor", "foreach", "adam"),
    "copies": ("memcpy", "memset"),
}
OTHER, IDLE = "other kernels", "no kernel"


def kind_of(kernel: str) -> str:
    """Key of `KINDS`, or `OTHER`, of a kernel's name."""
    return next((kind for kind, words in KINDS.items() if any(w in kernel.lower() for w in words)), OTHER)


def seconds_by_kind(case: dict[str, Any]) -> dict[str, float]:
    """Seconds of a recorded step by kind of kernel, and without one; they sum to the seconds of the step.

    Kernels below the record's longest count as other kernels. Empty for a record without kernels (a dry run).
    """
    notes = case.get("notes")
    kernels: dict[str, float] = notes.get("kernels, seconds", {}) if isinstance(notes, dict) else {}
    if not kernels:
        return {}
    step = case["figures"]["seconds of the step"]
    busy = step * case["figures"]["share with a kernel running"]
    seconds = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, value in kernels.items():
        seconds[kind_of(name)] += value
    seconds[OTHER] += max(0.0, busy - sum(seconds.values()))
    return {**{kind: value for kind, value in seconds.items() if value}, IDLE: step - busy}


def draw(steps: dict[str, dict[str, float]], path: Path) -> None:
    """Draw one bar per step, from `seconds_by_kind`, into the file `path`."""
    from matplotlib.figure import Figure

    from roll_batching.jobs.observe.plan_picture import save_figure

    figure = Figure(figsize=(9, 1.3 + 0.5 * len(steps)), layout="constrained")
    axes = figure.subplots()
    kinds = [kind for kind in [*KINDS, OTHER, IDLE] if any(kind in seconds for seconds in steps.values())]
    left = [0.0] * len(steps)
    for number, kind in enumerate(kinds):
        widths = [seconds.get(kind, 0.0) for seconds in steps.values()]
        bars = axes.barh(list(steps), widths, left=left, label=kind, color="0.85" if kind == IDLE else f"C{number}")
        longest = max(sum(seconds.values()) for seconds in steps.values())
        axes.bar_label(bars, [f"{w:.2f}" if w > 0.04 * longest else "" for w in widths], label_type="center")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a packed step")
    figure.legend(ncols=len(kinds), loc="outside upper right", frameon=False, fontsize="small")
    save_figure(figure, path, dpi=110)
