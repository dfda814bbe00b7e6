"""Mixtures of experts in an environment without TransformerEngine, by every way to make a model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs.launch.commands import trained
from tests.support.ranks import run_ranks

HERE = "tests.modeling.test_without_engine:"
MOE = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
OWN = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
}


def trained_by_a_strategy(_: None) -> float:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 64, architecture=ARCHITECTURE | {"moe": MOE}))
    strategy.initialize()
    return _gradient_norm(strategy)


def trained_from_parts(_: None) -> float:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    _start()
    parts = build("packed", **OWN)
    return _gradient_norm(MegatronTrainStrategy.from_parts(*parts, _batching("packed")))


def trained_by_a_host(_: None) -> float:
    """Megatron's own layer spec, whose attention cores are replaced in the built model."""
    from roll_batching.modeling.spec import replace_local_cores
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    _start()
    chunks, optimizer = build("stock", **OWN)
    assert replace_local_cores(chunks) == 2
    return _gradient_norm(MegatronTrainStrategy.from_parts(chunks, optimizer, _batching("packed")))


def trained_by_a_loop(_: None) -> float:
    """A caller's model in the caller's loop, without a strategy."""
    from roll_batching.packing import PackLayout, packed_params
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build

    _start()
    (model,), _ = build("packed", wrapped=False, **OWN)
    segments = np.array([5, 3])
    layout = PackLayout(lengths=segments, segments=segments, cp_size=1)
    params = packed_params(layout, 0, torch.device("cpu"), attention="dense")
    ids = torch.arange(8)[None]
    model(ids, ids, None, packed_seq_params=params).logsumexp(-1).sum().backward()
    return float(sum(p.grad.norm() for p in model.parameters() if p.grad is not None))


def _gradient_norm(strategy: Any) -> float:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from tests.support.models import random_batch

    batch = random_batch(3, 4, 20)
    return float(strategy.train_step(batch, strategy.plan(gather_lengths(batch)), SFTLoss()).grad_norm)


@pytest.mark.parametrize("way", [trained_by_a_strategy, trained_from_parts, trained_by_a_host, trained_by_a_loop])
def test_a_mixture_trains_in_the_installed_environment(way: Any) -> None:
    (norm,) = run_ranks(1, HERE + way.__name__)
    assert norm > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="TP2", marks=pytest.mark.slow),
        pytest.param({"expert_model_parallel_size": 2}, id="EP2"),
    ],
)
def test_a_job_with_experts_trains_in_the_installed_environment(tmp_path: Any, layout: dict[str, Any]) -> None:
    code, said = trained(
        tmp_path,
        max_steps=1,
        eval_samples=0,
        output_dir="runs",
        actor_train__model_args__architecture__moe=MOE,
        actor_train__strategy_args__strategy_config=layout,
    )
    assert code == 0, said
    metrics = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in metrics)
