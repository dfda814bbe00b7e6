"""FLOPs of a plan, with and without shared prefixes."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from roll_batching.modeling.cost import model_cost, plan_flops
from roll_batching.planning import FlopsCost, ParallelDims, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings.megatron_config import ClusterConfig
from roll_batching.settings.model import ArchitectureConfig
from roll_batching.settings.model_cost import architecture_cost, architecture_pack_times, config_exchange
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
    import torch.distributed as dist

    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.models import ARCHITECTURE, worker_config

    start_processes()
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": "auto"}
    config = worker_config(
        "packed", 64, architecture=ARCHITECTURE | architecture, megatron=layout | {"cluster": dict(RATES)}
    )
    strategy = MegatronInferStrategy(config, seed=1)
    strategy.initialize()
    times = strategy.planner.times
    assert times is not None and config.model_args.architecture is not None
    dist.barrier()  # rank 0 has the store, from which others may still read
    return config.model_args.architecture, times


LATENT = {
    "num_query_groups": None,
    "multi_latent_attention": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    },
}


DELTA_NETS = {
    "num_layers": 4,
    "gated_delta_net": {
        "num_key_heads": 4,
        "num_value_heads": 8,
        "key_head_dim": 6,
        "value_head_dim": 5,
        "layers": (1, 1, 1, 0),
    },
}
HYBRID_LAYERS = {
    "num_layers": 4,
    "hybrid": {
        "pattern": "ME*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "mamba_num_groups": 2,
        "mamba_state_dim": 5,
        "moe_latent_size": 10,
    },
    "moe": {**MIXTURE["moe"], "layer_freq": [0, 1, 0, 0]},  # type: ignore[dict-item]
}


def cost_of_a_strategy(architecture: dict[str, Any]) -> tuple[ArchitectureConfig, Any]:
    """The architecture and the planner's cost of a strategy with two pipeline stages, the first of one layer."""
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.models import ARCHITECTURE, worker_config

    layout = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}
    config = worker_config("packed", 64, architecture=ARCHITECTURE | architecture, megatron=layout)
    strategy = MegatronInferStrategy(config, seed=1)
    strategy.initialize()
    assert config.model_args.architecture is not None
    return config.model_args.architecture, strategy.planner.cost


def test_the_cost_of_settings_is_that_of_a_built_model_with_one_part_per_layer() -> None:
    for built, cost in run_ranks(2, "tests.modeling.test_cost:cost_of_a_strategy", HYBRID_LAYERS):
        assert replace(cost, chunks=None) == architecture_cost(built)
        assert len(cost.chunks.linear) == 2 and cost.chunks.quadratic[0] == 0 < cost.chunks.quadratic[1]


@pytest.mark.parametrize(
    "architecture",
    [{}, MIXTURE, LATENT, DELTA_NETS, HYBRID_LAYERS],
    ids=["dense", "mixture", "latent", "delta nets", "one part per layer"],
)
def test_times_of_settings_are_those_of_the_built_model(architecture: dict[str, Any]) -> None:
    """The rates are those of the key `cluster`."""
    for built, times in run_ranks(4, "tests.modeling.test_cost:times_of_a_strategy", architecture):
        assert times == architecture_pack_times(built, ParallelDims(tp_size=2), cluster=replace(Cluster(), **RATES))
        assert times.cluster.matmul_rate == 3e14 and times.cluster.attention_rate == Cluster().attention_rate


def test_rates_of_the_keys_have_the_defaults_of_the_cluster() -> None:
    assert ClusterConfig().rates == Cluster()
    assert set(ClusterConfig.model_fields) == {one.name for one in fields(Cluster)} | {"file", "device"}


