"""`dtype: fp16`: steps against a plain Megatron loop, skipped steps, and the loss scale over a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_fp16:"
LENGTH, SAMPLES, STEPS = 20, 8, 7
SCALE = {"initial_loss_scale": 2.0**21, "hysteresis": 1, "loss_scale_window": 2}
"""Some first steps overflow; the scale grows again within `STEPS`."""


def _samples() -> Any:
    """Samples of one length, so that a pack of `LENGTH` tokens is one of them."""
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, 61, (LENGTH,), generator=g) for _ in range(SAMPLES)]
    fields = {"input_ids": rows, "response_mask": [torch.ones(LENGTH, dtype=torch.bool)] * SAMPLES}
    return SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))


def _ours(layout: dict[str, Any], cap: int = LENGTH, **training: Any) -> Any:
    """A strategy in fp16 with the weights of `fill`, its samples and their plan."""
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_steps import _mine
    from tests.support.models import fill, worker_config

    settings = {"max_grad_norm": 1.0, **SCALE, **training}
    strategy = MegatronTrainStrategy(worker_config("packed", cap, megatron=layout, training=settings, dtype="fp16"))
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    strategy.optimizer.reload_model_params()
    local = _mine(strategy, _samples())
    plan = strategy.plan(gather_lengths(local))
    return strategy, distribute(local, plan), plan


def _weights(chunks: Any) -> dict[str, torch.Tensor]:
    from roll_batching.modeling.head import gpt_of

    return {name: p.detach().float().clone() for chunk in chunks for name, p in gpt_of(chunk).named_parameters()}


# ---- against Megatron's own loop


def _megatron_steps(layout: dict[str, Any], rows: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """[(scale, loss, gradient norm or None)] and the weights of a loop without this package. A row is a micro-batch.

    Without sequence parallelism, which Megatron's local norms do not have.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from tests.support.own_model import build

    cp, tp_rank = mpu.get_context_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    distributed = layout.get("use_distributed_optimizer", False)
    scaling = {"lr": 1e-3, "clip_grad": 1.0, "use_distributed_optimizer": distributed, "min_loss_scale": 1.0, **SCALE}
    half = {"fp16": True, "params_dtype": torch.float16}
    chunks, optimizer = build(
        "rows" if cp > 1 else "stock", optimizer=scaling | half, ddp={"grad_reduce_in_fp32": True},
        pipeline_dtype=torch.float16, calculate_per_token_loss=True, **half,
    )  # fmt: skip
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    before = torch.arange(LENGTH).chunk(2 * cp)
    local = torch.cat([before[mpu.get_context_parallel_rank()], before[-1 - mpu.get_context_parallel_rank()]])
    positions = local if cp > 1 else torch.arange(LENGTH)
    hidden_from = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    columns = (61 + 61 % mpu.get_tensor_model_parallel_world_size()) // mpu.get_tensor_model_parallel_world_size()

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens = next(iterator)
        output = model(tokens[positions][None], positions[None], hidden_from)

        def loss(logits: torch.Tensor) -> Any:
            padded = torch.arange(columns) + tp_rank * columns >= 61
            logits = logits.float().masked_fill(padded, -1e4).transpose(0, 1)
            predicts = positions < LENGTH - 1
            losses = vocab_parallel_cross_entropy(logits, tokens[(positions + 1) % LENGTH][:, None])
            total = losses[predicts].sum() / (SAMPLES * (LENGTH - 1))
            return total, torch.zeros((), dtype=torch.int), total.detach().clone()

        return output, loss

    found = []
    for _ in range(STEPS):
        scale = float(optimizer.get_loss_scale())
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(rows), model=chunks, num_microbatches=len(rows),
            seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        total = torch.tensor(float(sum(losses)) if mpu.is_pipeline_last_stage() else 0.0)
        if tp_rank == 0:
            dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(total, dist.get_world_size() - mpu.get_tensor_model_parallel_world_size())
        stepped, norm, _ = optimizer.step()
        found.append((scale, float(total), float(norm) if stepped else None))
    return found, _weights(chunks)


def beside_megatron(layout: dict[str, Any]) -> Any:
    """Steps of our strategy and of the plain loop, and the worst gap of their weights, by the update of each."""
    from roll_batching.losses import SFTLoss

    strategy, local, plan = _ours(layout)
    start = _weights(strategy.chunks)
    results = [strategy.train_step(local, plan, SFTLoss()) for _ in range(STEPS)]
    ours = [(r.loss_scale, r.loss, None if r.skipped else r.grad_norm) for r in results]
    assert strategy.skipped_steps == sum(r.skipped for r in results)
    theirs, expected = _megatron_steps(layout, local.to_lists("input_ids"))
    weights = _weights(strategy.chunks)
    gaps = {n: float((weights[n] - w).norm() / (w - start[n]).norm()) for n, w in expected.items()}
    return ours, theirs, max(gaps.values()), max(gaps, key=lambda n: gaps[n])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2 distopt": (2, {"use_distributed_optimizer": True}),
    "cp2": (2, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_a_plain_megatron_loop(name: str, report: Any) -> None:
    ranks, layout = LAYOUTS[name]
    for ours, theirs, gap, worst in run_ranks(ranks, HERE + "beside_megatron", layout):
        scales, skips = ([step[0] for step in theirs], [step[2] is None for step in theirs])
        grows = any(after > before for before, after in zip(scales, scales[1:], strict=False))
        assert skips[0] and not skips[-1] and grows, f"{theirs}: no overflow, no recovery or no growth"
        assert [step[0] for step in ours] == scales and [step[2] is None for step in ours] == skips
        for (_, loss, norm), (_, expected, expected_norm) in zip(ours, theirs, strict=True):
            assert loss == pytest.approx(expected, rel=1e-3)
            assert norm is None or norm == pytest.approx(expected_norm, rel=1e-2)
        report(f"fp16, {name}: weights differ by {gap:.1e} of their update ({worst}), skips {sum(skips)}")
        assert gap < 0.1, worst
