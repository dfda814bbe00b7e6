"""Checks that a model, its config and its optimizer can train under a strategy.

Most of them stand for a defect that Megatron does not report: it hangs, or trains on wrong gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LayoutError
from roll_batching.modeling.attention.core import PackedCore
from roll_batching.modeling.experts import expert_problems
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.requirements import ModelDemands, recomputed_modules
from roll_batching.packing.attention_backend import AttentionBackend
from roll_batching.planning.arrays import kind_of
from roll_batching.settings import BatchingConfig
from roll_batching.strategy.model_state import ModelState, StepSettings
from roll_batching.strategy.optimizer_step import has_loss_scale, layer_wise_parameters, optimizer_parts


def check_compatibility(state: ModelState, *, defer_head: bool = False, problems: Sequence[str] = ()) -> None:
    """Raises `LayoutError` with all of `compatibility_problems` and `problems`, if there are any."""
    problems = [*compatibility_problems(state, defer_head=defer_head), *problems]
    if problems:
        raise LayoutError("the model cannot be trained: " + "; ".join(problems))


def compatibility_problems(state: ModelState, *, defer_head: bool = False) -> list[str]:
    """Everything about model, config and optimizer that cannot work, each with the setting that cures it."""
    chunks, layout, settings = state.chunks, state.layout, state.settings
    config = gpt_of(chunks[0]).config
    return [
        *_model_problems(chunks, layout, defer_head),
        *_vocabulary_problems(state),
        *optimizer_problems(chunks, state.optimizer),
        *_attention_problems(chunks, state.batching, settings),
        *_installation_problems(state),
        *expert_problems(config, packed=not settings.rows_form),
        *([] if state.training is None else _reduction_problems(chunks, layout)),
        *_pipeline_problems(config, layout, settings),
        *_ratio_problems(config, state.batching),
    ]


def _version() -> tuple[int, int]:
    major, minor = megatron.core.__version__.split(".")[:2]
    return int(major), int(minor)


def _model_problems(chunks: Sequence[Any], layout: ParallelLayout, defer_head: bool) -> list[str]:
    problems = []
    config = gpt_of(chunks[0]).config
    for chunk in chunks:
        if getattr(gpt_of(chunk), "mtp_process", False) and not hasattr(gpt_of(chunk), "predicts_ahead"):
            problems.append(
                "Megatron's multi-token prediction scales its losses by micro-batches and needs labels: build without "
                "mtp_block_spec, or let the strategy build the model (architecture.mtp_num_layers, docs/models.md)"
            )
        decoder = gpt_of(chunk).decoder
        if names := {type(layer).__name__ for layer in decoder.layers if not hasattr(layer, "self_attention")}:
            problems.append(
                f"{', '.join(sorted(names))} of {type(decoder).__name__} has no self_attention, and only layers of a "
                "GPTModel are supported: build hybrid models with architecture.hybrid (docs/models.md)"
            )
    if config.virtual_pipeline_model_parallel_size not in (None, len(chunks)):
        problems.append(
            f"{len(chunks)} chunks for virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size}: pass one chunk per virtual stage"
        )
    if config.context_parallel_size != layout.cp_size or config.tensor_model_parallel_size != layout.tp_size:
        problems.append(
            f"the config says tensor {config.tensor_model_parallel_size} and context {config.context_parallel_size} "
            f"parallel, the process groups {layout.tp_size} and {layout.cp_size}: build both from the same sizes"
        )
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        from roll_batching.modeling.build_problems import fp8_config_problems  # few models train so

        problems += fp8_config_problems(config, layout.device, uses_engine_layers(gpt_of(chunks[0])))
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") not in ("none", None):
        problems.append("CUDA graphs need one shape and packs have many: set cuda_graph_impl='none'")
    gathers_output = any(
        getattr(getattr(gpt_of(chunk), "output_layer", None), "gather_output", False) for chunk in chunks
    )
    if gathers_output and layout.tp_size > 1 and not defer_head:
        problems.append(
            "the output layer gathers its logits over tensor parallelism, whose ranks would each count the whole "
            "vocabulary: build with parallel_output=True, or pass defer_head=True"
        )
    if defer_head and config.defer_embedding_wgrad_compute:
        problems.append("defer_head and defer_embedding_wgrad_compute exclude each other: unset one")
    return problems


def _vocabulary_problems(state: ModelState) -> list[str]:
    columns = gpt_of(state.chunks[0]).vocab_size
    if state.vocab_size is None or state.vocab_size <= columns:
        return []
    return [
        f"vocab_size={state.vocab_size} is above the {columns} columns of the model's head: pass its real vocabulary"
    ]


def _attention_problems(chunks: Sequence[Any], batching: BatchingConfig, settings: StepSettings) -> list[str]:
    """Attention settings of the model that packs, or rectangles in rows form, do not support."""
    gpt = gpt_of(chunks[0])
    config = gpt.config
    if config.multi_latent_attention and config.tensor_model_parallel_size > 1 and _has_local_latent_attention(gpt):
        return [
            "Megatron's multi-latent attention of local layers has wrong gradients under tensor parallelism "
            "(Megatron-Core 0.16 to 0.19: heads' gradients of the shared key are not summed): build the model from "
            "TransformerEngine's layer spec, or from packed_layer_spec(config, RotarySettings(...))"
        ]
    if settings.rows_form:
        packed = [name for name in ("train", "infer") if getattr(batching, name).mode == "packed"]
        problems = []
        if packed:
            problems.append(f"rows_form serves padded and dynamic batching only, and {' and '.join(packed)} is packed")
        if names := [backend.name for backend in attention_backends(chunks)]:
            problems.append(f"the attention core {names[0]} takes packs: leave rows_form out")
        return problems
    problems = []
    cores = _cores(chunks)
    if any(isinstance(core, DotProductAttention) for core in cores):
        problems.append(
            "Megatron's local DotProductAttention refuses packed input: build the model from "
            "packed_layer_spec(config), use TransformerEngine's attention, or pass rows_form=True with padded or "
            "dynamic batching"
        )
    if len(names := [backend.name for backend in attention_backends(chunks)]) > 1:
        problems.append(f"layers attend with {' and '.join(names)}: build all of them with one attention backend")
    if any(getattr(core, "pack_rotates", False) for core in cores) and gpt.position_embedding_type != "none":
        problems.append(
            f"both the model (position_embedding_type={gpt.position_embedding_type!r}) and its attention core rotate: "
            "build it with position_embedding_type='none', or packed_layer_spec(config) without rotary"
        )
    if gpt.position_embedding_type == "mrope":
        problems.append("position_embedding_type='mrope' is not supported for packed sequences for now")
    if gpt.position_embedding_type == "rope" and config.apply_rope_fusion and config.rotary_interleaved:
        problems.append("the fused rotation of packs ignores rotary_interleaved before 0.17: unset apply_rope_fusion")
    if gpt.position_embedding_type == "yarn" and config.apply_rope_fusion:
        factor = _yarn_get_concentration_factor_from_config(config)
        if factor != 1.0:
            problems.append(
                f"the fused rotation of packs leaves out YaRN's factor of {factor:.4g} (Megatron-Core 0.16 to 0.19): "
                "unset apply_rope_fusion"
            )
    if getattr(config, "qk_clip", False) and any(isinstance(core, PackedCore) for core in cores):
        problems.append("qk_clip reads attention logits that our attention cores do not keep: unset it")
    return problems


def _has_local_latent_attention(gpt: Any) -> bool:
    """Whether layers are Megatron's own MLA over its own linear layers."""
    attentions = [layer.self_attention for layer in gpt.decoder.layers if hasattr(layer, "self_attention")]
    return any(
        isinstance(attention, MLASelfAttention)
        and type(attention).__module__.startswith("megatron.core")
        and isinstance(attention.linear_kv_down_proj, ColumnParallelLinear)
        for attention in attentions
    )


