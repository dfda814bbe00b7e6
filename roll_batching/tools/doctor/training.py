"""Checks of ranks and training: kernels, collectives, layouts against one rank, a checkpoint equal to the bit."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from roll_batching.distributed import digest
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.loss_check.scenarios import VOCABULARY, random_samples
from roll_batching.loss_check.worker import ARCHITECTURE, fill_weights, role_settings, whole_gradients
from roll_batching.losses import PolicyLoss
from roll_batching.losses.contract import loss_spec
from roll_batching.modeling.requirements import ModelDemands
from roll_batching.packing.attention_backend import attention_backend
from roll_batching.registry import describe_error
from roll_batching.samples import SampleBatch, distribute, gather_lengths
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS, AUTO
from roll_batching.strategy import MegatronTrainStrategy
from roll_batching.tools.doctor.attention import (
    LARGEST_ERROR,
    LARGEST_HALF_ERROR,
    Heads,
    measure_attention,
    relative_error,
)
from roll_batching.tools.doctor.host_reads import count_host_reads
from roll_batching.tools.doctor.session import Session, Steps

_LOSS = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
_DIFFERENCE = 2e-4
"""Largest relative difference of loss and gradients between layouts, in fp32."""
_MODEL: dict[str, Any] = {
    **ARCHITECTURE,
    "num_layers": 4,
    "moe": {"num_experts": 4, "router_topk": 2, "layer_freq": [0, 1, 0, 1], "aux_loss_coeff": 0.0},
}
"""Shape of the tiny model: dense layers and layers of experts in turn."""
_SLOWDOWN, LARGEST_LEAK = 1.5, 256 << 20


def _leave_layout() -> None:
    """Ends Megatron's groups of the last layout."""
    gc.collect()  # a strategy refers to itself, and to its groups
    parallel_state.destroy_model_parallel()


def layout_checks(ranks: int, *, full: bool) -> dict[str, Callable[[Session], Steps]]:
    """A check per parallel layout of this number of ranks; `full`: also two kinds of parallelism at once."""
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    pipeline, context = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
    experts, chunks = {"expert_model_parallel_size": 2}, {"virtual_pipeline_model_parallel_size": 2}
    layouts: dict[str, dict[str, Any]] = {f"DP {ranks}": {}}
    if ranks % 2 == 0:
        layouts |= {"TP 2": tensor, "PP 2": pipeline, "PP 2, VPP 2": pipeline | chunks, "CP 2": context}
        layouts["EP 2"] = experts
    if ranks % 4 == 0 and full:
        layouts |= {"TP 2, PP 2": tensor | pipeline, "TP 2, CP 2": tensor | context, "PP 2, CP 2": pipeline | context}
        layouts |= {"TP 2, EP 2": tensor | experts, "PP 2, EP 2": pipeline | experts}
    return {f"layout {name}": partial(check_layout, layout=layout) for name, layout in layouts.items()}


class _Training:
    """A tiny model in one layout, and the samples of its steps."""

    def __init__(self, session: Session, layout: dict[str, Any], model: dict[str, Any] = _MODEL) -> None:
        batches = [random_samples(loss_spec(_LOSS), {}, seed, pairs=False) for seed in range(session.world_size)]
        for number, batch in enumerate(batches):
            batch.ids.add_(1000 * number)
        whole = SampleBatch.concat(batches)
        sizes: dict[str, Any] = {"samples": len(whole), "tokens": whole.num_tokens, "vocabulary": VOCABULARY}
        settings = role_settings(
            "packed", {**layout, "attention_backend": "dense"}, value_head=False, architecture=model, **sizes
        )
        self.strategy = MegatronTrainStrategy(settings)
        self.strategy.initialize()
        place = self.strategy.layout
        fill_weights(self.strategy.chunks, VOCABULARY, place.tp_rank, place.tp_size)
        local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
        self.plan = self.strategy.plan(gather_lengths(local))
        self.local = distribute(local, self.plan)

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss of the whole batch, and gradients of the parameters on this rank's stage."""
        self.strategy.zero_grad()
        loss, _ = self.strategy.forward_backward(self.local, self.plan, _LOSS)
        return loss, whole_gradients(self.strategy.chunks, VOCABULARY, self.strategy.layout.tp_group)

    def step(self) -> int:
        """Makes an optimizer step; returns the digest of this rank's weights."""
        self.strategy.train_step(self.local, self.plan, _LOSS)
        return self.digest()

    def digest(self) -> int:
        """Digest of this rank's weights, bit by bit."""
        weights = [parameter.detach().cpu() for chunk in self.strategy.chunks for parameter in chunk.parameters()]
        return digest(*(weight.numpy().tobytes() for weight in weights))


