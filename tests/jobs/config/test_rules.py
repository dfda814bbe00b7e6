"""Each rule between keys: what breaks it, the key that is blamed, the words that matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from tests.jobs.config.broken_batching import ARCHITECTURE, BROKEN_BATCHING, DYNAMIC, LAYOUT, SAMPLING
from tests.jobs.config.jobs import BASE, changed

ROOT = Path(__file__).parents[3]

BROKEN = BROKEN_BATCHING | {
    "VPP without PP": (
        {f"{LAYOUT}.virtual_pipeline_model_parallel_size": 2},
        {f"{LAYOUT}.virtual_pipeline_model_parallel_size": "pipeline_model_parallel_size"},
    ),
    "two ways to normalise": ({"reward_norm": "batch", "norm_std_type": "batch"}, {"reward_norm": "short form"}),
    "grpo that shifts": ({"reward_norm": "group", "reward_shift": True}, {"reward_shift": "reinforce"}),
    "no difficulty is left": (
        {"difficulty_mask": True, "difficulty_low_threshold": 0.9, "difficulty_high_threshold": 0.1},
        {"difficulty_low_threshold": "no prompt"},
    ),
    "group size without VPP": (
        {f"{LAYOUT}.microbatch_group_size_per_vp_stage": 4},
        {f"{LAYOUT}.microbatch_group_size_per_vp_stage": "virtual_pipeline"},
    ),
    "overlap without distributed optimizer": (
        {f"{LAYOUT}.overlap_param_gather": True},
        {f"{LAYOUT}.overlap_param_gather": "use_distributed_optimizer"},
    ),
    "recompute method without granularity": (
        {f"{LAYOUT}.recompute_method": "uniform"},
        {f"{LAYOUT}.recompute_method": "recompute_granularity: full"},
    ),
    "world size": (
        {
            "actor_train.device_mapping": "0-5",
            f"{LAYOUT}.tensor_model_parallel_size": 4,
            f"{ARCHITECTURE}.num_query_groups": 4,
        },
        {"actor_train.device_mapping": "6 processes do not divide"},
    ),
    "layers": (
        {f"{LAYOUT}.pipeline_model_parallel_size": 8},
        {f"{ARCHITECTURE}.num_layers": "4 layers do not divide into PP x VPP = 8"},
    ),
    "heads and query groups": (
        {
            f"{LAYOUT}.tensor_model_parallel_size": 4,
            f"{ARCHITECTURE}.num_attention_heads": 6,
            f"{ARCHITECTURE}.num_query_groups": 3,
            f"{ARCHITECTURE}.kv_channels": 16,
        },
        {
            f"{ARCHITECTURE}.num_attention_heads": "6 heads do not divide among TP = 4",
            f"{ARCHITECTURE}.num_query_groups": "3 query groups and TP = 4 ranks: one must be a multiple of the other",
        },
    ),
    "hidden size": ({f"{ARCHITECTURE}.hidden_size": 66}, {f"{ARCHITECTURE}.hidden_size": "set kv_channels"}),
    "experts without a mixture": (
        {f"{LAYOUT}.expert_model_parallel_size": 2},
        {f"{LAYOUT}.expert_model_parallel_size": "architecture.moe"},
    ),
    "experts with tensor parallelism alone": (
        {f"{LAYOUT}.tensor_model_parallel_size": 2, f"{ARCHITECTURE}.moe": {"num_experts": 4}},
        {f"{LAYOUT}.sequence_parallel": "set it to true"},
    ),
    "reference in an impossible layout": (
        {"reference.strategy_args.strategy_config": {"virtual_pipeline_model_parallel_size": 2}},
        {"reference.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": "of at least 2, which is 1"},
    ),
    "rollouts in a layout that cannot generate": (
        {f"{SAMPLING}.context_parallel_size": 2},
        {f"{SAMPLING}.context_parallel_size": "is 2, and models sample only with 1; set it to 1 here"},
    ),
    "rollouts in an impossible layout": (
        {
            "actor_train.device_mapping": "0-5",
            f"{SAMPLING}.tensor_model_parallel_size": 4,
        },
        {"actor_infer.device_mapping": "6 processes do not divide"},
    ),
    "rollouts ahead in another layout": (
        {"async_generation_ratio": 1, f"{SAMPLING}.tensor_model_parallel_size": 2},
        {f"{SAMPLING}.tensor_model_parallel_size": "the sampler of async_generation_ratio is one process"},
    ),
    "a row of rollouts in their own layout": (
        {
            "prompt_length": 10,
            "response_length": 10,
            f"{SAMPLING}.tensor_model_parallel_size": 2,
            f"{SAMPLING}.sequence_parallel": True,
            "actor_infer.generating_args": {"max_tokens_in_cache": 20},
        },
        {"actor_infer.generating_args.max_tokens_in_cache": "is 20, but one prompt and its response may need 21"},
    ),
    "reference on other devices": (
        {"reference.device_mapping": "0-3"},
        {"reference.device_mapping": "names some of actor_train's devices"},
    ),
    "rollouts with another model": (
        {"actor_infer.model_args.dtype": "bf16"},
        {"actor_infer.model_args.dtype": "actor_train's model"},
    ),
    "dropout with shared plans": (
        {f"{ARCHITECTURE}.hidden_dropout": 0.1},
        {f"{ARCHITECTURE}.hidden_dropout": "logprob_plan"},
    ),
    "several epochs without old log-probs": (
        {"actor_train.logprob_plan": "none", "rollout_batch_size": 8, "ppo_epochs": 2, "max_steps": 1},
        {"actor_train.logprob_plan": "ppo_epochs 2"},
    ),
    "several mini-batches without old log-probs": (
        {"actor_train.logprob_plan": "none", "rollout_batch_size": 9, "max_steps": 1},
        {"actor_train.logprob_plan": "9 samples of a rollout make 2 optimizer steps (mini-batches of 8, ppo_epochs 1)"},
    ),
    "dropped groups with KL": (
        {"drop_zero_advantage_groups": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"drop_zero_advantage_groups": "kl_loss_coef"},
    ),
    "dropped groups with entropy": (
        {"drop_zero_advantage_groups": True, "entropy_loss_coef": 0.1},
        {"drop_zero_advantage_groups": "entropy_loss_coef"},
    ),
    "KL without a reference": (
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": None},
        {"use_kl_loss": "reference"},
    ),
    "shared shapes where ranks cut freely": (
        DYNAMIC
        | {
            "actor_train.max_tokens_per_microbatch_in_train": 64,
            "actor_train.planning_args": {"shared_shapes": True, "dynamic_algorithm": "my_packers:mine"},
        },
        {"actor_train.planning_args.shared_shapes": "use roll or nemo_rl, or set this to false"},
    ),
    "a padded length below 1": ({"actor_train.padded_length": 0}, {"actor_train.padded_length": "at least 1"}),
    "a multiple below 1": (
        {"reference.planning_args": {"sequence_multiple": -4}},
        {"reference.planning_args.sequence_multiple": "is -4; it must be at least 1"},
    ),
    "lengths that do not add up": (
        {"prompt_length": 10, "response_length": 10, "sequence_length": 15},
        {"sequence_length": "less than prompt_length 10 + response_length 10"},
    ),
    "a cache without room for one row": (
        {"prompt_length": 10, "response_length": 10, "actor_infer.generating_args": {"max_tokens_in_cache": 19}},
        {"actor_infer.generating_args.max_tokens_in_cache": "is 19, but one prompt and its response may need 20"},
    ),
    "roles that want different environments": (
        {"actor_train.system_envs": {"A": "1"}, "reference.system_envs": {"A": "2"}},
        {"reference.system_envs.A": "share one process"},
    ),
    "an optimizer of its own precision that is not distributed": (
        {f"{LAYOUT}.use_precision_aware_optimizer": True},
        {f"{LAYOUT}.use_precision_aware_optimizer": "needs use_distributed_optimizer: true"},
    ),
    "a precision that no other optimizer keeps": (
        {f"{LAYOUT}.exp_avg_dtype": "torch.bfloat16", f"{LAYOUT}.main_params_dtype": "fp16"},
        {
            f"{LAYOUT}.exp_avg_dtype": "is bf16; other precisions than fp32 need the optimizer",
            f"{LAYOUT}.main_params_dtype": "is fp16; other precisions than fp32 need the optimizer",
        },
    ),
    "gradients in two precisions": (
        {
            f"{LAYOUT}.use_distributed_optimizer": True,
            f"{LAYOUT}.use_precision_aware_optimizer": True,
            f"{LAYOUT}.main_grads_dtype": "bf16",
            f"{LAYOUT}.grad_reduce_in_fp32": True,
        },
        {f"{LAYOUT}.grad_reduce_in_fp32": "gradients are summed in one precision"},
    ),
    "a context-parallel size per pack without packs": (
        {f"{LAYOUT}.context_parallel_size": "auto", "actor_train.use_sequence_packing": False},
        {f"{LAYOUT}.context_parallel_size": "needs use_sequence_packing: true"},
    ),
    "a largest context-parallel size of one size": (
        {f"{LAYOUT}.max_context_parallel_size": 4},
        {LAYOUT: "is read with context_parallel_size: auto only"},
    ),
    "rates that one context-parallel size does not read": (
        {f"{LAYOUT}.cluster": {"matmul_rate": 4e14, "node_latency": 1e-5}},
        {LAYOUT: "cluster.node_latency is read with context_parallel_size auto, pipeline_slices or cluster.file only"},
    ),
    "rates of a cluster in a file that is not there": (
        {f"{LAYOUT}.cluster": "no/cluster.yaml"},
        {f"{LAYOUT}.cluster": "no/cluster.yaml: no such file of rates"},
    ),
    "rates of a cluster that are none": (
        {
            f"{LAYOUT}.context_parallel_size": "auto",
            f"{LAYOUT}.cluster": {
                "matmul_rate": 0,
                "attention_rate": float("nan"),
                "attention_tile": 1.5,
                "node_bandwidth": "fast",
                "layer_floor": -1,
                "devices_per_node": 1 << 60,
                "matmul_half_tokens": True,
                "gpus": 8,
            },
        },
        {
            f"{LAYOUT}.cluster.matmul_rate": "is 0; it must be at least 1000000000 FLOP/s",
            f"{LAYOUT}.cluster.attention_rate": "expected a finite number",
            f"{LAYOUT}.cluster.attention_tile": "expected a whole number",
            f"{LAYOUT}.cluster.node_bandwidth": "expected a number",
            f"{LAYOUT}.cluster.layer_floor": "it must be at least 0",
            f"{LAYOUT}.cluster.devices_per_node": "it must be at most",
            f"{LAYOUT}.cluster.matmul_half_tokens": "expected a number",
            f"{LAYOUT}.cluster.gpus": "unknown key",
        },
    ),
    "a variable that torchrun owns": (
        {"system_envs": {"WORLD_SIZE": "2"}},
        {"system_envs.WORLD_SIZE": "torchrun"},
    ),
}

REFUSED = {
    "adapters have no dropout": {"actor_train.model_args.lora_dropout": 0.1},
    "that of the model directory": {f"{ARCHITECTURE.rsplit('.', 1)[0]}.vision_config": {"depth": 2}},
    "each head has its own layer": {f"{LAYOUT}.mtp_use_repeated_layer": True},
    "weights are kept in bf16": {f"{LAYOUT}.fp8_param": True},
    "context-parallel sizes": {f"{LAYOUT}.hybrid_context_parallel": True},
    "the cap of a pack": {f"{LAYOUT}.max_seqlen_per_dp_cp_rank": 4096},
    "every size from 1": {f"{LAYOUT}.min_dynamic_context_parallel_size": 2},
    "beam search": {"actor_infer.generating_args.num_beams": 4},
    "dropout": {f"{ARCHITECTURE}.attention_dropout": 0.1},
}


def test_the_loss_has_the_temperature_of_the_sampling_unless_it_says_another():
    sampled = {"actor_infer.generating_args.temperature": 0.5}
    assert config_from_dict(changed(sampled)).logprob_temperature == 0.5
    assert config_from_dict(changed(sampled | {"actor_train.logprob_temperature": 1.0})).logprob_temperature == 1.0
    kept = sampled | {"actor_train.logprob_temperature": 0.5, "actor_train.logprob_plan": "rollout"}
    assert config_from_dict(changed(kept)).logprob_temperature == 0.5, "the same, said"


def test_rolls_name_of_no_router_replay_is_read():
    config = config_from_dict(changed({"actor_train.router_replay": {"mode": "disable"}}))
    assert config.actor_train.router_replay.mode == "disabled"


def test_the_base_is_valid():
    config = config_from_dict(BASE)
    assert config.dp_size(8) == 8
    assert config.reference.model_args.architecture == config.actor_train.model_args.architecture


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name, report):
    changes, expected = BROKEN[name]
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed(changes))
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    assert found.keys() == expected.keys() and len(found) == len(caught.value.problems), caught.value.problems
    for path, words in expected.items():
        assert words in found[path]
        report(f"{name}: {path}: {found[path]}")


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, report):
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed(REFUSED[name]))
    (problem,) = caught.value.problems
    assert "refused" in problem.message and name.lower() in problem.message.lower()
    report(f"{name}: {problem}")


def test_processes_must_fit_the_layout():
    config = config_from_dict(changed({f"{LAYOUT}.tensor_model_parallel_size": 2}))
    assert config.dp_size(4) == 2
    with pytest.raises(ConfigFileError, match="3 processes do not divide into copies of TP 2"):
        config.dp_size(3)


def test_the_largest_context_parallel_size_divides_the_ranks_that_share_the_data():
    packed = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": 4096}}
    single = {f"actor_train.{key}": value for key, value in packed.items()}
    largest = {f"{LAYOUT}.context_parallel_size": "auto", f"{LAYOUT}.max_context_parallel_size": 4}
    config = config_from_dict(changed(single | largest | {"actor_train.device_mapping": None}))
    assert config.dp_size(8) == 8
    with pytest.raises(ConfigFileError, match="max_context_parallel_size is 4: .* divides the 6 ranks"):
        config.dp_size(6)


def test_one_optimizer_step_per_rollout_depends_on_the_processes_that_are_started():
    changes = {"actor_train.logprob_plan": "none", "rollout_batch_size": 8, "max_steps": 1}
    changes |= {f"{role}.device_mapping": None for role in ("actor_train", "reference")}
    config = config_from_dict(changed(changes))
    assert config.dp_size(8) == 8
    with pytest.raises(ConfigFileError, match="logprob_plan: none .* 8 samples of a rollout make 2 optimizer steps"):
        config.dp_size(4)
    assert config_from_dict(changed(changes | {"max_steps": 0})).dp_size(4) == 4, "nothing is rolled out"


@pytest.mark.bad_input
def test_a_policy_that_cannot_sample_is_refused_before_the_run():
    demo = ROOT / "configs" / "demo_grpo.yaml"
    key = "strategy_args.strategy_config.context_parallel_size"

    def said(*changes: str) -> str:
        try:
            load_config(demo, [f"actor_train.{key}=2", *changes]).check_runnable()
        except ConfigFileError as error:
            return str(error)
        return ""

    assert "training model samples: set it to 1 in actor_infer" in said(f"actor_infer.{key}=2")
    assert said() == "", "a copy without context parallelism samples"
    assert said("async_generation_ratio=1") == "", "the sampler's process answers held-out prompts, too"
    assert said("max_steps=0") == ""
