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


# ---- skipped steps


def overflows(layout: dict[str, Any]) -> list[Any]:
    """(skipped, scale, lr, whether weights stayed) of a good step, one that overflows on rank 1, and a good one."""
    import math

    from tests.strategy.test_optimizer_step import _Steep

    schedule = {"lr_scheduler_type": "linear", "max_steps": 10, "initial_loss_scale": 2.0**12}
    strategy, local, plan = _ours(layout, **schedule)
    found = []
    for steepness in (1.0, math.inf, 1.0):
        before = _weights(strategy.chunks)
        result = strategy.train_step(local, plan, _Steep(steepness, here=torch.distributed.get_rank() == 1))
        after = _weights(strategy.chunks)
        kept = all(torch.equal(after[name], value) for name, value in before.items())
        assert result.skipped is math.isnan(result.grad_norm)
        found.append((result.skipped, result.loss_scale, result.lr, kept))
    return [*found, strategy.skipped_steps, strategy.scheduler.num_steps]


@pytest.mark.parametrize("name", [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(name: str) -> None:
    for first, second, third, skipped, schedule in run_ranks(2, HERE + "overflows", LAYOUTS[name][1]):
        assert first == (False, 2.0**12, pytest.approx(1e-3), False)
        # The schedule counts steps that were not skipped, as in Megatron's training loop.
        assert second == (True, 2.0**12, pytest.approx(0.9e-3), True)
        assert third == (False, 2.0**11, pytest.approx(0.9e-3), False)
        assert (skipped, schedule) == (1, 2)


def stuck(training: dict[str, Any]) -> tuple[list[float], str]:
    """The scales of steps that all overflow, and the error that ends them."""
    import math

    from roll_batching.errors import LossError
    from tests.strategy.test_optimizer_step import _Steep

    strategy, local, plan = _ours({}, **training)
    scales: list[float] = []
    try:
        for _ in range(20):
            scales.append(float(strategy.optimizer.get_loss_scale()))
            strategy.train_step(local, plan, _Steep(math.inf, here=torch.distributed.get_rank() == 1))
    except LossError as error:
        return scales, str(error)
    return scales, "nothing"


@pytest.mark.parametrize(
    ("training", "falls"),
    [({"initial_loss_scale": 4.0, "min_loss_scale": 2.0}, [4.0]), ({"loss_scale": 8.0}, [])],
)
def test_training_ends_where_the_scale_cannot_fall(training: dict[str, Any], falls: list[float]) -> None:
    lowest = training.get("loss_scale", training.get("min_loss_scale"))
    for scales, error in run_ranks(2, HERE + "stuck", training):
        assert scales == [*falls, *[lowest] * 10]
        assert f"10 steps in a row overflow at a loss scale of {lowest:g}, which cannot fall" in error


# ---- checkpoints


def resumed(payload: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[list[Any], list[Any], bool]:
    """Steps after a checkpoint inside the window of the scale's growth, those of a strategy that loads it, and
    whether the weights are equal to the bit."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_steps import _mine
    from tests.support.models import worker_config

    folder, layout, model = payload

    def begin() -> Any:
        training = {**SCALE, "initial_loss_scale": 2.0**19, "loss_scale_window": 4}
        config = worker_config("packed", 2 * LENGTH, megatron=layout, training=training, dtype="fp16")
        model_args = config.model_args.model_validate(config.model_args.model_dump() | model)
        strategy = MegatronTrainStrategy(config.model_copy(update={"model_args": model_args}))
        strategy.initialize()
        local = _mine(strategy, _samples())
        plan = strategy.plan(gather_lengths(local))
        return strategy, distribute(local, plan), plan

    def steps(strategy: Any, local: Any, plan: Any, count: int) -> list[Any]:
        results = [strategy.train_step(local, plan, SFTLoss()) for _ in range(count)]
        return [
            (result.loss, result.grad_norm if not result.skipped else None, result.loss_scale) for result in results
        ]

    strategy, local, plan = begin()
    before = steps(strategy, local, plan, 6)
    strategy.save(folder)
    after, weights = steps(strategy, local, plan, 6), _weights(strategy.chunks)
    again, local, plan = begin()
    again.load(folder)
    assert again.skipped_steps == sum(norm is None for _, norm, _ in before)
    found = steps(again, local, plan, 6)
    same = all(torch.equal(value, weights[name]) for name, value in _weights(again.chunks).items())
    assert len({scale for *_, scale in after}) > 1, "the scale does not move after the checkpoint"
    return after, found, same


LAST_STAGE = "decoder.layers.1,decoder.final_layernorm,output_layer"
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
NO_EXPERTS = "embedding,output_layer,decoder.final_layernorm," + ",".join(
    f"decoder.layers.{layer}.{part}"
    for layer in (0, 1)
    for part in ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp.router")
)
RESUMED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "dp2 distopt": (2, {"use_distributed_optimizer": True}, {}),
    "experts": (2, {"expert_model_parallel_size": 2}, {"architecture": {"moe": EXPERTS}}),
    "experts alone": (
        2,
        {"expert_model_parallel_size": 2},
        {"architecture": {"moe": EXPERTS}, "freeze_module_prefix": NO_EXPERTS},
    ),
    "a frozen last stage": (2, LAYOUTS["pp2"][1], {"freeze_module_prefix": LAST_STAGE}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_within_the_window_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    from tests.support.models import ARCHITECTURE

    ranks, layout, model = RESUMED[name]
    if "architecture" in model:
        model = model | {"architecture": ARCHITECTURE | model["architecture"]}
    for after, found, same in run_ranks(ranks, HERE + "resumed", (str(tmp_path / "saved"), layout, model)):
        assert found == after
        assert same
