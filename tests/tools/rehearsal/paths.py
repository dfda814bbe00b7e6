"""Code paths on the fake CUDA device; each runs in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roll_batching.jobs.config import load_config
from roll_batching.losses import LossOutput
from roll_batching.tools.rehearsal.task import RankReport, RankTask
from tests.tools.rehearsal.jobs import job_of, rehearsed, task_of

BF16 = {"model_args": {**job_of()["actor_train"]["model_args"], "dtype": "bf16"}}


def shipped(name: str) -> RankReport:
    """Rehearse a shipped configuration with two layers."""
    job = load_config(f"configs/{name}.yaml")
    return rehearsed(RankTask(config=job, rank=0, world_size=job.world_size or 1, layers=2))


def job_on_device(payload: tuple[dict[str, Any], int]) -> RankReport:
    job, world = payload
    return rehearsed(task_of(job, world, device="cuda"))


class ReadingLoss:
    """Faulty loss that reads a value from the device."""

    needs = frozenset({"log_probs"})
    masks = ("response_mask",)

    def token_loss(self, tokens: Any) -> LossOutput:
        loss = -tokens.mean(tokens.log_probs)
        if loss.item() < 0:
            loss = loss * 1
        return LossOutput(loss, {})


def head_with_an_index_on_the_host(_: None) -> RankReport:
    """Rehearse a faulty head whose index is on the CPU."""
    from roll_batching.losses.head import HeadContext

    compute = HeadContext._token_log_probs

    def with_cpu_index(self: Any, source: Any, pack: Any, weight: Any, rows: Any, *args: Any, **options: Any) -> Any:
        return compute(self, source, pack, weight, torch.zeros(len(rows), dtype=torch.int64), *args, **options)

    HeadContext._token_log_probs = with_cpu_index  # type: ignore[method-assign]
    return job_on_device((job_of(train=BF16), 1))


def _with_policy(job: dict[str, Any], use: Callable[[Any, Any], Any]) -> Any:
    """Result of `use(passes, recorder)` for the passes of a job on the fake device."""
    from roll_batching.tools.rehearsal import fake_cuda, fake_world
    from roll_batching.tools.rehearsal.passes import passes_of
    from roll_batching.tools.rehearsal.recorder import Recorder

    fake_cuda.install()
    fake_world.join(0, 1)
    fake_world.patch_for_fake_tensors()
    recorder = Recorder("cuda")
    with fake_world.fake_device("cuda"), recorder:
        passes = passes_of(task_of(job, 1).config, recorder)
        return use(passes, recorder)


def evaluation(job: dict[str, Any]) -> list[str]:
    """Devices of the parameters after an evaluation of the job's loss."""

    def use(passes: Any, recorder: Any) -> list[str]:
        policy = passes.policy
        plan = passes.plan(policy, policy.batching.infer, 2)
        figures = policy.evaluate(policy.samples(plan), plan, passes.loss)
        assert "loss" in figures
        return sorted({str(p.device) for p in policy.chunks[0].parameters()})

    devices: list[str] = _with_policy(job, use)
    return devices


def parts(_: None) -> dict[str, float]:
    """Phases with host reads inside the schedule, of a strategy built by `from_parts`."""
    from roll_batching.losses import SFTLoss
    from roll_batching.tools.rehearsal.models import Policy

    def use(passes: Any, recorder: Any) -> dict[str, float]:
        policy = passes.policy
        taken = Policy.from_parts(policy.chunks, policy.optimizer, policy.batching, defer_head=True, vocab_size=512)
        taken.recorder = recorder
        plan = passes.plan(taken, taken.batching.train, 2)
        taken.train_step(taken.samples(plan), plan, SFTLoss())
        return {read.phase: 1 for read in recorder.host_reads if read.phase in ("forward", "backward")}

    reads: dict[str, float] = _with_policy(job_of(train=BF16), use)
    return reads
