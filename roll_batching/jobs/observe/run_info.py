"""run_info.json: when and where a run started, with which versions, and the notices of its configuration."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import roll_batching
from roll_batching.files import atomic_file

RUN_INFO = "run_info.json"
_PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4", "transformers"),
    *("numpy", "numba", "ray", "vllm", "sglang"),
)
"""Distributions whose versions change results or speed."""


def write_run_info(folder: Path, notices: Sequence[str]) -> None:
    """Replace `folder`/run_info.json. Raises OSError when it cannot be written."""
    with atomic_file(folder / RUN_INFO) as partial:
        partial.write_text(
            json.dumps({"environment": _environment(), "notices": list(notices)}, indent=1) + "\n", encoding="utf-8"
        )


def _environment() -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "device": _device(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "roll-batching": roll_batching.__version__,
        **_versions(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _device() -> str:
    """Name of the device of this process, without importing torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU ({platform.machine()})"
