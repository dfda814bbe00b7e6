"""Taking over a model that exists: what must hold for it to train right, checked before anything runs.

Most checks stand for a defect that Megatron does not report: it hangs, or trains on wrong gradients.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import megatron.core
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.parallel_layout import ParallelLayout, describe_layout
from roll_batching.errors import LayoutError
from roll_batching.losses.runner import has_router_losses
from roll_batching.modeling.attention.core import PackedCore
from roll_batching.modeling.cost import model_cost
from roll_batching.modeling.experts import expert_problems, router_loss_weights
from roll_batching.modeling.head import defer_head as defer
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.requirements import recomputed_modules, refusals_here
from roll_batching.packing.attention_backend import AttentionBackend
from roll_batching.planning import CostModel
from roll_batching.planning.cost_model import require_cost
from roll_batching.planning.plain_values import integer_of
from roll_batching.settings import BatchingConfig
from roll_batching.strategy.optimizer_parts import optimizer_problems
from roll_batching.strategy.part_arguments import check_arguments, shape_of
from roll_batching.strategy.settings import StepSettings
from roll_batching.strategy.state import ModelState, TrainingState

logger = logging.getLogger(__name__)


def require_processes() -> None:
    """Raises `LayoutError` unless the processes have met."""
    if not dist.is_initialized():
        raise LayoutError("no process group: call torch.distributed.init_process_group and build the model first")


def adopt_parts(
    chunks: Sequence[Any],
    batching: BatchingConfig,
    settings: StepSettings,
    *,
    pg_collection: Any,
    vocab_size: int | None,
    cost: CostModel | None,
    training: TrainingState,
    defer_head: bool,
    also: Sequence[str] = (),
) -> ModelState:
    """The state of chunks that somebody else built, checked; their head is deferred if asked. A collective call.

    `cost` None derives one from the model's config. `also` holds problems that were found before.

    Raises `LayoutError` (one rank) or `RankError` (several) that lists all that cannot work.
    """
    with consensus(host_group(), "from_parts") as facts:
        check_arguments(chunks, batching, settings, pg_collection)
        gpt = gpt_of(chunks[0])
        config = gpt.config
        if vocab_size is not None:
            vocab_size = integer_of("vocab_size", vocab_size, error=LayoutError)
        if cost is not None:
            require_cost(cost)
        facts.equal("vocab_size", vocab_size)
        facts.equal("the model", shape_of(gpt))
        facts.equal("how passes are batched", batching)
        facts.equal("the settings", settings)
    layout = describe_layout(
        vpp_size=len(chunks),
        sequence_parallel=config.sequence_parallel,
        device=next(gpt.parameters()).device,
        groups=pg_collection,
    )
    layout = replace(layout, fully_sharded=gathers_layers(getattr(chunks[0], "ddp_config", None)))
    state = ModelState(
        layout=layout,
        chunks=chunks,
        dtype=config.params_dtype,
        cost=cost or model_cost(config, gpt.vocab_size, layout),
        batching=batching,
        settings=settings,
        attention=next(iter(_backends(chunks)), None),
        vocab_size=vocab_size,
        pg_collection=pg_collection,
        training=training,
    )
    with consensus(layout.host_group, "from_parts"):
        check_parts(state, defer_head=defer_head, also=also)
    if not settings.rows_form and gpt.position_embedding_type == "rope" and dist.get_rank() == 0:
        logger.warning(
            "the model rotates packed sequences itself, which without TransformerEngine's fused kernel waits for the "
            "device in every layer; packed_layer_spec(config, RotarySettings(...)) with position_embedding_type='none' "
            "does not"
        )
    if has_router_losses(config):
        _notice_router_losses(config, pg_collection or ProcessGroupCollection.use_mpu_process_groups())
    if defer_head:
        for chunk in chunks:
            _defer_in(chunk)
    return state


def _notice_router_losses(config: Any, groups: Any) -> None:
    auxiliary, z_loss = router_loss_weights(config, groups.tp_cp)
    if (auxiliary, z_loss) != (1.0, 1.0) and dist.get_rank() == 0:
        logger.warning(
            "with calculate_per_token_loss this Megatron-Core makes the routers' auxiliary loss %g times and their "
            "z-loss %g times as strong as their coefficients say: divide moe_aux_loss_coeff and moe_z_loss_coeff by "
            "that, or set calculate_per_token_loss=False",
            auxiliary,
            z_loss,
        )


def gathers_layers(ddp_config: Any) -> bool:
    """Whether a DistributedDataParallelConfig shards parameters, so that ranks meet in every layer.

    Megatron FSDP does with its strategy "optim_grads_params"; `overlap_param_gather` gathers once per step.
    """
    return bool(
        getattr(ddp_config, "use_megatron_fsdp", False)
        and ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
    )


def _defer_in(chunk: Any) -> None:
    # DDP with overlapped parameter gathering keeps its hook handles by module object and class.
    hooked = getattr(chunk, "use_forward_hook", False)
    if hooked:
        chunk.disable_forward_pre_hook()
    defer(gpt_of(chunk))
    if hooked:
        chunk.enable_forward_pre_hook()


def check_parts(state: ModelState, *, defer_head: bool = False, also: Sequence[str] = ()) -> None:
    """Raises `LayoutError` with all of `part_problems` and `also`, if there are any."""
    problems = [*part_problems(state, defer_head=defer_head), *also]
    if problems:
        raise LayoutError("the model cannot be trained as it is: " + "; ".join(problems))


def part_problems(state: ModelState, *, defer_head: bool = False) -> list[str]:
    """Everything about model and config that cannot work, each with what to set; empty when all is well."""
    chunks, layout, settings = state.chunks, state.layout, state.settings
    config = gpt_of(chunks[0]).config
    return [
        *_model_problems(chunks, layout, defer_head),
        *_vocabulary_problems(state),
        *optimizer_problems(chunks, state.optimizer),
        *_attention_problems(chunks, state.batching, settings),
        *_installation_problems(state),
        *expert_problems(config, packed=not settings.rows_form),
        *_reduction_problems(chunks, layout),
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
        if getattr(gpt_of(chunk), "mtp_process", False):
            problems.append("multi-token prediction rolls labels across packed sequences: build without mtp_block_spec")
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
    if getattr(config, "fp8", None):
        problems.append("fp8 is not supported for now: unset it")
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") not in ("none", None):
        problems.append("CUDA graphs need one shape and packs have many: set cuda_graph_impl='none'")
    gathers = any(getattr(getattr(gpt_of(chunk), "output_layer", None), "gather_output", False) for chunk in chunks)
    if gathers and layout.tp_size > 1 and not defer_head:
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
    gpt = gpt_of(chunks[0])
    config = gpt.config
    if config.multi_latent_attention:
        return ["multi-latent attention is not supported for now"]
    if settings.rows_form:
        packed = [name for name in ("train", "infer") if getattr(batching, name).mode == "packed"]
        problems = []
        if packed:
            problems.append(f"rows_form serves padded and dynamic batching only, and {' and '.join(packed)} is packed")
        if settings.pipeline_shapes == "shared":
            problems.append("rows_form and pipeline_shapes='shared' exclude each other: use 'planned' or 'exchanged'")
        if names := [backend.name for backend in _backends(chunks)]:
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
    if len(names := [backend.name for backend in _backends(chunks)]) > 1:
        problems.append(f"layers attend with {' and '.join(names)}: build all of them with one attention backend")
    if any(getattr(core, "pack_rotates", False) for core in cores) and gpt.position_embedding_type != "none":
        problems.append(
            f"both the model (position_embedding_type={gpt.position_embedding_type!r}) and its attention core rotate: "
            "build it with position_embedding_type='none', or packed_layer_spec(config) without rotary"
        )
    if gpt.position_embedding_type in ("yarn", "mrope"):
        problems.append(
            f"position_embedding_type={gpt.position_embedding_type!r} is not supported for packed sequences for now"
        )
    if gpt.position_embedding_type == "rope" and config.apply_rope_fusion and config.rotary_interleaved:
        problems.append("the fused rotation of packs ignores rotary_interleaved before 0.17: unset apply_rope_fusion")
    if getattr(config, "qk_clip", False) and any(isinstance(core, PackedCore) for core in cores):
        problems.append("qk_clip reads attention logits that our attention cores do not keep: unset it")
    return problems


def _cores(chunks: Sequence[Any]) -> list[Any]:
    attentions: list[Any] = [layer.self_attention for chunk in chunks for layer in gpt_of(chunk).decoder.layers]
    return [attention.core_attention for attention in attentions if hasattr(attention, "core_attention")]


def _backends(chunks: Sequence[Any]) -> list[AttentionBackend]:
    """What the layers attend with, each backend once; cores that no backend built are not counted."""
    found = [getattr(core, "pack_backend", None) for core in _cores(chunks)]
    return list(dict.fromkeys(backend for backend in found if backend is not None))


_ENGINE_MODULES = ("megatron.core.extensions.transformer_engine",)
"""Where Megatron's layers of TransformerEngine stand."""


