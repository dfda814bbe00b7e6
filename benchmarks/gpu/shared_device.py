"""Parallel layouts of two and four processes that share one GPU, against one process: losses and gradients.

Tensors travel through host memory (`host_groups`), as NCCL refuses two ranks on a device. This tries what one process
on a GPU cannot: the order of streams, pinned buffers and lifetimes of tensors in pipelines, exchanges and the
distributed optimizer. It says nothing about NCCL, and its times mean nothing.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.equality import LIMITS
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailed, run_ranks

CAP, STEPS, SECONDS = 64, 3, 150
LIMIT = LIMITS["fp32"]
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and what is tried in it."""

    layout: Layout
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further settings of `strategy_config`."""
    offload: bool = False
    """States go to the host and back between steps."""
    other: Layout | None = None
    """A second layout of the ranks that takes the weights and computes log-probs."""

    @property
    def name(self) -> str:
        """Name in the record."""
        more = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if name in self.megatron]
        more += ["offload_states between steps"] if self.offload else []
        more += [] if self.other is None else [f"weights and samples to {self.other}"]
        return ", ".join([f"{self.layout.ranks} processes: {self.layout}", *more])


CASES = (
    Case(layout=Layout(tp=2, sp=True)),
    Case(layout=Layout(pp=2)),
    Case(layout=Layout(pp=2, vpp=2)),
    Case(layout=Layout(pp=2, slices=3)),
    Case(layout=Layout(cp=2)),
    Case(layout=Layout(dp=2, distopt=True), megatron=OVERLAP),
    Case(layout=Layout(dp=2, distopt=True), megatron=OVERLAP, offload=True),
    Case(layout=Layout(moe=True, dp=2, ep=2)),
    Case(layout=Layout(tp=2, sp=True), other=Layout(pp=2)),
    Case(layout=Layout(tp=2, sp=True, pp=2)),
    Case(layout=Layout(pp=2, vpp=2, dp=2, distopt=True), megatron=OVERLAP),
    Case(layout=Layout(cp=2, dp=2, distopt=True), megatron=OVERLAP),
    Case(layout=Layout(moe=True, tp=2, sp=True, dp=2, ep=2, distopt=True)),
    Case(layout=Layout(pp=2, dp=2), other=Layout(tp=2, cp=2, sp=True)),
)


def config_of(case: Case, layout: Layout) -> Any:
    from tests.support.models import ARCHITECTURE, worker_config

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if case.layout.moe else {}
    architecture = {**ARCHITECTURE, "num_layers": 4, **experts}
    megatron = {**layout.megatron(), "attention_backend": "dense", **(case.megatron if layout is case.layout else {})}
    return worker_config("packed", CAP, architecture=architecture, megatron=megatron, dtype="fp32")


def observe(case: Case) -> dict[str, Any]:
    """Losses of some steps, gradients of the first, and the gap of log-probs in the second layout. Collective."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, random_batch, whole_gradients

    strategy = MegatronTrainStrategy(config_of(case, case.layout))
    strategy.initialize()
    place = strategy.layout
    fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    found: dict[str, Any] = {"losses": [], "ranks": place.world_size, "device": place.device.type}
    for step in range(STEPS):
        whole = random_batch(40 + step, 9, 40)
        local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
        plan = strategy.plan(gather_lengths(local))
        found["losses"].append(strategy.train_step(distribute(local, plan), plan, loss).loss)
        if step == 0:
            gradients = whole_gradients(strategy.chunks, 61, place.tp_rank, case.layout.distopt)
            found["spread"] = gradients.pop("spread")
            found["gradients"] = {name: one.cpu() for name, one in gradients.items()}
        if case.offload:
            strategy.offload_states()
            strategy.load_states()
    if case.other is not None:
        found["moved"] = moved(strategy, case)
    return found


def moved(policy: Any, case: Case) -> float:
    """Difference of log-probs between the policy and a second layout that took its weights; relative. Collective."""
    from roll_batching.jobs.steps.passes import log_prob_pass
    from roll_batching.strategy import MegatronInferStrategy
    from roll_batching.strategy.roles import run_on
    from tests.support.models import random_batch

    assert case.other is not None
    other = MegatronInferStrategy(config_of(case, case.other), seed=5)
    other.initialize()
    other.copy_weights_from(policy)
    whole = random_batch(3, 11, 40)
    home = whole.select(torch.arange(policy.layout.dp_rank, len(whole), policy.layout.dp_size))
    ours = run_on(policy, home, log_prob_pass(policy, None))["log_probs"]
    theirs = run_on(other, home, log_prob_pass(other, None), policy)["log_probs"]
    gap = torch.stack([(ours - theirs).double().norm().cpu(), ours.double().norm().cpu()])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gap.tolist())
    return max(one / max(size, 1e-12) for one, size in everyone)


def on_ranks(payload: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """`observe` in one of the processes, all on the first GPU."""
    from benchmarks.gpu import host_groups

    folder, fields = payload
    case = Case(**{key: Layout(**one) if isinstance(one, dict) and "tp" in one else one for key, one in fields.items()})
    host_groups.register()
    dist.init_process_group(
        host_groups.BACKEND,
        init_method=f"file://{folder}/met",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    found = observe(case)
    dist.barrier()
    return found if dist.get_rank() == 0 else {}


def alone(moe: bool) -> dict[str, Any]:
    """The same steps in one process, without groups through the host."""
    return observe(Case(layout=Layout(moe=moe)))


def judge(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, list[float]]:
    """Figures with their limits."""
    from tests.support.models import worst_difference

    gaps = [abs(a - b) / max(abs(b), 0.1) for a, b in zip(found["losses"], expected["losses"], strict=True)]
    gradient = max(worst_difference(found["gradients"], expected["gradients"])[0], found["spread"])
    limits = {"loss": [gaps[0], LIMIT], "gradient": [gradient, LIMIT], f"losses of {STEPS} steps": [max(gaps), LIMIT]}
    if case.other is not None:
        limits["log-probs in the second layout"] = [found["moved"], LIMIT]
    return limits


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """One record per layout. A layout that fails or hangs is recorded with the end of its output."""
    here = "benchmarks.gpu.shared_device:"
    shared = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    expected = {moe: run_ranks(1, here + "alone", moe, env=shared, timeout=SECONDS)[0] for moe in (False, True)}
    for case in CASES:
        started, notes = time.perf_counter(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                payload = (folder, asdict(case))
                found = run_ranks(case.layout.ranks, here + "on_ranks", payload, env=shared, timeout=SECONDS)[0]
                assert (found["ranks"], found["device"]) == (case.layout.ranks, device.type)
                limits = judge(case, found, expected[case.layout.moe])
            except RanksFailed as failure:
                limits, notes = {"failed": [1.0, 0.0]}, str(failure)[-4000:]
        yield {"case": case.name, "figures": {"seconds": time.perf_counter() - started}, "limits": limits} | (
            {"notes": notes} if notes else {}
        )
