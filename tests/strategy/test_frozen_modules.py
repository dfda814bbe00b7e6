"""`freeze_module_prefix`: frozen parameters stay, the gradients of the others are those of full training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_frozen_modules:"
PREFIXES = ("embedding", "decoder.layers.1.mlp", "decoder.final")


def _strategy(layout: Layout, prefixes: tuple[str, ...] | None) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_layouts import CAP, architecture
    from tests.support.models import fill, worker_config

    role = worker_config(
        "packed", CAP, architecture=architecture((4, layout.tied, False, False, 0)), megatron=layout.megatron()
    )
    model = role.model_args.model_copy(update={"freeze_module_prefix": prefixes})
    strategy = MegatronTrainStrategy(role.model_copy(update={"model_args": model}))
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    return strategy


def trained(payload: tuple[Layout, tuple[str, ...]]) -> dict[str, Any]:
    """Gradients of a step with and without frozen modules, and the parameters that moved."""
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_layouts import _batches, _loss
    from tests.support.models import global_name, whole_gradients

    layout, frozen = payload
    gradients, moved = [], set()
    for number, prefixes in enumerate((None, frozen)):
        meet(number)
        strategy = _strategy(layout, prefixes)
        gpts = [gpt_of(chunk) for chunk in strategy.chunks]
        before = [(global_name(gpt, n), p, p.detach().clone()) for gpt in gpts for n, p in gpt.named_parameters()]
        place, whole = strategy.layout, _batches()[0]
        local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
        plan = strategy.plan(gather_lengths(local))
        strategy.train_step(distribute(local, plan), plan, _loss())
        gradients.append(whole_gradients(strategy.chunks, 61, place.tp_rank, False))
        moved = {name for name, parameter, value in before if not torch.equal(parameter, value)}
        del strategy, gpts, before
        part()
    return {"full": gradients[0], "frozen": gradients[1], "moved": moved}


@pytest.mark.parametrize("layout", [Layout(pp=2, recompute=True, tied=True)], ids=str)
def test_the_others_train_as_before(layout: Layout) -> None:
    for found in run_ranks(layout.ranks, f"{HERE}trained", (layout, PREFIXES)):
        frozen = {name for name in found["full"] if name.startswith(PREFIXES)}
        assert len(frozen) == 4, frozen
        assert found["frozen"].keys() == found["full"].keys() - frozen
        for name in found["frozen"].keys() - {"spread"}:
            torch.testing.assert_close(found["frozen"][name], found["full"][name], atol=1e-6, rtol=1e-5)
        assert found["moved"] and not {name for name in found["moved"] if name.startswith(PREFIXES)}


def refused(prefixes: list[tuple[str, ...]]) -> list[str]:
    """Messages of strategies with these prefixes."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy.partial_training import freeze_modules

    strategy = _strategy(Layout(pp=2), None)
    assert gpt_of(strategy.chunks[0])
    messages = []
    for one in prefixes:
        try:
            freeze_modules(strategy.state, one)
        except RollBatchingError as error:
            messages.append(str(error))
    return messages


@pytest.mark.bad_input
def test_prefixes_that_freeze_nothing_or_everything(report: Any) -> None:
    first, second = run_ranks(2, f"{HERE}refused", [("embedding", "vision_model"), ("embedding", "decoder", "output")])
    assert first == second
    report("; ".join(first))
    assert "no parameter begins with 'vision_model'" in first[0] and "freezes every parameter" in first[1]


FIRST_STAGE = ("embedding", "decoder.layers.0", "decoder.layers.1")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2, recompute=True), Layout(pp=2, distopt=True)], ids=str)
def test_a_stage_may_be_frozen_as_a_whole(layout: Layout) -> None:
    for found in run_ranks(layout.ranks, f"{HERE}trained", (layout, FIRST_STAGE)):
        frozen = {name for name in found["full"] if name.startswith(FIRST_STAGE)}
        assert found["frozen"].keys() == found["full"].keys() - frozen
        for name in found["frozen"].keys() - {"spread"}:
            torch.testing.assert_close(found["frozen"][name], found["full"][name], atol=1e-6, rtol=1e-5)
        assert not {name for name in found["moved"] if name.startswith(FIRST_STAGE)}