def _installation_problems(state: ModelState) -> list[str]:
    gpt = gpt_of(state.chunks[0])
    config = gpt.config
    weights = next(p for p in gpt.parameters() if p.dim() > 1)
    problems = refusals_here(
        device=state.device,
        dtype=config.autocast_dtype if config.enable_autocast else weights.dtype,
        head_dim=config.kv_channels,
        experts=config.num_moe_experts is not None,
        backend=state.attention,
        engine_layers=any(type(module).__module__ in _ENGINE_MODULES for module in gpt.modules()),
        recomputed=recomputed_modules(config),
    )
    without_engine = importlib.util.find_spec("transformer_engine") is None
    for name in ("moe_router_fusion", "moe_permute_fusion"):
        if getattr(config, name, False) and without_engine:
            problems.append(f"{name} is a kernel of TransformerEngine, which is not installed: install it or unset it")
    return problems


def _reduction_problems(chunks: Sequence[Any], layout: ParallelLayout) -> list[str]:
    config = gpt_of(chunks[0]).config
    in_ddp = [hasattr(chunk, "finish_grad_sync") for chunk in chunks]
    problems = []
    if not all(in_ddp):
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
    if config.batch_p2p_comm:
        problems.append(
            "batch_p2p_comm=True crashes with planned shapes and pairs transfers wrongly at pipeline size 2 with "
            "virtual stages: set config.batch_p2p_comm=False"
        )
    if config.overlap_p2p_comm and (layout.device.type == "cpu" or _version() < (0, 18)):
        problems.append(
            "overlap_p2p_comm is not reproducible on CPU and races with freed outputs before Megatron-Core 0.18: set "
            "config.overlap_p2p_comm=False"
        )
    if config.deallocate_pipeline_outputs and config.overlap_p2p_comm and _version() < (0, 18):
        problems.append("deallocate_pipeline_outputs corrupts overlapped transfers before 0.18: unset it")
    if config.num_moe_experts is None and config.moe_token_dispatcher_type == "allgather":
        if settings.pipeline_shapes != "shared":
            problems.append(
                "Megatron refuses variable lengths with moe_token_dispatcher_type='allgather' even for dense models: "
                "set it to 'alltoall'"
            )
    return problems


def _ratio_problems(config: Any, batching: BatchingConfig) -> list[str]:
    """What makes a training pass compute other log-probs than the log-prob pass that shares its plan."""
    if batching.logprob_plan != "train":
        return []
    differing = [
        f"{name}={getattr(config, name)}"
        for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
        if getattr(config, name)
    ]
    if config.num_moe_experts is not None and config.moe_router_load_balancing_type == "sinkhorn":
        differing.append("moe_router_load_balancing_type='sinkhorn'")  # in training only
    if not differing:
        return []
    return [
        f"with {' and '.join(differing)} a training pass computes other log-probs than the log-prob pass, so the first "
        "ratio is not 1: unset that, or set logprob_plan to 'own' or 'none'"
    ]