def check_one_rank(session: Session) -> Steps:
    """A broken torch or Megatron-Core, or a rank that computes something else."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    session.device = start_processes()
    session.kept["reference"] = _Training(session, {}).gradients()
    values = yield session.kept["reference"][0]
    limit = _DIFFERENCE * max(abs(values[0]), 0.1)
    wrong = [rank for rank, loss in enumerate(values) if not abs(loss - values[0]) <= limit]
    return [f"rank {rank} has the loss {values[rank]:.6g}, rank 0 {values[0]:.6g}" for rank in wrong], "trains alone"


def check_attention(session: Session) -> Steps:
    """A kernel that is wrong on a GPU, though training goes on."""
    types = (torch.float32,) if session.device.type == "cpu" else (torch.bfloat16, torch.float32)
    measured: dict[str, Any] = {}
    for name, dtype in [(name, dtype) for name in ATTENTION_BACKENDS.names if name != AUTO for dtype in types]:
        backend, case = attention_backend(name, session.device.type), f"{name} {str(dtype).removeprefix('torch.')}"
        demands = ModelDemands(dtype=dtype, head_dim=128, backend=backend, engine_layers=False)
        try:
            if refusals := demands.refusals_here(session.device):
                measured[case] = {"refused": "; ".join(refusals)}
                continue
            limit, host = LARGEST_ERROR.get(dtype, LARGEST_HALF_ERROR), torch.device("cpu")
            error = 0.0
            for tokens in (400, 4000) if session.full else (400,):
                errors, _ = measure_attention(backend, session.device, dtype, Heads(), tokens, reference=host)
                error = max(error, *errors.values())
            measured[case] = {"error": error} | ({} if error <= limit else {"problem": f"is off by {error:.1%}"})
        except Exception as error:  # kernels raise anything; the next backend may still be right
            measured[case] = {"problem": f"fails with {describe_error(error)}"}
    values = yield measured
    cases = [(rank, case, value) for rank, one in enumerate(values) for case, value in one.items()]
    runs = {case for _, case, value in cases if "refused" not in value}
    problems = [
        f"{case} on rank {rank} {value.get('problem') or value['refused']}"
        for rank, case, value in cases
        if "problem" in value or ("refused" in value and case in runs)
    ]
    right = ", ".join(f"{case} {value['error']:.0e}" for case, value in measured.items() if "error" in value)
    absent = ", ".join(sorted({case.split()[0] for case, value in measured.items() if "refused" in value}))
    return problems, f"errors: {right}" + (f" (do not run here: {absent})" if absent else "")


def check_group(session: Session) -> Steps:
    """Ranks that cannot reach each other, or a rank without a GPU."""
    _leave_layout()
    if dist.is_initialized():  # by this rank alone
        dist.destroy_process_group()
    session.device = start_processes()
    dist.barrier()
    session.kept["memory"] = _held_memory(session.device)
    values = yield dist.get_backend()
    return [], f"{len(values)} over {values[0]}"


def check_speed(session: Session) -> Steps:
    """A rank that all others wait for in every step."""
    size, dtype = (4096, torch.bfloat16) if session.device.type == "cuda" else (384, torch.float32)
    matrix = torch.randn(size, size, device=session.device, dtype=dtype)
    times = []
    for _ in range(40):
        started = time.perf_counter()
        float(torch.mm(matrix, matrix)[0, 0])  # waits for the device
        times.append(1e3 * (time.perf_counter() - started))
    times = sorted(times[5:])  # without warm-up
    values = yield {"fastest": times[0], "spread": times[len(times) * 3 // 4] - times[0]}
    middle, spread = (statistics.median_low(value[name] for value in values) for name in ("fastest", "spread"))
    limit, times = max(_SLOWDOWN * middle, middle + spread), [v["fastest"] for v in values]
    slow = [f"rank {i} takes {x:.2f} ms per matmul, the median {middle:.2f}" for i, x in enumerate(times) if x > limit]
    return slow, f"{middle:.2f} ms per matmul, slowest rank {max(times):.2f}"


def check_collectives(session: Session) -> Steps:
    """A network that hangs or changes data."""
    ranks, rank = session.world_size, session.rank
    part = ((1 << 22) if session.full else (1 << 18)) // ranks

    def fill(value: float, size: int = part * ranks) -> torch.Tensor:
        return torch.full((size,), float(value), device=session.device)

    total, by_source = ranks * (ranks + 1) / 2, torch.arange(1.0, ranks + 1).repeat_interleave(part).to(session.device)
    collectives: list[tuple[str, list[Any], Any]] = [
        ("all_reduce", [fill(rank + 1)], total),
        ("broadcast", [fill(rank + 1), ranks - 1], ranks),
        ("all_gather_into_tensor", [fill(0), fill(rank + 1, part)], by_source),
        ("reduce_scatter_tensor", [fill(0, part), fill(rank + 1)], total),
        ("all_to_all_single", [fill(0), fill(rank + 1)], by_source),
    ]
    received, sent = fill(0), fill(rank + 1)
    collectives.append(("send and receive", [received, sent], (rank - 1) % ranks + 1))
    seconds: dict[str, float | None] = {}
    for name, arguments, expected in collectives:
        started = time.perf_counter()
        if arguments[0] is received:
            _pass_on(*arguments)
        else:
            getattr(dist, name)(*arguments)
        is_right = bool((arguments[0] == expected).all())  # also waits for the device
        seconds[name] = time.perf_counter() - started if is_right else None
    values = yield seconds
    problems = [f"{name} is wrong on rank {i}" for i, one in enumerate(values) for name, x in one.items() if x is None]
    slowest = {name: max(one[name] or 0.0 for one in values) for name in seconds}
    return problems, ", ".join(f"{name} {1e3 * most:.0f} ms" for name, most in slowest.items())


def check_host_reads(session: Session) -> Steps:
    """A step whose Python waits for the GPU, which then waits for Python."""
    _leave_layout()
    training = _Training(session, {}, ARCHITECTURE)  # a layer of experts waits for their counts
    training.step()
    inside, _ = count_host_reads(training.step)
    values = yield dict(inside.places)
    return [f"rank {i}: {place}" for i, places in enumerate(values) for place in places], "none in the schedule"


def _pass_on(received: torch.Tensor, sent: torch.Tensor) -> None:
    """Sends a tensor to the next rank and receives one from the previous rank, as pipeline stages do."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, sent, (rank + 1) % ranks)
    for request in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]):
        request.wait()