def _cores(chunks: Sequence[Any]) -> list[Any]:
    layers = [layer for chunk in chunks for layer in gpt_of(chunk).decoder.layers]
    attentions: list[Any] = [getattr(layer, "self_attention", None) for layer in layers]
    return [attention.core_attention for attention in attentions if hasattr(attention, "core_attention")]


def attention_backends(chunks: Sequence[Any]) -> list[AttentionBackend]:
    """The distinct attention backends of all layers; a caller's own cores have none."""
    backends = [getattr(core, "pack_backend", None) for core in _cores(chunks)]
    return list(dict.fromkeys(backend for backend in backends if backend is not None))


_ENGINE_MODULES = ("megatron.core.extensions.transformer_engine",)
"""Modules of Megatron's TransformerEngine layers."""


def uses_engine_layers(gpt: Any) -> bool:
    """Whether a model has layers of TransformerEngine."""
    return any(type(module).__module__ in _ENGINE_MODULES for module in gpt.modules())


def _installation_problems(state: ModelState) -> list[str]:
    gpt = gpt_of(state.chunks[0])
    config = gpt.config
    latent = bool(config.multi_latent_attention)
    weights = next(p for p in gpt.parameters() if p.dim() > 1)
    demands = ModelDemands(
        dtype=config.autocast_dtype if config.enable_autocast else weights.dtype,
        head_dim=config.qk_head_dim + config.qk_pos_emb_head_dim if latent else config.kv_channels,
        backend=state.attention,
        engine_layers=uses_engine_layers(gpt),
        recomputed=recomputed_modules(config),
        latent_attention=latent,
        attention_sinks=getattr(state.attention, "sinks", False) and config.softmax_type == "learnable",
        value_dim=config.v_head_dim if latent else config.kv_channels,
        has_window=(getattr(config, "window_size", None) or (-1,))[0] >= 0,
    )
    problems = demands.refusals_here(state.device)
    without_engine = importlib.util.find_spec("transformer_engine") is None
    for name in ("moe_router_fusion", "moe_permute_fusion"):
        if getattr(config, name, False) and without_engine:
            problems.append(f"{name} is a kernel of TransformerEngine, which is not installed: install it or unset it")
    return problems


