"""Marks of sharded weights: a model whose weights are loaded has those of one whose weights are drawn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import worker_config
from tests.support.ranks import run_ranks

HERE = "tests.modeling.test_layers:"


def marks(weights: bool) -> dict[str, Any]:
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(worker_config("packed", 64, megatron={"tensor_model_parallel_size": 2}))
    strategy.initialize(weights=weights)
    names = ("tensor_model_parallel", "partition_dim")
    parameters = [entry for chunk in strategy.chunks for entry in chunk.named_parameters()]
    return {name: [getattr(parameter, mark, None) for mark in names] for name, parameter in parameters}


@pytest.mark.layouts
def test_loaded_weights_are_marked_as_drawn_ones_are() -> None:
    drawn, loaded = (run_ranks(2, HERE + "marks", weights)[0] for weights in (True, False))
    assert loaded == drawn
    assert loaded["module.decoder.layers.0.mlp.linear_fc2.weight"] == [True, 1]
    assert sum(marked is True for marked, _ in loaded.values()) == 10
