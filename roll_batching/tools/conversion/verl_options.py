"""verl's settings: their defaults, and the reasons for leaving some out (commit 1dda039).

Defaults are those of `verl/trainer/config`, which verl composes for every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.foreign_file import ROUTERS, ForeignFile, reasons_of

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))

_OPTIMIZER: Mapping[str, Any] = {
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "clip_grad": 1.0,
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0,
}
_SCHEDULES: Mapping[bool, Mapping[str, Any]] = {
    True: {"lr_decay_style": "constant", "min_lr": 0.0, "lr_warmup_init": 0.0, "optimizer": "adam"},
    False: {"lr_scheduler_type": "constant", "min_lr_ratio": 0.0, "optimizer": "AdamW"},
}
"""By whether the engine is Megatron."""
_LAYOUT: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "dtype": "bfloat16",
}
_RL: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    "data.shuffle": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.bypass_mode": False,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.do_sample": True,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
_SFT: Mapping[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "data.max_length": 1024,
    "data.messages_key": "messages",
    "data.truncation": "error",
    "optim.lr": 1e-3,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
}
_BOTH: Mapping[str, Any] = {
    "trainer.logger": ["console", "wandb"],
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}


def defaults_of(supervised: bool, megatron: bool) -> dict[str, Any]:
    """Verl's defaults by dotted key, of a run of one engine."""
    engine, model = ("engine", "model") if supervised else (f"{ACTOR}.megatron", MODEL)
    optimizer = "optim" if supervised else f"{ACTOR}.optim"
    layout = {f"{engine}.{name}": value for name, value in _LAYOUT.items()} if megatron else {}
    defaults = {**(_SFT if supervised else _RL), **_BOTH, **layout}
    defaults |= {f"{optimizer}.{name}": value for name, value in {**_OPTIMIZER, **_SCHEDULES[megatron]}.items()}
    return defaults if megatron else defaults | {f"{model}.enable_gradient_checkpointing": True}


