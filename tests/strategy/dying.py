"""A rank that dies while the others wait: `python -m tests.strategy.dying WHERE HOW FOLDER`, under a launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.worker import run_worker

WHERE, HOW, FOLDER = sys.argv[1:4]
RANK = int(os.environ.get("RANK", 0))


def die(*_: Any) -> None:
    if RANK != 1:
        return
    Path(FOLDER, "died").write_text(str(time.time()))
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"died in the {WHERE}")


class _Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        die()
        return grads[0]


def job(_: JobConfig) -> None:
    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.losses.steps import mine
    from tests.support.models import ARCHITECTURE, random_batch, worker_config

    in_block = WHERE == "block of ranks"
    layout: dict[str, Any] = {"context_parallel_size": "auto"} if in_block else {"pipeline_model_parallel_size": 2}
    if WHERE == "slices":
        layout = {"pipeline_model_parallel_size": 4, "pipeline_slices": 4}
    strategy = MegatronTrainStrategy(
        worker_config("packed", 64, architecture={**ARCHITECTURE, "num_layers": 4}, megatron=layout)
    )
    strategy.initialize()
    batch = mine(strategy, random_batch(1, 24, 120 if in_block else 40))
    plan = strategy.plan(gather_lengths(batch))
    # The first pack of rank 1, in whose backward pass it dies, is computed by more ranks.
    assert not in_block or plan.micro_batches[1][0].cp_size > 1
    placed = distribute(batch, plan)
    strategy.train_step(placed, plan, SFTLoss())
    layer = gpt_of(strategy.chunks[0]).decoder.layers[0]
    if WHERE == "forward":
        layer.register_forward_hook(lambda *_: die())
    elif WHERE in ("backward", "block of ranks", "slices"):
        layer.mlp.register_forward_hook(lambda _, __, output: (_Dies.apply(output[0]), *output[1:]))
    else:
        step = strategy.optimizer.step

        def dying_step() -> Any:
            die()
            return step()

        strategy.optimizer.step = dying_step
    for _ in range(3):
        strategy.train_step(placed, plan, SFTLoss())
    raise AssertionError("nobody died")


if __name__ == "__main__":
    run_worker(JobConfig(), job)
