"""ROLL's and Megatron's keys that do nothing here: each is accepted with a notice, or refused with its reason.

They are the bases of the settings that are read (`job_keys`, `worker`, `strategy`, `model`), so that a file written
for ROLL is read to its end and nothing in it is ignored silently.
"""

from __future__ import annotations

from typing import Any, Literal

from roll_batching.config.fields import Settings, honoured, noticed, refused

CRITIC = "critics and value heads are not supported for now; use adv_estimator: grpo"
DISTILLATION = "distillation is not supported for now"
LORA = "LoRA is not supported for now; train all parameters and leave the lora keys out"
VLM = "vision-language models are not supported for now"
FP8 = "FP8 is not supported for now; use model_args.dtype: bf16"
ROUTER_REPLAY = "router replay is not supported for now"
DYNAMIC_CP = "context-parallel groups that change per micro-batch are not supported for now"


class RollModelArgs(Settings):
    """Of `model_args`: LoRA, vision towers."""

    disable_gradient_checkpointing: bool | None = noticed(
        None,
        help="ROLL's switch for Hugging Face models.",
        notice="activations are recomputed as strategy_config.recompute_granularity says, as under "
        "ROLL's Megatron "
        "strategies; this switch does not change it",
    )
    attn_implementation: Literal["auto", "fa2", "sdpa"] | None = noticed(
        None,
        help="Attention kernel, in ROLL's names.",
        notice="strategy_config.attention_backend chooses the attention core, in names of its own; this value does not "
        "change it",
    )
    flash_attn: str | None = noticed(
        None,
        help="ROLL's older name of attn_implementation.",
        notice="strategy_config.attention_backend chooses the attention core, in names of its own",
    )
    model_type: str | None = refused(
        None,
        help="ROLL's switch for reward-model heads.",
        reason="only causal language models are trained here; leave it empty (~)",
    )
    freeze_module_prefix: str | list[str] | None = refused(
        None,
        help="Modules to freeze.",
        reason="all parameters are trained; freezing modules is not supported",
    )
    adapter_name_or_path: str | None = refused(None, help="LoRA adapter to load.", reason=LORA)
    lora_rank: int | None = refused(None, help="LoRA rank.", reason=LORA)
    lora_alpha: int | None = refused(None, help="LoRA scale.", reason=LORA)
    lora_target: str | list[str] | None = refused(None, help="Modules with LoRA.", reason=LORA)
    lora_dropout: float | None = refused(None, help="LoRA dropout.", reason=LORA)
    additional_target: str | list[str] | None = refused(None, help="Modules trained beside LoRA.", reason=LORA)
    vision_config: dict[str, Any] | None = refused(None, help="Vision tower of a multimodal model.", reason=VLM)


class RollArchitecture(Settings):
    """Of `model_args.architecture`."""

    attention_dropout: float = refused(
        0.0,
        help="Dropout inside attention.",
        reason="variable-length attention kernels have no dropout; use 0",
    )
    multi_latent_attention: bool = refused(
        False,
        help="Multi-head latent attention.",
        reason="multi-head latent attention (MLA) is not supported for now",
    )
    mtp_num_layers: int | None = refused(
        None,
        help="Layers that predict further tokens.",
        reason="multi-token prediction (MTP) is not supported for now",
        allowed=(0,),
    )