def _reduction_problems(chunks: Sequence[Any], layout: ParallelLayout) -> list[str]:
    config = gpt_of(chunks[0]).config
    in_ddp = [hasattr(chunk, "finish_grad_sync") for chunk in chunks]  # Megatron FSDP's wrapper has it too
    problems = []
    if not all(in_ddp):
        # Without DDP nothing reduces gradients: right for one rank of each of these groups only.
        if layout.dp_size * layout.cp_size > 1 or layout.sequence_parallel or layout.pp_size > 1:
            problems.append(
                "chunks outside Megatron's DistributedDataParallel leave gradients unreduced over data, context, "
                "sequence and pipeline parallel ranks: wrap them"
            )
        return problems
    if config.finalize_model_grads_func is None:
        problems.append(
            "config.finalize_model_grads_func is None, so gradients are never reduced: set it to "
            "megatron.core.distributed.finalize_model_grads"
        )
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if getattr(chunks[0].ddp_config, name, False):
            problems.append(
                f"ddp_config.{name} raises on the rank that has such a gradient alone, and the others wait for it: set "
                f"ddp_config.{name}=False. train_step skips a step whose gradient is not finite, on all ranks"
            )
    if chunks[0].ddp_config.overlap_grad_reduce and config.no_sync_func is None:
        problems.append(
            "overlap_grad_reduce without config.no_sync_func reduces after every micro-batch: set it to the chunks' "
            "no_sync"
        )
    return problems


def _pipeline_problems(config: Any, layout: ParallelLayout, settings: StepSettings) -> list[str]:
    if layout.pp_size == 1:
        return []
    problems = []
    # PP2 x VPP2: the previous and the next rank are one, and batched operations pair its transfers wrongly without an
    # error (Megatron issue 1450). The guard is in Megatron's training arguments only, not in its core.
    if config.batch_p2p_comm:
        problems.append(
            "batch_p2p_comm=True crashes with planned shapes and pairs transfers wrongly at pipeline size 2 with "
            "virtual stages: set config.batch_p2p_comm=False"
        )
    if config.overlap_p2p_comm and not transfers_may_overlap(layout.device):
        problems.append(
            "overlap_p2p_comm is not reproducible on CPU and races with freed outputs before Megatron-Core 0.18: set "
            "config.overlap_p2p_comm=False"
        )
    # A race of the sends with the freed outputs, also on GPUs (Megatron PR 4047, in 0.18).
    if config.deallocate_pipeline_outputs and config.overlap_p2p_comm and _version() < (0, 18):
        problems.append("deallocate_pipeline_outputs corrupts overlapped transfers before 0.18: unset it")
    if config.num_moe_experts is None and config.moe_token_dispatcher_type == "allgather":
        problems.append(
            "Megatron refuses variable lengths with moe_token_dispatcher_type='allgather' even for dense models: set "
            "it to 'alltoall'"
        )
    return problems


def transfers_may_overlap(device: torch.device) -> bool:
    """Whether Megatron's `overlap_p2p_comm` is correct on `device` with the installed version."""
    return device.type != "cpu" and _version() >= (0, 18)


