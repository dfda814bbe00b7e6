"""The optimizer's step: skipped alike everywhere when the gradient's norm is not finite, and what is freed when."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

TRAJECTORY = 18
"""Steps from a loss scale of 2^32 to well behind the first that fits fp16."""


def _batching() -> Any:
    from roll_batching.planning import BatchingSpec
    from roll_batching.settings import BatchingConfig

    one = BatchingSpec(max_tokens=32)
    return BatchingConfig(train=one, infer=one)


def _adopted(**options: Any) -> Any:
    """A strategy over a caller's model, and its share of some samples."""
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import random_batch
    from tests.support.own_model import build

    taken = {name: options.pop(name) for name in ("scheduler_unit",) if name in options}
    make_scheduler = options.pop("scheduler", lambda optimizer: None)
    chunks, optimizer = build("packed", rotate="core", **options)
    if options.get("fp16"):
        chunks[0].config.grad_scale_func = optimizer.scale_loss
    strategy = MegatronTrainStrategy.from_parts(
        chunks, optimizer, _batching(), scheduler=make_scheduler(optimizer), vocab_size=61, **taken
    )
    whole = random_batch(3, 6, 20)
    local = whole.select(torch.arange(strategy.layout.dp_rank, len(whole), strategy.layout.dp_size))
    plan = strategy.plan(gather_lengths(local))
    return strategy, distribute(local, plan), plan


def _weights(strategy: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in strategy.chunks for p in chunk.parameters()]


def _same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- fp16: the loss scale comes down as it does in a plain Megatron loop


def loss_scales(distributed: bool) -> tuple[list[Any], list[Any], bool]:
    """[(scale before the step, whether it was skipped)] of a plain loop and of ours, and whether weights agree."""
    from roll_batching.losses import SFTLoss
    from tests.strategy.test_from_parts import _start

    _start()
    training = {
        "fp16": True,
        "params_dtype": torch.float16,
        "initial_loss_scale": 2.0**32,
        "hysteresis": 1,
        "loss_scale_window": 3,
        "use_distributed_optimizer": distributed,
    }
    half = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16, "optimizer": training}
    found: list[Any] = []
    for plain in (True, False):
        strategy, local, plan = _adopted(**half)
        steps = []
        for _ in range(TRAJECTORY):
            scale = float(strategy.optimizer.get_loss_scale())
            if plain:
                strategy.chunks[0].zero_grad_buffer()
                strategy.optimizer.zero_grad()
                strategy.forward_backward(local, plan, SFTLoss())
                stepped, _, _ = strategy.optimizer.step()
                steps.append((scale, not stepped))
            else:
                steps.append((scale, strategy.train_step(local, plan, SFTLoss()).skipped))
        found.append((steps, _weights(strategy), strategy.skipped_steps))
    (plain_steps, plain_weights, _), (steps, weights, skipped) = found
    assert skipped == sum(skip for _, skip in steps)
    return plain_steps, steps, _same(plain_weights, weights)


@pytest.mark.parametrize(("ranks", "distributed"), [(1, False), (2, False), (2, True)])
def test_a_dynamic_loss_scale_comes_down_as_in_a_plain_loop(ranks: int, distributed: bool) -> None:
    everyone = run_ranks(ranks, "tests.strategy.test_optimizer_step:loss_scales", distributed)
    plain, ours, same_weights = everyone[0]
    assert plain[0] == (2.0**32, True) and not all(skip for _, skip in plain), (
        "no overflow, or no recovery, in the plain loop"
    )
    assert ours == plain
    assert same_weights
    assert all(other[1] == ours for other in everyone)


# ---- without a scale: a norm that is not finite skips the step, on all ranks


class _Steep:
    """A finite loss whose gradient is `steepness` times the mean log-prob's, on the ranks that `where` names."""

    needs, masks = {"log_probs"}, ("response_mask",)

    def __init__(self, steepness: float, here: bool = True) -> None:
        self.steepness, self.here = steepness, here

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        x = tokens.mean(tokens.log_probs)
        if self.here:
            x.register_hook(lambda gradient: gradient * self.steepness)
        return LossOutput(x)


def steep_steps(sizes: dict[str, int]) -> dict[str, Any]:
    from tests.strategy.test_from_parts import _start

    _start(**sizes)
    found = {}
    for steepness in (1e16, 1e24, math.inf, math.nan):
        for clip in (0.0, 1.0):
            strategy, local, plan = _adopted(optimizer={"clip_grad": clip})
            before = _weights(strategy)
            result = strategy.train_step(local, plan, _Steep(steepness, here=torch.distributed.get_rank() == 1))
            kept = _same(before, _weights(strategy))
            moments = any(part.optimizer.state for part in strategy.optimizer.chained_optimizers)
            found[f"{steepness} {clip}"] = (result.skipped, strategy.skipped_steps, kept, moments, result.grad_norm)
            again = strategy.train_step(local, plan, _Steep(1.0))
            assert not again.skipped and math.isfinite(again.grad_norm)
    return found


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}])
def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks(sizes: dict[str, int]) -> None:
    everyone = run_ranks(2, "tests.strategy.test_optimizer_step:steep_steps", sizes)
    for found in everyone:
        for case, (skipped, count, kept, moments, norm) in found.items():
            finite = case.startswith("1e+16")
            assert (skipped, count, kept, moments) == (not finite, int(not finite), not finite, finite), case
            assert math.isfinite(norm) if finite else math.isnan(norm), case


