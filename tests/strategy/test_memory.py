"""What a micro-batch leaves with the device is gone when the micro-batch is done, not when the step is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

COUNT = 8
"""Micro-batches of the step."""


class _LiveTables:
    """Counts the rotary tables whose memory lives, each time that new ones are made."""

    def __init__(self) -> None:
        from roll_batching.modeling.rotary import RotarySettings

        self.made: list[Any] = []
        self.most = 0
        tables = RotarySettings.tables

        def counted(settings: Any, *args: Any) -> Any:
            cos, sin = tables(settings, *args)
            self.made.append(torch.multiprocessing.reductions.StorageWeakRef(cos.untyped_storage()))
            self.most = max(self.most, self.alive())
            return cos, sin

        RotarySettings.tables = counted  # type: ignore[method-assign]

    def alive(self) -> int:
        return sum(not reference.expired() for reference in self.made)


def live_tables(megatron: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """(most tables alive at once, tables made, tables alive behind the schedule) of training and of a forward pass."""
    import torch.multiprocessing.reductions  # noqa: F401

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from tests.strategy.test_steps import _strategy
    from tests.support.models import ARCHITECTURE, random_batch

    strategy = _strategy(cap=20, megatron=megatron, architecture={**ARCHITECTURE, "num_layers": 4})
    batch = random_batch(3, 3 * COUNT, 20)
    lengths = gather_lengths(batch)
    plan = strategy.plan(lengths)
    assert plan.num_micro_batches >= COUNT
    found, kept = {}, []
    pack = strategy._pack

    def keeping(*args: Any, **options: Any) -> Any:
        kept.append(list(pack(*args, **options)))  # so that packs outlive the schedule
        return kept[-1]

    strategy._pack = keeping
    for name, run in {
        "training": lambda: strategy.train_step(batch, plan, SFTLoss()),
        "forward": lambda: strategy.compute_log_probs(batch, plan),
    }.items():
        tables = _LiveTables()
        run()
        found[name] = (tables.most, len(tables.made), tables.alive())
    return found


LAYOUTS = {
    "one stage": ({}, [1]),
    "1F1B": ({"pipeline_model_parallel_size": 2}, [2, 1]),
    # Five and three passes of a chunk in flight, over so many micro-batches.
    "interleaved": ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, [4, 3]),
}


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rotary_tables_live_as_long_as_their_micro_batch(name: str, recompute: str | None) -> None:
    megatron, in_flight = LAYOUTS[name]
    layout = {**megatron, "recompute_granularity": recompute}
    everyone = run_ranks(len(in_flight), "tests.strategy.test_memory:live_tables", layout)
    for found, most in zip(everyone, in_flight, strict=True):
        assert found["training"][0] <= most, found
        assert found["forward"][0] <= len(in_flight), found
        for alive, made, left in found.values():
            assert alive >= 1 and made >= COUNT
            assert left == 0


def live_packs(megatron: dict[str, Any]) -> tuple[int, int, int]:
    """(most packs alive at once, packs made, packs alive behind the step) of a training step."""
    from roll_batching.losses import SFTLoss
    from roll_batching.packing import StepPacks
    from roll_batching.samples import gather_lengths
    from tests.strategy.test_steps import _strategy
    from tests.support.models import ARCHITECTURE, random_batch

    strategy = _strategy(cap=20, megatron=megatron, architecture={**ARCHITECTURE, "num_layers": 4})
    batch = random_batch(3, 3 * COUNT, 20)
    plan = strategy.plan(gather_lengths(batch))
    made: list[Any] = []
    most, make = 0, StepPacks._make

    def alive() -> int:
        return sum(reference() is not None for reference in made)

    def counted(packs: Any, number: int) -> Any:
        nonlocal most
        made.append(weakref.ref(pack := make(packs, number)))
        most = max(most, alive())
        return pack

    StepPacks._make = counted  # type: ignore[method-assign]
    strategy.train_step(batch, plan, SFTLoss())
    return most, len(made), alive()


@pytest.mark.parametrize("name", ["one stage", "1F1B"])
def test_packs_live_as_long_as_their_micro_batch(name: str) -> None:
    megatron, in_flight = LAYOUTS[name]
    everyone = run_ranks(len(in_flight), "tests.strategy.test_memory:live_packs", megatron)
    for (most, made, left), passes in zip(everyone, in_flight, strict=True):
        assert made >= COUNT and left == 0
        assert most <= passes + 1, "those in flight, and the one that is made"