def random_settings(config: Any) -> list[str]:
    """Settings by which a forward pass draws random numbers for each token, with their values."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
    return [f"{name}={getattr(config, name)}" for name in names if getattr(config, name)]


def _ratio_problems(config: Any, batching: BatchingConfig) -> list[str]:
    """Settings under which a training pass computes other log-probs than a log-prob pass with the same plan."""
    if batching.logprob_plan != "train":
        return []
    differing = random_settings(config)
    if config.num_moe_experts is not None and config.moe_router_load_balancing_type == "sinkhorn":
        differing.append("moe_router_load_balancing_type='sinkhorn'")  # in training only
    if not differing:
        return []
    return [
        f"with {' and '.join(differing)} a training pass computes other log-probs than the log-prob pass, so the first "
        "ratio is not 1: unset that, or set logprob_plan to 'own' or 'none'"
    ]


def scheduler_problems(optimizer: Any, scheduler: Any, scheduler_unit: str | None) -> list[str]:
    """Problems of a learning-rate schedule, each with the setting that cures it."""
    problems = []
    if scheduler is not None and scheduler_unit is None:
        problems.append(
            "scheduler_unit, which says what the scheduler counts, was left out: pass 'samples' if its lr_warmup_steps "
            "and lr_decay_steps are samples (as Megatron's training loop has them), 'steps' if they are optimizer steps"
        )
    if scheduler_unit not in (None, "steps", "samples"):
        problems.append(f"scheduler_unit={scheduler_unit!r} is unknown: pass 'steps' or 'samples'")
    if scheduler is None:
        return problems
    if not isinstance(scheduler, OptimizerParamScheduler):
        problems.append(f"scheduler is {kind_of(scheduler)}: pass Megatron's OptimizerParamScheduler, or None")
    elif optimizer is None:
        problems.append("optimizer is None, so the scheduler is never stepped: leave it out, and step yours")
    elif scheduler.optimizer is not optimizer:
        problems.append("this is the scheduler of another optimizer: make it with the optimizer that is passed")
    return problems


def optimizer_problems(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    """Problems of an optimizer for the model of `chunks`, each with the setting that cures it."""
    if optimizer is None:
        return []
    if not isinstance(optimizer, MegatronOptimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        return [
            f"{name} is not a Megatron optimizer: make one with megatron.core.optimizer.get_megatron_optimizer, or "
            "pass optimizer=None and step yours after forward_backward"
        ]
    problems = _ownership_problems(chunks, optimizer)
    if has_loss_scale(optimizer) and gpt_of(chunks[0]).config.grad_scale_func is None:
        problems.append(
            "the optimizer divides gradients by a loss scale, and config.grad_scale_func is None, so that the loss is "
            "never multiplied by it: set config.grad_scale_func=optimizer.scale_loss"
        )
    return problems


def _ownership_problems(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks):
        return []  # Megatron FSDP's optimizer steps its own shards, not the model's parameters
    names = {parameter: name for chunk in chunks for name, parameter in gpt_of(chunk).named_parameters()}
    stepped = {parameter for part in optimizer_parts(optimizer) for parameter in _model_parameters(part)}
    stepped.update(layer_wise_parameters(optimizer))  # those of all ranks
    problems = []
    if foreign := len(stepped - names.keys()):
        problems.append(
            f"the optimizer holds {foreign} parameters of another model, which no gradient would reach: make it from "
            "these model_chunks, after they are wrapped"
        )
    missing = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in stepped]
    if missing and not foreign:
        problems.append(
            f"the model has {len(missing)} trainable parameters that the optimizer does not hold, such as "
            f"{missing[0]}: make it from all model_chunks, or freeze what it leaves out (requires_grad=False)"
        )
    return problems


def _model_parameters(part: Any) -> list[Any]:
    """The model parameters behind the fp32 copies or shards that an optimizer steps."""
    if getattr(part, "is_stub_optimizer", False):
        return []
    if hasattr(part, "model_param_gbuf_map"):  # the distributed optimizer: its buffers have the parameters of all ranks
        return [parameter for buffer in part.buffers for parameter in buffer.params]
    groups = [group["params"] for group in part.optimizer.param_groups]
    if hasattr(part, "float16_groups"):
        groups = [*part.float16_groups, *part.fp32_from_fp32_groups]
    return [parameter for group in groups for parameter in group]
