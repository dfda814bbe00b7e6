"""FLOPs of a plan, with and without shared prefixes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from roll_batching.modeling.cost import plan_flops
from roll_batching.planning import FlopsCost, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings.megatron_config import ClusterConfig
from roll_batching.settings.model import ArchitectureConfig
from roll_batching.settings.model_cost import architecture_pack_times
from tests.support.ranks import run_ranks


def test_flops_of_a_plan_count_shared_prefixes_once_and_unshared_flops_for_each_sample() -> None:
    cost = FlopsCost(linear=10, quadratic=3)
    rules = PlanConstraints(dp_size=1, max_tokens=400, tp_size=2)
    prefixes = SharedPrefixes.of([*range(50), 98, 99, *range(50), 97], [52, 51])
    plan = plan_step([52, 51], rules, prefixes=prefixes)
    assert plan.report.shared_tokens == 49
    whole = 10.0 * (52 + 51) + 3.0 * (52**2 + 51**2)
    assert plan_flops(plan, cost, rules, sharing=False) == plan_flops(plan_step([52, 51], rules), cost, rules)
    assert plan_flops(plan, cost, rules, sharing=False) == pytest.approx(2 * whole)
    assert plan_flops(plan, cost, rules) == pytest.approx(2 * (whole - 10.0 * 49 - 3.0 * 49**2))


RATES = {"matmul_rate": 3e14, "devices_per_node": 4}
MIXTURE = {
    "num_layers": 4,
    "kv_channels": 12,
    "moe": {
        "num_experts": 4,
        "router_topk": 3,
        "ffn_hidden_size": 24,
        "shared_expert_ffn_hidden_size": 40,
        "layer_freq": 2,
    },
}


def times_of_a_strategy(architecture: dict[str, Any]) -> tuple[ArchitectureConfig, PackTimes]:
    """The architecture and the predicted times of a strategy whose `cluster` keys are RATES, TP 2."""
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.experts import let_experts_run
    from tests.support.models import ARCHITECTURE, worker_config

    start_processes()
    let_experts_run()
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": "auto"}
    config = worker_config(
        "packed", 64, architecture=ARCHITECTURE | architecture, megatron=layout | {"cluster": dict(RATES)}
    )
    strategy = MegatronInferStrategy(config, seed=1)
    strategy.initialize()
    times = strategy.planner.times
    assert times is not None and config.model_args.architecture is not None
    return config.model_args.architecture, times


@pytest.mark.parametrize("architecture", [{}, MIXTURE], ids=["dense", "mixture"])
def test_times_of_settings_are_those_of_the_built_model(architecture: dict[str, Any]) -> None:
    """The rates are those of the key `cluster`."""
    for built, times in run_ranks(4, "tests.modeling.test_cost:times_of_a_strategy", architecture):
        assert times == architecture_pack_times(built, tp_size=2, cluster=replace(Cluster(), **RATES))
        assert times.cluster.matmul_rate == 3e14 and times.cluster.attention_rate == Cluster().attention_rate


def test_rates_of_the_keys_have_the_defaults_of_the_cluster() -> None:
    assert ClusterConfig().rates == Cluster()
    assert list(ClusterConfig.model_fields) == [one.name for one in fields(Cluster)]
