"""Keys of NeMo-RL's `policy`, and of its losses, whose meaning there is another than their name suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, PlanConstraints, plan_step
from roll_batching.tools.conversion.nemo_rl_batching import convert_policy
from tests.tools.conversion.test_nemo_rl_defaults import converted, file_of, job_of

MEGATRON: dict[str, Any] = {"enabled": True, "optimizer": {"lr": 1e-6}, "scheduler": {"lr_decay_style": "constant"}}


def with_policy(task: str = "grpo", **policy: Any) -> dict[str, Any]:
    file = file_of(task)
    file["policy"] |= policy
    return file


def reasons(folder: Path, file: dict[str, Any], kind: str) -> dict[str, str]:
    return {one.key: one.why for one in converted(folder, file).left_out_as(kind)}  # type: ignore[arg-type]


PACKED = {"enabled": True, "train_mb_tokens": 1024, "algorithm": "modified_first_fit_decreasing"}
ORDER = "policy.sequence_packing.microbatch_order"


@pytest.mark.config
@pytest.mark.parametrize("algorithm", ["modified_first_fit_decreasing", "first_fit_decreasing"])
def test_micro_batches_run_largest_first_as_asked(tmp_path, algorithm):
    packing = {**PACKED, "algorithm": algorithm, "microbatch_order": "largest_first"}
    assert "falling cost" in reasons(tmp_path, with_policy(sequence_packing=packing), "idle")[ORDER]
    worker, without_effect = convert_policy({"sequence_packing": packing})
    assert "has no counterpart" not in without_effect.values()
    args = worker["sequence_packing_args"]
    cap, algorithm = args["max_packed_sequence_length_train"], args["algorithm"]
    lengths = np.random.default_rng(0).integers(16, 900, 64)
    constraints = PlanConstraints(dp_size=2, max_tokens=cap, algorithm=algorithm)
    plan = plan_step(lengths, constraints, cost=LinearQuadraticCost(linear=1, quadratic=0))
    for rank in plan.micro_batches:
        tokens = [int(one.lengths.sum()) for one in rank]
        assert tokens == sorted(tokens, reverse=True)


@pytest.mark.config
@pytest.mark.parametrize(("cap", "tokens"), [(None, 512), (700, 700)])
def test_sizes_per_pack_have_the_cap_of_one_rank(tmp_path, cap, tokens):
    """NeMo-RL's budgets count whole packs, Megatron's cap a rank."""
    file = with_policy(sequence_packing={**PACKED, "logprob_mb_tokens": 2048}, dtensor_cfg={"enabled": False})
    dynamic = {"dynamic_context_parallel": True, "context_parallel_size": 2, "min_dynamic_context_parallel_size": 2}
    file["policy"]["megatron_cfg"] = MEGATRON | dynamic | {"sequence_packing_scheduler": "default_dynamic_cp"}
    if cap is not None:
        file["policy"]["megatron_cfg"]["max_seqlen_per_dp_cp_rank"] = cap
    worker = job_of(tmp_path, file).actor_train
    packing = worker.sequence_packing_args
    assert worker.strategy_args.strategy_config.has_cp_per_pack and packing.algorithm == "load_balance"
    assert (packing.max_packed_sequence_length_train, packing.max_packed_sequence_length_forward) == (tokens, 1024)
    section = "policy.megatron_cfg"
    refused, idle = reasons(tmp_path, file, "refused"), reasons(tmp_path, file, "idle")
    assert "every size from 1 on" in refused[f"{section}.min_dynamic_context_parallel_size"]
    assert "max_context_parallel_size bounds" in idle[f"{section}.context_parallel_size"]
    assert "packs are planned here" in idle[f"{section}.sequence_packing_scheduler"]


@pytest.mark.config
@pytest.mark.parametrize(
    ("given", "refused", "idle"),
    [
        ({"moe_router_load_balancing_type": "none"}, set(), {"moe_router_load_balancing_type"}),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0},
            set(),
            {"moe_router_load_balancing_type", "moe_aux_loss_coeff"},
        ),
        ({"moe_router_load_balancing_type": "aux_loss"}, {"moe_router_load_balancing_type"}, set()),
        ({"moe_aux_loss_coeff": 1e-3}, {"moe_aux_loss_coeff"}, set()),
        ({"moe_router_enable_expert_bias": True}, {"moe_router_enable_expert_bias"}, set()),
        ({"moe_token_dispatcher_type": "flex"}, set(), {"moe_token_dispatcher_type"}),
        (
            {"moe_permute_fusion": True, "apply_rope_fusion": True, "bias_activation_fusion": False},
            set(),
            {"moe_permute_fusion", "apply_rope_fusion", "bias_activation_fusion"},
        ),
        ({"moe_router_bias_update_rate": 1e-3, "freeze_moe_router": True}, set(), set()),
    ],
)
def test_keys_of_mixtures_are_kept_refused_or_without_effect(tmp_path, given, refused, idle):
    file = with_policy(dtensor_cfg={"enabled": False})
    file["policy"]["megatron_cfg"] = MEGATRON | given
    found = {kind: reasons(tmp_path, file, kind) for kind in ("refused", "idle", "unknown")}
    section = "policy.megatron_cfg."
    ours = {
        kind: {k.removeprefix(section) for k in keys if k.removeprefix(section) in given}
        for kind, keys in found.items()
    }
    assert ours == {"refused": refused, "idle": idle, "unknown": set()}
    layout = job_of(tmp_path, file).actor_train.strategy_args.strategy_config
    for name in given.keys() - refused - idle:
        assert getattr(layout, name) == given[name]


@pytest.mark.config
@pytest.mark.parametrize("enabled", [True, False])
def test_router_replay_of_vllms_experts_is_kept(tmp_path, enabled):
    job = job_of(tmp_path, with_policy(router_replay={"enabled": enabled}))
    assert job.actor_train.router_replay.mode == ("R3" if enabled else "disabled")


@pytest.mark.config
def test_the_order_of_micro_batches_in_a_pipeline_and_unknown_orders(tmp_path):
    packing = {**PACKED, "microbatch_order": "largest_first"}
    file = with_policy(sequence_packing=packing, dtensor_cfg={"enabled": False})
    file["policy"]["megatron_cfg"] = MEGATRON | {"pipeline_model_parallel_size": 2}
    assert "smallest predicted step time" in reasons(tmp_path, file, "refused")[ORDER]
    file["policy"]["sequence_packing"] = {**PACKED, "microbatch_order": "packer"}
    assert ORDER not in reasons(tmp_path, file, "refused") | reasons(tmp_path, file, "idle")
    with pytest.raises(PlanError, match="microbatch_order='smallest' is unknown"):
        convert_policy({"sequence_packing": {**PACKED, "microbatch_order": "smallest"}})


@pytest.mark.config
@pytest.mark.parametrize("framework", ["dtensor", "megatron"])
def test_gradients_are_clipped_to_the_norm_that_is_read(tmp_path, framework):
    file = with_policy(max_grad_norm=0.5)
    if framework == "megatron":
        file["policy"] |= {"dtensor_cfg": {"enabled": False}, "megatron_cfg": MEGATRON}
        file["policy"]["megatron_cfg"] = {**MEGATRON, "optimizer": {"lr": 1e-6, "clip_grad": 0.25}}
    assert job_of(tmp_path, file).actor_train.training_args.max_grad_norm == (0.5 if framework == "dtensor" else 0.25)


@pytest.mark.config
def test_no_clipping_stays_none(tmp_path):
    assert job_of(tmp_path, with_policy(max_grad_norm=None)).actor_train.training_args.max_grad_norm == 0


@pytest.mark.config
def test_megatrons_settings_hold_without_its_layout_being_written(tmp_path):
    file = with_policy(dtensor_cfg={"enabled": False}, megatron_cfg=MEGATRON)
    training = job_of(tmp_path, file).actor_train.training_args
    assert (training.learning_rate, training.weight_decay) == (1e-6, 0.01), "not those of policy.optimizer"


@pytest.mark.config
@pytest.mark.parametrize("granularity", ["selective", "full", None])
def test_recomputation_is_as_fine_as_asked(tmp_path, granularity):
    asked = {} if granularity is None else {"recompute_granularity": granularity}
    file = with_policy(dtensor_cfg={"enabled": False})
    for switched_on in (True, False):
        file["policy"]["megatron_cfg"] = MEGATRON | asked | {"activation_checkpointing": switched_on}
        layout = job_of(tmp_path, file).actor_train.strategy_args.strategy_config
        assert layout.recompute_granularity == ((granularity or "full") if switched_on else None)


@pytest.mark.config
@pytest.mark.parametrize("task", ["grpo", "sft", "dpo"])
def test_a_template_of_null_passes_texts_through(tmp_path, task):
    file = with_policy(task, tokenizer={"name": "models/small", "chat_template": None})
    done = converted(tmp_path, file)
    assert done.settings["actor_train"]["data_args"]["chat"] is False
    assert "policy.tokenizer.chat_template" in {one.key for one in done.changed}
    file["policy"]["tokenizer"].pop("chat_template")
    assert converted(tmp_path, file).settings["actor_train"]["data_args"]["chat"] is True


@pytest.mark.config
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_kl_in_the_reward_is_none_in_the_loss(tmp_path, estimator):
    file = file_of("grpo", grpo={"adv_estimator": {"name": estimator}}, loss_fn={"use_kl_in_reward": True})
    job = job_of(tmp_path, file)
    assert not job.use_kl_loss and job.reference is None
    kind = "refused" if estimator == "reinforce_plus_plus" else "idle"
    assert "loss_fn.use_kl_in_reward" in reasons(tmp_path, file, kind)


SCHEDULES = {
    "LinearLR": ({"end_factor": 1.0, "total_iters": 20}, 20),
    "LinearLR ": ({}, 5),
    "LinearLR  ": ({"end_factor": 0.1, "total_iters": 20}, None),
    "ConstantLR": ({"factor": 1.0, "total_iters": 9}, 0),
    "ConstantLR ": ({}, None),  # torch's own: a third of the rate, for five steps
    "CosineAnnealingLR": ({"T_max": 10}, None),
}


@pytest.mark.config
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules_have_torchs_defaults(tmp_path, name):
    settings, warmup = SCHEDULES[name]
    one = {"name": f"torch.optim.lr_scheduler.{name.strip()}", "kwargs": settings}
    file = with_policy("sft", scheduler=[one, {"milestones": [3]}])
    job = job_of(tmp_path, file)
    assert job.actor_train.training_args.warmup_steps == (warmup or 0)
    refused = [key for key in reasons(tmp_path, file, "refused") if key.startswith("policy.scheduler")]
    assert bool(refused) == (warmup is None)


@pytest.mark.planning
def test_yaml_sections_of_the_document_convert():
    packing = {
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": 2048,
            "logprob_mb_tokens": 2048,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_round": 64,
        },
        "dynamic_batching": {"enabled": False},
    }
    ours, without_effect = convert_policy(packing)
    assert ours == {
        "use_sequence_packing": True,
        "sequence_packing_args": {
            "algorithm": "modified_first_fit_decreasing",
            "max_packed_sequence_length_train": 2048,
            "max_packed_sequence_length_forward": 2048,
        },
    }
    assert list(without_effect) == ["sequence_packing.sequence_length_round"]
    batching = {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 4096,
            "logprob_mb_tokens": 8192,
            "sequence_length_round": 64,
        }
    }
    ours, without_effect = convert_policy(batching)
    assert not without_effect
    assert ours["max_tokens_per_microbatch_in_infer"] == 8192
    assert ours["sequence_length_round_in_train"] == 64
    with pytest.raises(PlanError, match="both enabled"):
        convert_policy({"sequence_packing": {"enabled": True}, "dynamic_batching": {"enabled": True}})
