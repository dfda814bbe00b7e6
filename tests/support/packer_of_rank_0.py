"""A packer that one machine lacks: its module cannot be imported on rank 1."""

from __future__ import annotations

import os

from roll_batching.planning.packers.bin_packing import first_fit_decreasing as pack

if os.environ["RANK"] == "1":
    raise ImportError("this machine lacks my kernels")

__all__ = ["pack"]
