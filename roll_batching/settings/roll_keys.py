"""ROLL's and Megatron's keys of a strategy that do nothing here: accepted with a notice, or refused with a reason.

They are the bases of the settings that are read (`training`, `strategy`, `model`), so that a file written for ROLL is
read to its end and nothing in it is ignored silently.
"""

from __future__ import annotations

from typing import Any, Literal

from roll_batching.settings.fields import Settings, noticed, refused

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
