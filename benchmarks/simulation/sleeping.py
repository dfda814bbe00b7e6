"""Training steps of real processes whose passes sleep: Megatron's schedules at a pace that is known beforehand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 16,
    "max_position_embeddings": 64,
}
TOKENS = 8
"""Tokens of a sample: computing takes little beside sleeping."""


@dataclass(frozen=True, kw_only=True)
class SleepingStep:
    """An optimizer step in which passes sleep."""

    stages: int
    forward: tuple[tuple[float, ...], ...]
    """Seconds of the forward pass of each micro-batch on a stage, `forward[dp_rank][k]`; backward takes twice as
    long."""
    chunks: int = 1
    group_size: int | None = None
    steps: int = 1
    """Steps that are timed, after one without sleep."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the layout."""

    @property
    def processes(self) -> int:
        """Ranks of the job."""
        return self.stages * len(self.forward)


def train(step: SleepingStep) -> dict[str, Any]:
    """Runs on each rank; returns its passes (backward, micro-batch, chunk, start, end) and its transfers in order."""
    import torch
    import torch.distributed as dist

    from roll_batching.losses import SFTLoss
    from roll_batching.planning import Plan
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronTrainStrategy

    torch.set_num_threads(1)
    strategy = MegatronTrainStrategy(_role(step), seed=1)
    strategy.initialize()
    log = _Log(step.forward[strategy.layout.dp_rank], len(strategy.chunks))
    for number, chunk in enumerate(strategy.chunks):
        log.watch(number, chunk)
    ranks, count = len(step.forward), len(step.forward[0])
    lengths = torch.full((ranks * count,), TOKENS)
    fields = {
        "input_ids": torch.ones(int(lengths.sum()), dtype=torch.long),
        "response_mask": torch.ones(int(lengths.sum()), dtype=torch.bool),
    }
    batch = SampleBatch(torch.arange(len(lengths)), lengths, fields, dict.fromkeys(fields, "token"))
    bins = [[[rank * count + k] for k in range(count)] for rank in range(ranks)]
    plan = Plan.from_bins(bins, lengths.numpy(), strategy.constraints())
    home = strategy.layout.dp_rank
    local = plan.shard(batch, home)
    log.record_transfers()
    timed = []
    for number in range(step.steps + 1):
        log.start(asleep=number > 0)
        dist.barrier()
        strategy.train_step(local, plan, SFTLoss())
        if number:
            timed.append(log.passes)
    return {
        "dp_rank": home,
        "stage": strategy.layout.pp_rank,
        "steps": timed,
        "transfers": log.transfers,
    }


def step_seconds(results: list[dict[str, Any]]) -> list[float]:
    """Seconds of each timed step, from the first pass of any rank to the end of the last."""
    seconds = []
    for passes in zip(*(result["steps"] for result in results), strict=True):
        every = [one for of_rank in passes for one in of_rank]
        seconds.append(max(one[4] for one in every) - min(one[3] for one in every))
    return seconds


def _role(step: SleepingStep) -> Any:
    from roll_batching.jobs.config import WorkerConfig

    layout: dict[str, Any] = {"pipeline_model_parallel_size": step.stages, **step.options}
    if step.chunks > 1:
        layout["virtual_pipeline_model_parallel_size"] = step.chunks
        layout["microbatch_group_size_per_vp_stage"] = step.group_size
    return WorkerConfig.model_validate(
        {
            "model_args": {"architecture": {**ARCHITECTURE, "num_layers": step.stages * step.chunks}},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
            "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": TOKENS},
        }
    )


class _Log:
    """Passes and transfers of one rank, and the sleep inside its passes."""

    def __init__(self, forward: tuple[float, ...], chunks: int) -> None:
        self.forward, self.chunks = forward, chunks
        self.transfers: list[tuple[bool, bool, bool, bool]] = []
        self.start(asleep=False)

    def start(self, *, asleep: bool) -> None:
        """Begin a step."""
        self.asleep = asleep
        self.passes: list[tuple[bool, int, int, float, float]] = []
        self.transfers.clear()
        self.counts = [0] * self.chunks
        """Forward passes of each chunk: a chunk computes the micro-batches in their order."""

    def watch(self, number: int, chunk: Any) -> None:
        """Let the passes of a chunk sleep."""
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.monotonic()

        def after(_: Any, __: Any, output: Any) -> None:
            index = self.counts[number]
            self.counts[number] += 1
            self._sleep(False, index, number, began)
            output.register_hook(lambda _: self._sleep(True, index, number, time.monotonic()))

        chunk.register_forward_pre_hook(before)
        chunk.register_forward_hook(after)

    def _sleep(self, is_backward: bool, index: int, chunk: int, began: float) -> None:
        if self.asleep:
            seconds = self.forward[index] / self.chunks * (2 if is_backward else 1)
            # Computing inside the pass counts as part of it.
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        self.passes.append((is_backward, index, chunk, began, time.monotonic()))

    def record_transfers(self) -> None:
        """Record which transfers each call of the communicator makes."""
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        communicate = P2PCommunicator._communicate

        def recorded(communicator: Any, **call: Any) -> Any:
            made = (
                call["tensor_send_next"] is not None,
                call["tensor_send_prev"] is not None,
                bool(call["recv_prev"]),
                bool(call["recv_next"]),
            )
            if any(made):
                self.transfers.append(made)
            return communicate(communicator, **call)

        P2PCommunicator._communicate = recorded