_SPEED = (
    "use_remove_padding use_fused_kernels use_torch_compile use_liger use_shm param_offload optimizer_offload "
    "grad_offload offload_policy reshard_after_forward forward_prefetch fsdp_size use_orig_params wrap_policy "
    "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing calculate_entropy "
    "enable_activation_offload fused_kernel_options tiled_mlp balance_batch balance_dp_token num_workers "
    "dataloader_num_workers filter_overlong_prompts_workers nccl_timeout use_mbridge vanilla_mbridge "
    "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix apply_rope_fusion "
    "gradient_accumulation_fusion moe_permute_fusion moe_grouped_gemm moe_enable_deepep moe_token_dispatcher_type "
    "masked_softmax_fusion bias_activation_fusion bias_dropout_fusion persist_layer_norm use_flash_attn "
    "attention_backend pad_to_length pad_to_length_bucket pad_bshd_to_minibatch_max optimizer_cpu_offload "
    "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d external_lib trust_remote_code device "
    "ray_wait_register_center_timeout deallocate_pipeline_outputs variable_seq_lengths moe_shared_expert_overlap "
    "use_prefix_grouper expert_tensor_parallel_size distributed_strategy cross_entropy_loss_fusion "
    "cross_entropy_fusion_impl moe_router_fusion model_dtype use_precision_aware_optimizer main_grads_dtype "
    "exp_avg_dtype exp_avg_sq_dtype layered_summon decoupled_lr max_seqlen_per_dp_cp_rank full_determinism"
)
_IDLE: Mapping[str, str] = {
    "metrics go to metrics.jsonl, TensorBoard and, with track_with: wandb, Weights & Biases": (
        "trainer.log_ trainer.rollout_data_dir trainer.validation_data_dir trainer.logger global_profiler trace "
        f"{ACTOR}.profiler {ROLLOUT}.profiler actor_rollout_ref.ref.profiler {ROLLOUT}.trace trainer.profile_ profiler "
        "npu_profile"
    ),
    "checkpoints are written by save_steps and loaded by resume_from_checkpoint": (
        f"trainer.resume_ {ACTOR}.checkpoint trainer.default_hdfs_dir trainer.del_local_ "
        "trainer.max_critic_ckpt_to_keep trainer.esi_redundant_time checkpoint"
    ),
    "belongs to another optimizer or schedule": " ".join(
        f"{section}.{name}"
        for section in (f"{ACTOR}.optim", "optim")
        for name in "muon_ lr_wsd_ use_layer_wise_ use_checkpoint_ optimizer_impl".split()
    ),
    "there is no critic in the converted job": "critic trainer.critic_warmup algorithm.lam",
    "one process per device of device_mapping; Ray or torchrun starts them on several machines": (
        "ray_kwargs transfer_queue trainer.use_v1 trainer.v1 actor_rollout_ref.hybrid_engine ray_init"
    ),
    "changes the order inside a mini-batch, not the gradient": f"{ACTOR}.shuffle {ACTOR}.data_loader_seed",
    "verl reads optim.clip_grad": f"{ACTOR}.grad_clip",
    "the loss picks other settings": f"{ACTOR}.policy_loss {ACTOR}.tau_pos {ACTOR}.tau_neg {ACTOR}.clip_ratio",
    "the job's seed serves all roles": f"{ROLLOUT}.seed engine.seed {ACTOR}.megatron.seed {ACTOR}.fsdp_config.seed",
    "is for verl's own workers; actor_infer configures engines here": (
        f"{ROLLOUT}.mode {ROLLOUT}.nnodes {ROLLOUT}.n_gpus_per_node {ROLLOUT}.free_cache_engine {ROLLOUT}.load_format "
        f"{ROLLOUT}.skip_tokenizer_init {ROLLOUT}.checkpoint_engine {ROLLOUT}.disable_log_stats "
        f"{ROLLOUT}.multi_stage_wake_up {ROLLOUT}.calculate_log_probs {ROLLOUT}.prompt_length "
        f"{ROLLOUT}.response_length {ROLLOUT}.log_prob_ {ROLLOUT}.over_sample_rate {ROLLOUT}.scheduling_policy "
        f"{ROLLOUT}.logprobs_mode {ROLLOUT}.update_weights_bucket_megabytes {ROLLOUT}.agent {ROLLOUT}.engine_kwargs "
        f"{ROLLOUT}.enable_sleep_mode {ROLLOUT}.prometheus skip"
    ),
    "the layout and the caps of the reference are those of actor_train": "actor_rollout_ref.ref",
    "passes and the mini-batch are those of actor_train": f"{ACTOR}.rollout_n {ACTOR}.calculate_sum_pi_squared",
    "prompts are read by actor_train.data_args": (
        "data.return_ data.reward_fn_key data.val_batch_size data.image_patch_size data.video_ data.audio_ "
        "data.tokenizer data.use_shm data.validation_shuffle data.custom_cls.name data.ignore_input_ids_mismatch "
        "data.pad_mode data.mm_"
    ),
    "verl's reward loop calls rewards; reward_workers do here": "reward.num_workers reward.reward_manager.module",
    "the weight of the KL term is not adapted": "algorithm.kl_ctrl",
    "there is no KL term in the reward": "algorithm.kl_penalty",
    "advantages do not read it": "algorithm.norm_adv_by_std_in_grpo algorithm.pf_ppo",
    "rollouts are not corrected": "algorithm.rollout_correction",
    "belongs to distillation, which is off": "distillation",
    "roll-batching trains with Megatron-Core, whose settings are strategy_config": (
        f"{ACTOR}.fsdp_config {ACTOR}.veomni {ACTOR}.torchtitan {ACTOR}.strategy engine.strategy engine.fsdp engine.dp_"
    ),
}
ASYNC = "verl's asynchronous trainers are not converted: async_generation_ratio lets rollouts run ahead"
_REFUSED: Mapping[str, str] = {
    ASYNC: "async_training rollout.nnodes rollout.n_gpus_per_node rollout.total_rollout_steps",
    "rollouts have one turn": f"{ROLLOUT}.multi_turn data.tool_config_path data.function_tool_path",
    "samples are not weighted by their rewards like this": "algorithm.use_pf_ppo",
    "the optimizer is AdamW with the settings above": f"{ACTOR}.optim. optim.",
    f"{ROUTERS} are as the model's config.json says": (
        f"{ACTOR}.megatron.override_transformer_config.moe_ engine.override_transformer_config.moe_"
    ),
    "is not set in a model that is built from config.json": (
        f"{ACTOR}.megatron.override_ engine.override_ {MODEL}.override_config model.override_config"
    ),
    "belongs to router replay in mode R3": f"{ROLLOUT}.enable_rollout_routing_replay",
    "experts are recorded in memory": f"{ACTOR}.router_replay {ACTOR}.megatron.router_replay engine.router_replay",
    "adapters of a critic are not supported for now": " ".join(
        f"{model}.{name}"
        for model in (MODEL, "model")
        for name in ("lora lora_rank lora_alpha target_modules exclude_modules lora_adapter_path").split()
    ),
    "heads of multi-token prediction are trained (enable_train), and not used in sampling": (
        f"{MODEL}.mtp model.mtp {ROLLOUT}.mtp"
    ),
    "quantised weights are not trained or sampled": (
        f"{ACTOR}.qat {ACTOR}.megatron.qat engine.qat {ROLLOUT}.quantization {ROLLOUT}.qat"
    ),
    "config.json and the tokenizer lie in the model's directory": (
        f"{MODEL}.hf_config_path model.hf_config_path {MODEL}.custom_chat_template model.custom_chat_template"
    ),
    "responses end at the tokenizer's end token": f"{ROLLOUT}.ignore_eos",
    "engines compute in the model's precision": f"{ROLLOUT}.dtype",
    "texts are shuffled anew in every epoch, all of them": "data.sampler data.train_max_samples data.val_max_samples",
    "code for verl's data sets does not run here": "data.custom_cls data.datagen",
    "no such reward exists here: write a function, and name it in reward_function or rewards": (
        "reward custom_reward_function reward_model sandbox_fusion"
    ),
    "training and sampling end when the job does": "trainer.val_only",
}


class VerlFile(ForeignFile):
    """Settings of a file or script of verl."""

    reasons = tuple(
        sorted((*reasons_of("refused", _REFUSED), *reasons_of("idle", _IDLE)), key=lambda one: -len(one[0]))
    )
    speed = frozenset(_SPEED.split())

    def put(self, path: tuple[str, ...], value: Any, key: str, meaning: str = "") -> None:
        """Puts `value`, unless it is None, at `path` of the draft."""
        if value is not None:
            self.draft.put(path, value, key, meaning)