def check_memory(session: Session) -> Steps:
    """A leak, with which long runs end out of memory."""
    _leave_layout()
    values = yield _held_memory(session.device) - session.kept["memory"]
    problems = [f"rank {rank} keeps {kept >> 20:,} MiB" for rank, kept in enumerate(values) if kept > LARGEST_LEAK]
    return problems, f"at most {max(*values, 0) >> 20:,} MiB more than before"


def _held_memory(device: torch.device) -> int:
    """Allocated bytes of the GPU; on the CPU the resident bytes of this process."""
    return int(torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss)


def check_layout(session: Session, layout: dict[str, Any]) -> Steps:
    """Losses or gradients that depend on the parallel layout."""
    _leave_layout()
    loss, gradients = _Training(session, layout).gradients()
    right, expected = session.kept["reference"]
    errors = {name: relative_error(gradient, expected[name]) for name, gradient in gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    values = yield {"the loss": abs(loss - right) / max(abs(right), 0.1), f"the gradient of {worst}": errors[worst]}
    found = [(x, f"{name} differs by {x:.1%} on rank {i}") for i, v in enumerate(values) for name, x in v.items()]
    return [text for error, text in found if not error <= _DIFFERENCE], f"differences up to {max(found)[0]:.0e}"


def check_checkpoint(session: Session) -> Steps:
    """A resumed run that goes on with other weights."""
    _leave_layout()
    training, path = _Training(session, {}), session.folder / "checkpoint"
    saved = training.step()
    training.strategy.save(path)
    after = training.step()
    training.strategy.load(path)
    values = yield {
        "the step changes weights": saved != after,
        "loaded weights": training.digest() == saved,
        "weights after the next step": training.step() == after,
    }
    wrong = [f"{name}: not equal on rank {i}" for i, value in enumerate(values) for name, ok in value.items() if not ok]
    return wrong, "equal to the bit after loading, and after the next step"