class RollMegatronConfig(Settings):
    """Of `strategy_config`: Megatron's switches that follow from the plan, or break it."""

    variable_seq_lengths: bool = noticed(
        False,
        help="Megatron's exchange of shapes between stages.",
        notice="shapes come from the plan; pipeline_shapes: exchanged asks for Megatron's own exchange",
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = refused(
        "alltoall",
        help="How tokens travel to experts.",
        reason="allgather fails with micro-batches of different lengths",
    )
    apply_rope_fusion: bool = noticed(
        False,
        help="TransformerEngine's rotary kernel.",
        notice="it is used under transformer_impl: transformer_engine; our attention cores rotate themselves",
    )
    bias_activation_fusion: bool = noticed(
        False,
        help="Fused bias and activation.",
        notice="activations are fused on CUDA and not on the CPU, whatever this says",
    )
    bias_dropout_fusion: bool = noticed(
        False,
        help="Fused dropout and residual.",
        notice="no linear layer before a residual has a bias; dropout is added to it unfused",
    )
    masked_softmax_fusion: bool = noticed(
        False, help="Fused softmax.", notice="no attention here holds the scores that it would mask"
    )
    gradient_accumulation_fusion: bool = noticed(
        False,
        help="APEX's kernel that adds a weight's gradient to the sum so far.",
        notice="it is used on CUDA where APEX is installed, and the line that names the fusions says so",
    )
    bf16: bool | None = noticed(None, help="ROLL's precision flag.", notice="precision is model_args.dtype")
    moe_grouped_gemm: bool = noticed(
        False,
        help="One kernel for all experts of a rank.",
        notice="experts are one kernel under transformer_impl: transformer_engine, else computed one after the other",
    )
    moe_permute_fusion: bool = noticed(
        False,
        help="Fused ordering of tokens by expert.",
        notice="tokens are ordered by experts fused under transformer_impl: transformer_engine, else unfused",
    )
    moe_router_fusion: bool = noticed(
        False,
        help="Fused routing.",
        notice="routing is fused under transformer_impl: transformer_engine, else unfused",
    )
    moe_shared_expert_overlap: bool = noticed(
        False,
        help="Shared expert beside the tokens' travel.",
        notice="the shared expert is computed after the others",
    )
    moe_layer_recompute: bool = noticed(
        False,
        help="Recompute mixture layers in backward.",
        notice="recompute_granularity: selective with recompute_modules: [moe] does it",
    )
    cross_entropy_loss_fusion: bool = noticed(
        False, help="Megatron's fused cross-entropy.", notice="log-probs come from kernels of our own"
    )
    account_for_embedding_in_pipeline_split: bool = refused(
        False,
        help="Count the embedding as a layer of the first stage.",
        reason="stages have equal numbers of layers",
    )
    account_for_loss_in_pipeline_split: bool = refused(
        False, help="Count the head as a layer of the last stage.", reason="stages have equal numbers of layers"
    )
    overlap_p2p_comm: bool = refused(
        False,
        help="Overlap pipeline transfers with compute.",
        reason="transfers with planned shapes are not overlapped for now; leave it out",
    )
    batch_p2p_comm: bool = refused(
        False,
        help="Batch the pipeline's sends and receives.",
        reason="batched transfers pair wrongly with two stages and virtual pipelining; leave it out",
    )
    deallocate_pipeline_outputs: bool = refused(
        False,
        help="Free a stage's output early.",
        reason="it races with transfers before Megatron-Core 0.18; leave it out",
    )
    mtp_num_layers: int | None = refused(
        None,
        help="Layers that predict further tokens.",
        reason="multi-token prediction (MTP) is not supported for now",
        allowed=(0,),
    )
    fp8: str | None = refused(None, help="FP8 format.", reason=FP8)
    fp8_recipe: str | None = refused(None, help="FP8 scaling recipe.", reason=FP8)
    fp8_param: bool = refused(False, help="FP8 weights.", reason=FP8)
    moe_enable_routing_replay: bool = refused(False, help="Replay of routing decisions.", reason=ROUTER_REPLAY)
    dynamic_context_parallel: bool = refused(False, help="Context-parallel groups per micro-batch.", reason=DYNAMIC_CP)
    hybrid_context_parallel: bool = refused(False, help="Megatron's earlier name for it.", reason=DYNAMIC_CP)


class RollTrainingArgs(Settings):
    """Of `training_args`: the trainer of Hugging Face."""

    num_train_epochs: float | None = noticed(
        None,
        help="Passes over the data.",
        notice="the job's length is max_steps; the prompts repeat when they run out",
    )
    bf16: bool = noticed(False, help="ROLL's precision flag.", notice="precision is model_args.dtype")
    fp16: bool = refused(False, help="Half precision with loss scaling.", reason="fp16 is not supported; use bf16")
    dataloader_num_workers: int = noticed(
        0, help="Loader processes.", notice="the prompts are held in memory and need no loader processes"
    )
    seed: int | None = noticed(None, help="Seed of the role.", notice="the job's top-level seed is used for all roles")
    output_dir: str | None = noticed(None, help="Output folder of the role.", notice="the top-level output_dir is used")


class RollDataArgs(Settings):
    """Of `data_args`: chats, mixtures of data sets, images."""

    template: str | None = noticed(
        None,
        help="Chat template.",
        notice="messages go through the tokenizer's own chat template, and prompts are used as their file has them",
    )
    dataset_type: str | None = refused(
        "json", help="Kind of file.", reason="only JSON lines are read", allowed=(None, "jsonl")
    )
    id: str | None = noticed(None, help="Key of the id.", notice="samples are numbered by the job")
    preprocessing_num_workers: int | None = noticed(
        None, help="Processes that tokenise.", notice="prompts are tokenised in the job's own process"
    )
    dataset_dir: str | None = noticed(None, help="Folder of data sets.", notice="file_name holds the whole path")
    interleave_probs: str | list[float] | None = noticed(
        None, help="Mixing of data sets.", notice="all prompts are drawn with equal probability"
    )
    image_folder: str | None = refused(None, help="Folder of images.", reason=VLM)
    video_folder: str | None = refused(None, help="Folder of videos.", reason=VLM)


class RollGeneratingArgs(Settings):
    """Of `generating_args`: an engine's sampling."""

    num_beams: int = refused(1, help="Beams.", reason="beam search is not supported; use 1")
    repetition_penalty: float = refused(
        1.0,
        help="Penalty on repeated tokens.",
        reason="it would make sampled log-probs differ from the model's; use 1.0",
    )
    length_penalty: float = refused(
        1.0, help="Length penalty of beam search.", reason="there is no beam search; use 1.0"
    )
    max_length: int | None = noticed(None, help="Longest prompt and response.", notice="max_new_tokens is the limit")
    stop_strings: list[str] | None = refused(
        None,
        help="Texts that end a response.",
        reason="a response ends at the tokenizer's end token; leave it out",
    )
    include_stop_str_in_output: bool | None = noticed(
        None, help="Keep the stop text.", notice="a response ends at the end token, which is kept"
    )
    logprobs: int | None = noticed(
        None, help="Log-probs returned by the engine.", notice="the sampled tokens' log-probs are always kept"
    )


class RouterReplay(Settings):
    """`router_replay`."""

    mode: str = refused("disable", help="Replay mode.", reason=ROUTER_REPLAY)


class RollWorkerKeys(Settings):
    """Of a role: Ray's workers, multi-token prediction, router replay."""

    logits_in_fp32: bool = noticed(
        False,
        help="Logits in fp32.",
        notice="log-probs and entropy are always computed in fp32, from logits of any precision",
    )
    name: str | None = noticed(None, help="Name of the role.", notice="a role's name is its key in the file")
    worker_cls: str | None = noticed(
        None,
        help="ROLL's worker class.",
        notice="there are no worker classes here; name your loss in loss_function",
    )
    num_gpus_per_worker: int | None = noticed(
        None, help="Devices per process.", notice="a process drives one device, and engines are not started"
    )
    world_size: int | None = noticed(None, help="Processes of the role.", notice="device_mapping counts the processes")
    max_concurrency: int | None = noticed(
        None, help="Ray actor's concurrency.", notice="a rank does one thing at a time"
    )
    model_update_frequency: int = refused(
        1,
        help="Steps between weight updates of the engine.",
        reason="rollouts always use the current weights; use 1",
    )
    offload_nccl: bool = noticed(False, help="Free NCCL buffers.", notice="roles share one process and its buffers")
    router_replay: RouterReplay = honoured(default_factory=RouterReplay, help="Router replay, refused for now.")
    mtp_training_mode: str | None = refused(
        "disabled",
        help="Multi-token prediction.",
        reason="multi-token prediction (MTP) is not supported for now",
        allowed=(None,),
    )
    opd_kl_coef: float | None = refused(None, help="Weight of on-policy distillation.", reason=DISTILLATION)


class RollJobKeys(Settings):
    """Of a job: trackers, Ray, critics, distillation, roles that do not exist here."""

    logging_dir: str | None = noticed(None, help="Folder of logs.", notice="everything a run leaves lies in its folder")
    checkpoint_config: dict[str, Any] | None = noticed(
        None,
        help="Where checkpoints go.",
        notice="checkpoints lie in the run's folder",
    )
    num_gpus_per_node: int | None = noticed(
        None, help="Devices per machine.", notice="actor_train.device_mapping counts the processes"
    )
    num_nodes: int | None = noticed(None, help="Machines.", notice="Ray, or one torchrun per machine, decides")
    rpc_timeout: int | None = noticed(None, help="Ray's timeout.", notice="backend_timeout limits collectives")
    val_batch_size: int | None = noticed(
        None, help="Prompts per evaluation batch.", notice="eval_samples is the number"
    )
    hydra: dict[str, Any] | None = noticed(None, help="Hydra's own section.", notice="Hydra is not used here")
    reward_pretrain: str | None = noticed(
        None, help="Checkpoint of a reward model.", notice="rewards come from reward_function, or from rewards"
    )
    global_template: str | None = noticed(
        None,
        help="Chat template.",
        notice="messages go through the tokenizer's own chat template, and prompts are used as their file has them",
    )
    offload_nccl: bool = noticed(False, help="Free NCCL buffers.", notice="roles share one process and its buffers")
    rollout_dump_dir: str | None = noticed(
        None,
        help="Folder that receives rollouts.",
        notice="rollouts.jsonl lies in the run's folder; rollout_samples says how many",
    )
    is_num_return_sequences_expand: bool = noticed(
        False,
        help="Send the engine every prompt as often as it is answered.",
        notice="the responses to a prompt are sampled together; which way does not change them",
    )
    enable_reference: bool = noticed(
        False, help="Build the reference.", notice="the reference is built when use_kl_loss is true"
    )
    enable_old_logprobs_recompute: bool = noticed(
        True, help="Compute old log-probs.", notice="actor_train.logprob_plan decides"
    )
    value_clip: float | None = noticed(None, help="Clip range of a critic.", notice="there is no critic")
    whiten_rewards: bool = refused(False, help="Whiten rewards.", reason="use norm_mean_type and norm_std_type")
    error_max_len_clip: bool = refused(False, help="Clip overlong errors.", reason="not supported")
    difficulty_loss_weight: bool = refused(False, help="Weight by difficulty.", reason="not supported")
    length_loss_weight: bool = refused(False, help="Weight by length.", reason="not supported")
    critic: dict[str, Any] | None = refused(None, help="Role of the critic.", reason=CRITIC)
    critic_warmup: int = refused(0, help="Steps that train only the critic.", reason=CRITIC)
    teacher: dict[str, Any] | None = refused(None, help="Role of a teacher.", reason=DISTILLATION)
    student_train: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    student_infer: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    is_pure_opd: bool = refused(False, help="On-policy distillation.", reason=DISTILLATION)
    use_opd: bool = refused(False, help="On-policy distillation beside rewards.", reason=DISTILLATION)
    reward: dict[str, Any] | None = refused(
        None, help="Reward role.", reason="name one Python function in reward_function instead"
    )
    sft_train: dict[str, Any] | None = refused(
        None, help="Role of supervised training.", reason="write task: sft and put its keys into actor_train"
    )
