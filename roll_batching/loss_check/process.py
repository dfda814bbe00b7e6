"""The process that runs a check, started with a new interpreter."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from roll_batching.known_warnings import hide_known_warnings
from roll_batching.lifetime import die_with_parent


def run_request(request: bytes, answers: Connection, parent: int) -> None:
    """Runs a pickled `Request` on the CPU, also while a job uses GPUs; sends its outcomes to the process `parent`."""
    die_with_parent(parent)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    hide_known_warnings()
    from roll_batching.loss_check.worker import run_layouts  # imports Megatron, which warns

    run_layouts(request, answers)
