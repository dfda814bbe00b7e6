"""Precisions of gradients and of the optimizer's state, and fp16's loss scale over a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_precision:"
BEFORE, AFTER = 12, 8
"""Steps before and after the checkpoint: the scale comes down in the first, and grows again in the second."""


def sums_of_gradients(distributed: bool) -> dict[str, Any]:
    """By setting: precision of the gradients' buffers, losses of some steps of a bf16 model, and the weights."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_steps import _mine
    from tests.support.models import fill, random_batch, worker_config

    found: dict[str, Any] = {}
    for setting in (None, True, False):
        megatron = {"use_distributed_optimizer": distributed}
        if setting is not None:
            megatron["grad_reduce_in_fp32"] = setting
        strategy = MegatronTrainStrategy(worker_config("packed", 32, megatron=megatron, dtype="bf16"))
        strategy.initialize()
        fill(strategy.chunks, 61)
        strategy.optimizer.reload_model_params()
        local = _mine(strategy, random_batch(3, 8, 20))
        plan = strategy.plan(gather_lengths(local))
        local = distribute(local, plan)
        losses = [strategy.train_step(local, plan, SFTLoss()).loss for _ in range(4)]
        dtypes = {str(buffer.grad_data.dtype) for chunk in strategy.chunks for buffer in chunk.buffers}
        found[str(setting)] = (dtypes, losses)
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_are_summed_in_the_precision_that_is_asked_for(distributed: bool, report: Any) -> None:
    first, second = run_ranks(2, HERE + "sums_of_gradients", distributed)
    assert first == second
    assert [first[name][0] for name in ("None", "True", "False")] == [
        {"torch.float32"},
        {"torch.float32"},
        {"torch.bfloat16"},
    ]
    exact, rounded = first["True"][1], first["False"][1]
    assert first["None"][1] == exact
    gap = max(abs(a / b - 1) for a, b in zip(rounded, exact, strict=True))
    report(f"bf16 gradients, distributed {distributed}: losses of four steps differ by {gap:.1e}")
    assert 0 < gap < 2e-2


def precisions_of_routers(_: None) -> dict[str, set[str]]:
    """Precisions of the scores that the routers of a bf16 model choose experts by, by moe_router_dtype."""
    from megatron.core.transformer.moe.router import TopKRouter

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_steps import _mine
    from tests.support.models import ARCHITECTURE, random_batch, worker_config

    routing: Any = TopKRouter.routing
    seen: set[str] = set()

    def noted(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(str(logits.dtype))
        return routing(self, logits, *args, **kwargs)

    TopKRouter.routing = noted  # type: ignore[method-assign]
    found: dict[str, set[str]] = {}
    for dtype in (None, "fp32", "fp64"):
        config = worker_config(
            "packed",
            32,
            architecture=ARCHITECTURE | {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}},
            megatron={} if dtype is None else {"moe_router_dtype": dtype},
            dtype="bf16",
        )
        strategy = MegatronTrainStrategy(config)
        strategy.initialize()
        local = _mine(strategy, random_batch(3, 4, 20))
        plan = strategy.plan(gather_lengths(local))
        seen.clear()
        assert strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss > 0
        found[str(dtype)] = set(seen)
    return found


def test_routers_compute_in_the_precision_that_is_asked_for() -> None:
    (found,) = run_ranks(1, HERE + "precisions_of_routers", None)
    assert found == {"None": {"torch.bfloat16"}, "fp32": {"torch.float32"}, "fp64": {"torch.float64"}}


def refused(_: None) -> list[str]:
    """What is said of an optimizer that is not there: by the strategy, and where there is a GPU without the package."""
    import torch

    from roll_batching.errors import LayoutError, RankError
    from roll_batching.modeling.builder import optimizer_config
    from roll_batching.settings import MegatronConfig, TrainingArgs
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    megatron = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    said = []
    try:
        MegatronTrainStrategy(worker_config("packed", 32, megatron=megatron, dtype="bf16")).initialize()
    except (LayoutError, RankError) as error:
        said.append(str(error))
    try:
        optimizer_config(TrainingArgs(), MegatronConfig(**megatron), torch.bfloat16, torch.device("cuda"))
    except LayoutError as error:
        said.append(str(error))
    return said


def test_an_optimizer_that_is_not_there_is_refused_at_construction() -> None:
    from tests.te.engine import engine_is_installed

    said = run_ranks(1, HERE + "refused")[0]
    assert "use_precision_aware_optimizer uses TransformerEngine's Adam, which runs on CUDA, not on cpu" in said[0]
    assert engine_is_installed() or "needs transformer-engine, which is not installed: install" in said[1]


def scales_over_a_checkpoint(payload: tuple[str, bool]) -> tuple[list[Any], list[Any], list[Any], bool]:
    """(scale, skipped) of steps before a checkpoint, after it, and after it was loaded; and whether weights agree."""
    import torch

    from roll_batching.losses import SFTLoss
    from tests.strategy.test_from_parts import _start
    from tests.strategy.test_optimizer_step import _adopted, _same, _weights

    folder, distributed = payload
    _start()
    training = {
        "fp16": True,
        "params_dtype": torch.float16,
        "initial_loss_scale": 2.0**26,
        "hysteresis": 2,
        "loss_scale_window": 5,
        "use_distributed_optimizer": distributed,
    }
    half = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16, "optimizer": training}

    def steps(strategy: Any, local: Any, plan: Any, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            scale = float(strategy.optimizer.get_loss_scale())
            found.append((scale, strategy.train_step(local, plan, SFTLoss()).skipped))
        return found

    strategy, local, plan = _adopted(**half)
    before = steps(strategy, local, plan, BEFORE)
    strategy.save(folder)
    after = steps(strategy, local, plan, AFTER)
    weights, skipped = _weights(strategy), strategy.skipped_steps
    again, local, plan = _adopted(**half)
    again.load(folder)
    loaded = steps(again, local, plan, AFTER)
    assert again.skipped_steps == skipped
    return before, after, loaded, _same(weights, _weights(again))


@pytest.mark.parametrize(("ranks", "distributed"), [(1, False), (2, False), (2, True)])
def test_the_loss_scale_goes_on_from_a_checkpoint(ranks: int, distributed: bool, tmp_path: Path) -> None:
    for before, after, loaded, same in run_ranks(
        ranks, HERE + "scales_over_a_checkpoint", (str(tmp_path / "saved"), distributed)
    ):
        assert before[0] == (2.0**26, True) and not before[-1][1], "no overflow, or no recovery, before the checkpoint"
        assert len({scale for scale, _ in after}) > 1, "the scale does not move after the checkpoint"
        assert loaded == after
        assert same