def a_frozen_stage(_: None) -> list[Any]:
    """(skipped, whether weights stayed) of a step and of a steep one; the first stage has nothing to train."""
    from tests.strategy.test_from_parts import _start

    _start(pp=2)
    strategy, local, plan = _adopted(frozen=torch.distributed.get_rank() == 0)
    found = []
    for steepness in (1.0, math.inf):
        before = _weights(strategy)
        result = strategy.train_step(local, plan, _Steep(steepness))
        found.append((result.skipped, _same(before, _weights(strategy)), result.lr))
    return found


def test_a_stage_without_trainable_parameters_takes_part() -> None:
    first, last = run_ranks(2, "tests.strategy.test_optimizer_step:a_frozen_stage")
    assert first == [(False, True, 1e-3), (True, True, 1e-3)]
    assert last == [(False, False, 1e-3), (True, True, 1e-3)]


# ---- a caller's schedule counts what the caller says


def _schedule(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=24,
        lr_decay_steps=100,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def scheduled_steps(_: None) -> dict[str, Any]:
    from roll_batching.errors import RollBatchingError
    from tests.strategy.test_from_parts import _start

    _start()
    found: dict[str, Any] = {}
    for unit in ("steps", "samples"):
        strategy, local, plan = _adopted(scheduler=_schedule, scheduler_unit=unit)
        rates = [strategy.train_step(local, plan, _Steep(1.0)).lr for _ in range(3)]
        skipped = strategy.train_step(local, plan, _Steep(math.inf))
        found[unit] = [*rates, skipped.lr, strategy.train_step(local, plan, _Steep(1.0)).lr]
    for options in ({}, {"scheduler_unit": "epochs"}):
        try:
            _adopted(scheduler=_schedule, **options)
        except RollBatchingError as error:
            found[str(options)] = str(error)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_counts_steps_or_samples_as_the_caller_says(ranks: int) -> None:
    for found in run_ranks(ranks, "tests.strategy.test_optimizer_step:scheduled_steps"):
        # Six samples a step, 24 to warm up; a skipped step does not count.
        assert found["samples"] == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 7.5e-4])
        assert found["steps"] == pytest.approx([0, 1e-3 / 24, 2e-3 / 24, 3e-3 / 24, 3e-3 / 24])
        assert "pass 'samples' if its lr_warmup_steps" in found["{}"]
        assert "scheduler_unit='epochs' is unknown" in found["{'scheduler_unit': 'epochs'}"]


def no_loss_scale(_: None) -> str:
    from roll_batching.errors import LayoutError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build

    _start()
    half = {"fp16": True, "params_dtype": torch.float16}
    try:
        MegatronTrainStrategy.from_parts(*build("packed", rotate="core", optimizer=half, **half), _batching())
    except LayoutError as error:
        return str(error)
    return "nothing"


def test_a_loss_scale_that_never_reaches_the_loss_is_refused() -> None:
    assert (
        "set config.grad_scale_func=optimizer.scale_loss"
        in run_ranks(1, "tests.strategy.test_optimizer_step:no_loss_scale")[0]
    )


# ---- a new phase frees the old optimizer before it builds its own


def _optimizer_tensors(strategy: Any) -> dict[str, Any]:
    """Weak references to the optimizers and all that they hold, the weights themselves left out."""
    weights = {p.untyped_storage().data_ptr() for chunk in strategy.chunks for p in chunk.parameters()}
    found: dict[str, Any] = {}
    for part in strategy.optimizer.chained_optimizers:
        found["optimizer"] = weakref.ref(part)
        for i, (parameter, state) in enumerate(part.optimizer.state.items()):
            found |= {f"{i} {name}": weakref.ref(value) for name, value in state.items() if torch.is_tensor(value)}
            if parameter.untyped_storage().data_ptr() not in weights:
                found[f"{i} fp32 copy"] = weakref.ref(parameter)
    return found


def _buffers(strategy: Any) -> set[int]:
    return {buffer.grad_data.data_ptr() for chunk in strategy.chunks for buffer in chunk.buffers}


def phases(options: dict[str, Any]) -> tuple[list[str], int, bool]:
    """(what of the old optimizer lives when the new one is built, how much was watched, whether buffers stayed)."""
    from roll_batching.losses import SFTLoss
    from roll_batching.modeling import builder
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from tests.strategy.test_steps import _mine, _strategy
    from tests.support.models import random_batch

    training = {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_steps": 4}
    strategy = _strategy(training=training, **options)
    local = _mine(strategy, random_batch(3, 6, 20))
    plan = strategy.plan(gather_lengths(local))
    local = distribute(local, plan)
    strategy.train_step(local, plan, SFTLoss())
    old, buffers = _optimizer_tensors(strategy), _buffers(strategy)
    alive: list[str] = []
    build = builder.build_optimizer

    def watched(*args: Any) -> Any:
        alive.extend(name for name, reference in old.items() if reference() is not None)
        return build(*args)

    builder.build_optimizer = watched
    strategy.start_phase(TrainingArgs(learning_rate=5e-4))
    assert not strategy.train_step(local, plan, SFTLoss()).skipped
    return alive, len(old), _buffers(strategy) == buffers


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_new_phase_frees_the_old_optimizer_first(dtype: str, distributed: bool) -> None:
    options = {"dtype": dtype, "megatron": {"use_distributed_optimizer": distributed}}
    for alive, watched, same_buffers in run_ranks(
        1 + distributed, "tests.strategy.test_optimizer_step:phases", options
    ):
        assert watched > 20
        assert alive == []
        assert same_buffers
