"""Files and scripts of verl: settings, verl's own defaults, and what is left out by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file, origin_of
from tests.tools.conversion.test_slime import job_of, left_out, value_at

pytestmark = pytest.mark.config

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NEEDED = (
    f"algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m {R}.name=vllm {R}.n=4 "
    "trainer.total_training_steps=20 data.train_files=/d.parquet"
)
STEPS = "actor_train.training_args.gradient_accumulation_steps"


def converted(folder: Path, overrides: str = "", module: str = "main_ppo", before: str = "") -> Conversion:
    path = folder / "run.sh"
    path.write_text(f'#!/bin/bash\n{before}\npython3 -m verl.trainer.{module} \\\n  {NEEDED} \\\n  {overrides} "$@"\n')
    return convert_file(path, ORIGINS["verl"])


def from_yaml(folder: Path, data: Any) -> Conversion:
    path = folder / "verl.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return convert_file(path, ORIGINS["verl"])


def test_what_a_script_leaves_out_has_verls_default(tmp_path):
    job = job_of(converted(tmp_path), tmp_path)
    args, layout = job.actor_train.training_args, job.actor_train.strategy_args.strategy_config
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (args.adam_beta1, args.adam_beta2, args.lr_scheduler_type, args.warmup_steps) == (0.9, 0.999, "constant", 0)
    assert (job.rollout_batch_size, job.mini_batch_size(8)) == (1024, 256 * 4)
    assert (job.dual_clip_loss, job.dual_clip_ratio, job.clip_range) == (True, 3.0, (0.2, 0.2))
    assert (job.loss_agg_mode, job.ppo_epochs, job.use_kl_loss, job.entropy_loss_coef) == ("token-mean", 1, False, 0)
    assert (job.prompt_length, job.response_length, job.save_steps) == (512, 512, 0)
    assert job.track_with == "wandb" and job.output_dir == "checkpoints/verl_examples" and job.exp_name == "gsm8k"
    assert layout.recompute_granularity == "full" and layout.use_distributed_optimizer, "FSDP's default recomputes"
    assert not job.actor_train.use_sequence_packing and job.world_size == 8
    assert job.actor_infer.strategy_args.engine_options["tensor_parallel_size"] == 2
    assert job.actor_infer.strategy_args.engine_options["gpu_memory_utilization"] == 0.5
    job = job_of(converted(tmp_path, f"model_engine=megatron {A}.megatron.tensor_model_parallel_size=2"), tmp_path)
    layout = job.actor_train.strategy_args.strategy_config
    assert layout.sequence_parallel and layout.recompute_granularity is None


MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "packing": (
        f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=8192 {R}.log_prob_max_token_len_per_gpu=16384",
        {
            "actor_train.use_sequence_packing": True,
            "actor_train.sequence_packing_args.max_packed_sequence_length_train": 8192,
            "actor_train.sequence_packing_args.max_packed_sequence_length_forward": 16384,
        },
    ),
    "caps count devices": (
        f"model_engine=megatron {A}.megatron.context_parallel_size=2 {A}.use_dynamic_bsz=True",
        {"actor_train.sequence_packing_args.max_packed_sequence_length_train": 32768},
    ),
    "sizes per pack": (
        f"model_engine=megatron {A}.megatron.context_parallel_size=2 {A}.use_dynamic_bsz=True "
        f"{A}.megatron.dynamic_context_parallel=True {A}.megatron.max_seqlen_per_dp_cp_rank=4096 "
        f"{R}.log_prob_max_token_len_per_gpu=8192 {A}.ppo_mini_batch_size=64",
        {
            "actor_train.strategy_args.strategy_config.context_parallel_size": "auto",
            "actor_train.sequence_packing_args.max_packed_sequence_length_train": 4096,
            "actor_train.sequence_packing_args.max_packed_sequence_length_forward": 8192,
            STEPS: 32,  # 64 x 4 samples over 8 ranks, which all share the data
        },
    ),
    "sizes per pack without a cap of their own": (
        f"model_engine=megatron {A}.megatron.dynamic_context_parallel=True {A}.use_dynamic_bsz=True "
        f"{A}.ppo_max_token_len_per_gpu=6000",
        {
            "actor_train.strategy_args.strategy_config.context_parallel_size": "auto",
            "actor_train.sequence_packing_args.max_packed_sequence_length_train": 6000,
        },
    ),
    "ulysses": (
        f"{A}.ulysses_sequence_parallel_size=2 {A}.use_dynamic_bsz=true",
        {
            "actor_train.strategy_args.strategy_config.context_parallel_size": 2,
            "actor_train.sequence_packing_args.max_packed_sequence_length_train": 32768,
        },
    ),
    "mini-batches count prompts": (f"{A}.ppo_mini_batch_size=64 {A}.ppo_micro_batch_size_per_gpu=4", {STEPS: 8}),
    "clip ratio alone": (f"{A}.clip_ratio=0.4", {"pg_clip_low": None, "pg_clip_high": None}),
    "clip higher": (f"{A}.clip_ratio_low=0.1 {A}.clip_ratio_high=0.28", {"pg_clip_low": 0.1, "pg_clip_high": 0.28}),
    "clip by null": (f"{A}.clip_ratio=0.4 {A}.clip_ratio_low=null", {"pg_clip_low": 0.4, "pg_clip_high": None}),
    "kl": (f"{A}.use_kl_loss=True", {"kl_loss_coef": 0.001, "use_kl_loss": True, "reference": {}}),
    "kl k1+": (
        f"{A}.use_kl_loss=True {A}.kl_loss_type=k1+",
        {"loss_args.kl_estimator": "k1", "loss_args.kl_gradient": "straight_through"},
    ),
    "dr grpo": (
        f"algorithm.norm_adv_by_std_in_grpo=False {A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=300",
        {
            "adv_estimator": "reinforce",
            "norm_mean_type": "group",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "loss_agg_length": 300,
        },
    ),
    "gspo": (
        f"{A}.policy_loss.loss_mode=gspo",
        {"importance_sampling": "seq-token", "loss_agg_mode": "seq-mean-token-mean", "dual_clip_loss": None},
    ),
    "no lower clip": (
        f"{A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=10 {A}.clip_ratio_high=0.2",
        {"pg_clip_low": 1.0},
    ),
    "cispo": (f"{A}.policy_loss.loss_mode=cispo", {"loss_function": "cispo", "dual_clip_loss": None}),
    "geo_mean": (f"{A}.policy_loss.loss_mode=geo_mean", {"loss_function": "gmpo"}),
    "kl_cov": (f"{A}.policy_loss.loss_mode=kl_cov", {"loss_function": "kl_cov", "loss_args.penalty": 0.1}),
    "sapo": (f"{A}.policy_loss.loss_mode=sapo {A}.tau_neg=1.1", {"loss_args.temperature_negative": 1.1}),
    "token weights": (
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_3.0",
        {
            "train_infer_correction.is_weight": {"weight_type": "token", "upper_bound": None},
            "train_infer_correction.filters": [
                {"agg_type": "token", "ratio_low": 0.5, "ratio_high": 3.0, "effect": "zero"}
            ],
        },
    ),
    "sequences outside two bounds, and rejection": (
        "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=0.2_4.0 "
        "algorithm.rollout_correction.rollout_rs=token_k1 algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        {
            "train_infer_correction.filters": [
                {"agg_type": "sequence", "ratio_low": 0.2, "ratio_high": 4.0, "effect": "zero"},
                {"agg_type": "token", "ratio_low": 0.5, "ratio_high": 2.0},
            ],
        },
    ),
    "a group of one": (
        f"algorithm.adv_estimator=grpo {R}.n=1",
        {"adv_estimator": "reinforce", "norm_mean_type": None},
    ),
    "a group of one without the deviation": (
        f"algorithm.norm_adv_by_std_in_grpo=False {R}.n=1",
        {"adv_estimator": "reinforce", "norm_mean_type": None},
    ),
    "a group of one of rloo": (f"algorithm.adv_estimator=rloo {R}.n=1", {"adv_estimator": "reinforce"}),
    "a group of two": (f"algorithm.adv_estimator=grpo {R}.n=2", {"adv_estimator": "grpo"}),
    "sequence weights and rejection": (
        "algorithm.rollout_correction.rollout_is=sequence "
        "algorithm.rollout_correction.rollout_is_batch_normalize=true "
        "'algorithm.rollout_correction.rollout_rs=\"token_k1,seq_max_k2\"' "
        "'algorithm.rollout_correction.rollout_rs_threshold=\"0.5_2.0,0.3\"'",
        {
            "train_infer_correction.is_weight": {
                "weight_type": "sequence",
                "upper_bound": 2.0,
                "batch_normalize": True,
            },
            "train_infer_correction.filters": [
                {"agg_type": "token", "ratio_low": 0.5, "ratio_high": 2.0},
                {"agg_type": "max", "k2_high": 0.3},
            ],
        },
    ),
    "bypass": ("algorithm.rollout_correction.bypass_mode=true", {"actor_train.logprob_plan": "rollout"}),
    "kl in reward": (
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
        {"add_token_level_kl": True, "init_kl_coef": 0.001, "target_kl": 0.1},
    ),
    "passk": ("algorithm.adv_estimator=grpo_passk", {"adv_estimator": "pass_at_k"}),
    "schedule": (
        f"{A}.optim.lr=1e-5 {A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1 {A}.optim.lr_warmup_steps=7",
        {
            "actor_train.training_args.lr_scheduler_type": "cosine",
            "actor_train.training_args.min_lr": 1e-6,
            "actor_train.training_args.warmup_steps": 7 * 4,  # optimizer steps of an RL step: 1024 / 256
        },
    ),
    "betas": (f"'{A}.optim.betas=[0.9,0.98]'", {"actor_train.training_args.adam_beta2": 0.98}),
    "recompute": (
        f"model_engine=megatron +{A}.megatron.override_transformer_config.recompute_granularity=full "
        f"+{A}.megatron.override_transformer_config.recompute_method=uniform",
        {"actor_train.strategy_args.strategy_config.recompute_granularity": "full"},
    ),
    "sglang": (
        f"{R}.name=sglang {R}.tensor_model_parallel_size=4",
        {"actor_infer.strategy_args.strategy_config.tp_size": 4},
    ),
    "evaluation": (
        f'\'data.val_files=["/a.parquet","/b.parquet"]\' trainer.test_freq=5 {R}.val_kwargs.n=8 '
        f"{R}.val_kwargs.do_sample=True {R}.val_kwargs.temperature=0.6",
        {
            "eval_steps": 5,
            "validation.generating_args.num_return_sequences": 8,
            "validation.generating_args.temperature": 0.6,
            "actor_train.data_args.eval_file_name": ["/a.parquet", "/b.parquet"],
        },
    ),
    "greedy evaluation": ("data.val_files=/a.parquet", {"validation.generating_args.do_sample": False}),
    "filtered": ("data.filter_overlong_prompts=True", {"actor_train.data_args.long_prompts": "drop"}),
    "long responses": (
        "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64 +reward_model.reward_kwargs.max_resp_len=128 "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
        {"overlong_buffer": {"length": 64, "penalty": 0.5, "response_length": 128}},
    ),
    "folder": (
        "trainer.default_local_dir=/ckpt/one trainer.experiment_name=one trainer.save_freq=5",
        {"output_dir": "/ckpt", "exp_name": "one", "save_steps": 5},
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_settings_keep_their_meaning(tmp_path, case):
    overrides, wanted = MEANINGS[case]
    done = converted(tmp_path, overrides)
    job_of(done, tmp_path)
    assert {key: value_at(done.settings, key) for key in wanted} == wanted


def test_no_penalty_for_long_responses_where_it_is_off(tmp_path):
    key = "reward_model.reward_kwargs.overlong_buffer_cfg"
    done = converted(tmp_path, f"+{key}.enable=False +{key}.len=64 +{key}.penalty_factor=0.5")
    assert "overlong_buffer" not in done.settings and key in left_out(done, "idle")


def test_megatron_ignores_betas_there_as_here(tmp_path):
    done = converted(tmp_path, f"model_engine=megatron '{A}.optim.betas=[0.9,0.98]'")
    assert "no Megatron optimizer" in left_out(done, "idle")[f"{A}.optim.betas"]
    assert job_of(done, tmp_path).actor_train.training_args.adam_beta2 == 0.999


def test_routers_are_frozen_as_there(tmp_path):
    key = "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router"
    for value in ("True", "False"):
        done = converted(tmp_path, f"model_engine=megatron {key}={value}")
        layout = job_of(done, tmp_path).actor_train.strategy_args.strategy_config
        assert layout.freeze_moe_router == (value == "True")
        assert key not in left_out(done)


def test_router_replay_keeps_its_mode_where_it_can(tmp_path):
    key = f"{A}.router_replay.mode"
    done = converted(tmp_path, f"model_engine=megatron {key}=R2")
    assert job_of(done, tmp_path).actor_train.router_replay.mode == "R2"
    done = converted(tmp_path, f"model_engine=megatron {key}=R3 {R}.enable_rollout_routing_replay=True")
    assert job_of(done, tmp_path).actor_train.router_replay.mode == "R3"
    assert not [name for name in left_out(done, "refused") if "replay" in name]
    assert not [name for name in left_out(converted(tmp_path, f"{key}=disabled"), "refused") if "replay" in name]


def test_the_script_of_arrays_and_conditions(tmp_path):
    before = (
        "TP=${TP:-2}\nLONG=$((1024 * 4))\nLAUNCH=(python3)\n"
        f"ACTOR=(\n  {A}.megatron.tensor_model_parallel_size=${{TP}}\n  {A}.ppo_max_token_len_per_gpu=$LONG\n)\n"
        f"if [ x = y ]; then\n  ACTOR+=({A}.ppo_epochs=4)\n  RAY=(ray_kwargs.x=1)\nfi\n"
    )
    path = tmp_path / "run.sh"
    path.write_text(
        f'{before}"${{LAUNCH[@]}}" -m verl.trainer.main_ppo model_engine=megatron {NEEDED} {A}.use_dynamic_bsz=True '
        f'"${{ACTOR[@]}}" ${{RAY[@]}} trainer.experiment_name=a-$(date +%s) {R}.temperature=$NOWHERE "$@"'
    )
    assert origin_of(path) is ORIGINS["verl"]
    done = convert_file(path, ORIGINS["verl"])
    assert value_at(done.settings, "actor_train.strategy_args.strategy_config.tensor_model_parallel_size") == 2
    assert value_at(done.settings, "actor_train.sequence_packing_args.max_packed_sequence_length_train") == 4096
    refused = left_out(done, "refused")
    assert "condition" in refused[f"{A}.ppo_epochs (line 9)"] and not any("ray_kwargs" in key for key in refused)
    assert "line 12" in refused["trainer.experiment_name"] and "NOWHERE" in refused[f"{R}.temperature"]
    assert value_at(done.settings, "actor_infer.generating_args.temperature") is None


def test_a_composed_file(tmp_path):
    data = {
        "actor_rollout_ref": {
            "actor": {
                "_target_": "verl.workers.config.McoreActorConfig",
                "strategy": "megatron",
                "ppo_mini_batch_size": 32,
                "megatron": {"tensor_model_parallel_size": 2, "qat": {"enable": False, "mode": "w4a16"}},
                "router_replay": {"mode": "disabled"},
            },
            "model": {"path": "/m", "lora_rank": 0, "lora_alpha": 16, "mtp": {"enable": False, "method": "mtp"}},
            "ref": {"log_prob_use_dynamic_bsz": "${actor_rollout_ref.actor.use_dynamic_bsz}"},
            "rollout": {"name": "sglang", "n": 8, "response_length": "${oc.select:data.max_response_length,512}"},
        },
        "algorithm": {"adv_estimator": "rloo", "made_up": 3},
        "data": {"max_response_length": 256, "train_max_samples": -1},
        "trainer": {"total_training_steps": 5, "logger": ["console"]},
        "critic": {"enable": None, "ppo_epochs": 2},
        "distillation": {"enabled": False, "n_gpus_per_node": 8},
    }
    done = from_yaml(tmp_path, data)
    assert origin_of(tmp_path / "verl.yaml") is ORIGINS["verl"]
    assert left_out(done, "unknown") == {"algorithm.made_up": "there is no such setting here"}
    assert set(left_out(done, "refused")) == {"reward (by data_source)"}
    job = job_of(done, tmp_path)
    assert (job.adv_estimator, job.response_length, job.track_with) == ("rloo", 256, None)
    assert job.mini_batch_size(4) == 256


def test_a_job_that_is_verls_file_says_how_to_convert_it(tmp_path):
    (tmp_path / "v.yaml").write_text("actor_rollout_ref: {actor: {ppo_mini_batch_size: 8}}\n")
    with pytest.raises(ConfigError, match="--from verl"):
        load_config(tmp_path / "v.yaml")


def test_supervised_fine_tuning(tmp_path):
    path = tmp_path / "sft.sh"
    path.write_text(
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=/d.parquet model.path=/m "
        "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 optim.lr=1e-5"
    )
    done = convert_file(path, ORIGINS["verl"])
    job = job_of(done, tmp_path)
    assert (job.task, job.num_train_epochs, job.sequence_length, job.seed) == ("sft", 4, 1024, 1)
    assert job.actor_train.use_sequence_packing, "verl's default: use_dynamic_bsz"
    assert job.actor_train.sequence_packing_args.max_packed_sequence_length_train == 8192
    assert job.mini_batch_size(4) == 256 and job.actor_train.training_args.weight_decay == 0.01
    assert job.actor_train.data_args.messages == "messages" and job.eval_samples == 0


def test_adapters(tmp_path):
    model = "actor_rollout_ref.model"

    def adapters(options):
        path = tmp_path / "lora.sh"
        path.write_text(
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d.parquet "
            f"{model}.path=/m {options}"
        )
        args = convert_file(path, ORIGINS["verl"]).settings["actor_train"].get("model_args", {})
        return tuple(args.get(key) for key in ("lora_target", "lora_rank", "lora_alpha"))

    assert adapters("") == (None, None, None)
    assert adapters(f"{model}.lora_rank=32") == ("all-linear", 32, 16)
    assert adapters(f"{model}.lora_rank=64 {model}.lora_alpha=32 {model}.target_modules=[q_proj,v_proj]") == (
        "q_proj,v_proj", 64, 32,
    )  # fmt: skip
    bridge = f"model_engine=megatron {model}.lora.rank=256 {model}.lora.alpha=512"
    assert adapters(bridge) == ("all-linear", 256, 512)


REFUSED: dict[str, tuple[str, str, str]] = {
    "critic": ("algorithm.adv_estimator=gae critic.enable=False", "critic.enable", "needs a critic"),
    "critic's aggregation": (
        "algorithm.adv_estimator=gae critic.loss_agg_mode=seq-mean-token-mean",
        "critic.loss_agg_mode",
        "both losses",
    ),
    "loss": (f"{A}.policy_loss.loss_mode=dppo_tv", f"{A}.policy_loss.loss_mode", "no such loss"),
    "aggregation": (f"{A}.loss_agg_mode=token-median", f"{A}.loss_agg_mode", ""),
    "dropout": (
        "model_engine=megatron actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout=0.1",
        "actor_rollout_ref.model.lora.dropout",
        "no dropout",
    ),
    "turns": (f"{R}.multi_turn.enable=True", f"{R}.multi_turn", "one turn"),
    "rejection by an unknown estimate": (
        "algorithm.rollout_correction.rollout_rs=seq_max_k1 algorithm.rollout_correction.rollout_rs_threshold=2",
        "algorithm.rollout_correction.rollout_rs",
        "no filter of verl's",
    ),
    "weights of the engine's own log-probs": (
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.rollout_is",
        "no ratio before the update",
    ),
    "grouped kl": ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward", "use_kl_loss"),
    "engine": ("model_engine=veomni", "model_engine", "FSDP"),
    "sgd": (f"model_engine=megatron {A}.optim.optimizer=sgd", f"{A}.optim.optimizer", "AdamW"),
    "muon under FSDP": (f"{A}.optim.optimizer=muon", f"{A}.optim.optimizer", "AdamW"),
    "distillation": ("distillation.enabled=True", "distillation.enabled", "distillation"),
    "truncation": ("data.truncation=left", "data.truncation", "too long"),
    "order": ("data.shuffle=False", "data.shuffle", "shuffled"),
    "reward manager": ("reward.reward_manager.name=prime", "reward.reward_manager.name", "prime"),
    "reward manager of batches without a function": (
        "reward.reward_manager.name=batch",
        "reward.reward_manager.name",
        "batch",
    ),
    "cycles": (
        f"{A}.optim.lr_scheduler_type=cosine {A}.optim.num_cycles=2",
        f"{A}.optim.num_cycles",
        "2: Megatron's cosine falls once",
    ),
    "first step": (f"{A}.optim.zero_indexed_step=False", f"{A}.optim.zero_indexed_step", "begins at 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_otherwise_is_refused_by_name(tmp_path, case):
    overrides, key, why = REFUSED[case]
    done = converted(tmp_path, overrides)
    job_of(done, tmp_path)
    assert why in left_out(done, "refused")[key]


@pytest.mark.parametrize(
    ("name", "options"), [("mlflow", {"experiment_name": "sums"}), ("trackio", {"project": "sums"})]
)
def test_one_tracker_is_converted(tmp_path, name, options):
    done = converted(tmp_path, f'trainer.logger=["console","{name}","clearml"] trainer.project_name=sums')
    assert (done.settings["track_with"], done.settings["tracker_kwargs"]) == (name, options)
    assert "names one tracker" in left_out(done, "refused")["trainer.logger (clearml)"]


def test_repeated_and_secret_overrides(tmp_path):
    done = converted(
        tmp_path,
        f"{A}.ppo_epochs=2 {A}.ppo_epochs=3 +ray_kwargs.env.WANDB_API_KEY=sk-7f3a9 trainer.project_name=$HF_TOKEN",
        before="HF_TOKEN=sk-7f3a9",
    )
    assert done.settings["ppo_epochs"] == 3 and "given again" in left_out(done)[f"{A}.ppo_epochs (line 5)"]
    assert "secret" in left_out(done)["trainer.project_name"]
    assert "sk-7f3a9" not in done.to_yaml() + done.to_json()


def test_sizes_per_pack_without_packs_are_refused_by_name(tmp_path):
    dynamic = f"model_engine=megatron {A}.megatron.dynamic_context_parallel=True {A}.ppo_micro_batch_size_per_gpu=2"
    refused = left_out(converted(tmp_path, dynamic), "refused")
    assert "needs use_sequence_packing: true" in refused[f"{A}.megatron.dynamic_context_parallel"]
    off = f"model_engine=megatron {A}.megatron.max_seqlen_per_dp_cp_rank=4096 {A}.ppo_micro_batch_size_per_gpu=2"
    idle = left_out(converted(tmp_path, off), "idle")
    assert "with dynamic context parallelism only" in idle[f"{A}.megatron.max_seqlen_per_dp_cp_rank"]


@pytest.mark.parametrize("experts, fits", [(8, False), (4, True)])
def test_a_layout_that_the_devices_do_not_fit_is_said(tmp_path, experts, fits):
    """Experts lie on data-parallel ranks here; in verl also on tensor-parallel ones."""
    done = converted(
        tmp_path,
        f"model_engine=megatron {A}.megatron.tensor_model_parallel_size=2 "
        f"{A}.megatron.expert_model_parallel_size={experts} {A}.megatron.expert_tensor_parallel_size=1",
    )
    told = [text for text in done.missing if f"ep_size={experts} does not divide dp_size" in text]
    assert len(told) == (0 if fits else 1), done.missing