def test_the_cost_of_multi_latent_attention_counts_its_projections_and_its_two_head_dimensions() -> None:
    """DeepSeek-V3: 36.6 billion parameters that a token visits, the head included (its publisher says 37 billion)."""
    experts = [0] * 3 + [1] * 58
    config = SimpleNamespace(
        num_moe_experts=256, moe_router_topk=8, moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=experts, num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128,
        num_query_groups=128, kv_channels=192, gated_linear_unit=True, multi_latent_attention=True, q_lora_rank=1536,
        kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    cost = model_cost(config, 129280, SimpleNamespace(tp_size=1, cp_size=1, pp_size=1))
    projections = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts_of_a_token = 58 * (9 * 3 * 7168 * 2048 + 7168 * 256)
    parameters = 61 * projections + 3 * 3 * 7168 * 18432 + experts_of_a_token + 7168 * 129280
    assert cost.linear == 6 * parameters and round(parameters / 1e9, 1) == 36.6
    assert cost.quadratic == 6 * 61 * 128 * (192 + 128) // 2


@pytest.mark.parametrize("gate", [False, True])
def test_the_cost_of_gated_delta_nets_counts_their_projections_and_states(gate: bool) -> None:
    """Two of three layers; their tokens have no pairs."""
    delta = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6, "conv_kernel_dim": 4}
    shape = {"vocab_size": 100, "hidden_size": 32, "num_layers": 3, "num_attention_heads": 4, "num_query_groups": 2}
    settings = ArchitectureConfig.model_validate(
        {
            **shape,
            "ffn_hidden_size": 48,
            "attention_output_gate": gate,
            "gated_delta_net": {"layers": [1, 0, 1], **delta},
        }
    )
    config = SimpleNamespace(
        **{**shape, "ffn_hidden_size": 48, "kv_channels": 8, "gated_linear_unit": True, "num_moe_experts": None},
        moe_layer_freq=1, multi_latent_attention=False, attention_output_gate=gate, linear_attention_freq=[1, 0, 1],
        **{f"linear_{name}": size for name, size in delta.items()},
    )  # fmt: skip
    cost = model_cost(config, 100, SimpleNamespace(tp_size=1, cp_size=1, pp_size=1))
    attention = 32 * (2 * 32 + 2 * 16) + gate * 32 * 32
    net = 32 * (2 * 16 + 2 * 24 + 2 * 4) + (2 * 16 + 24) * 4 + 3 * 4 * 8 * 6 + 24 * 32
    assert cost.linear == 6 * (attention + 2 * net + 3 * 3 * 32 * 48 + 32 * 100)
    assert cost.quadratic == 6 * 2 * 32 // 2
    assert architecture_cost(settings) == cost


def test_the_cost_of_layers_with_one_part_each_counts_each_by_its_letter() -> None:
    """Nemotron 3 Nano: 3.25 billion products per token; its publisher says 3.2 billion active parameters."""
    from roll_batching.settings.hybrid_cost import HybridSizes, hybrid_cost
    from tests.huggingface.published_nemotron import NEMOTRON
    from tests.huggingface.test_config_json import architecture_of

    settings = architecture_of(NEMOTRON["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
    mamba = 2688 * (2 * 4096 + 2 * 1024 + 64) + 4096 * 2688 + (4096 + 2048) * 4 + 2 * 4096 * 128
    experts = 2688 * 128 + 2 * 2688 * (6 * 1856 + 3712)
    attention = 2688 * (2 * 4096 + 2 * 256)
    parameters = 23 * (mamba + experts) + 6 * attention + 2688 * 131072
    cost = architecture_cost(settings)
    assert cost.linear == 6 * parameters and round(parameters / 1e9, 2) == 3.25
    assert cost.quadratic == 6 * 6 * 4096
    sizes = HybridSizes.of_settings(settings)
    halves = hybrid_cost(sizes, ranks=1, chunks=[range(26), range(26, 52)]).chunks
    assert halves is not None and sum(halves.linear) == 2 * parameters and sum(halves.quadratic) == 2 * 6 * 4096
    assert halves.linear[1] - halves.linear[0] > 2688 * 131072  # the head is in the last one


def test_gated_delta_nets_by_their_frequency_or_in_a_list() -> None:
    """Megatron's TransformerConfig takes both: 4 is one layer of attention behind three others."""
    sizes = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 6, "value_head_dim": 5, "conv_kernel_dim": 4}
    config = SimpleNamespace(num_layers=9, tensor_model_parallel_size=1, **{f"linear_{k}": v for k, v in sizes.items()})
    found = []
    for freq in (4, [1, 1, 1, 0, 1, 1, 1, 0, 1]):
        config.linear_attention_freq = freq
        found.append(config_exchange(config, "auto"))
    assert found[0] == found[1] and found[0]["attention_layers"] == 2 and found[0]["recurrent"].layers == 7
