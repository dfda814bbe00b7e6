"""Builds Megatron model chunks, their optimizer and its schedule from validated settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LayoutError
from roll_batching.megatron_patches.layers import define_router_gemm
from roll_batching.modeling.build_problems import build_problems
from roll_batching.modeling.experts import draw_experts, freeze_routers, keep_expert_biases_in_fp32, router_loss_weights
from roll_batching.modeling.head import defer_head
from roll_batching.modeling.kernels import Kernels
from roll_batching.modeling.layers import layers_of_chunk, mark_shards
from roll_batching.modeling.requirements import is_muon_of_0_16, optimizer_problems
from roll_batching.modeling.rotary import megatron_rotation, rotary_settings
from roll_batching.modeling.spec import packed_block_spec
from roll_batching.modeling.transformer_config import transformer_config
from roll_batching.settings import ArchitectureConfig, MegatronConfig, TrainingArgs

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of `model_args.dtype`; `auto` is fp32 on the CPU and bf16 on CUDA."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def padded_vocabulary(vocab_size: int, tp_size: int) -> int:
    """`vocab_size` rounded up to a multiple of `tp_size`."""
    return -(-vocab_size // tp_size) * tp_size


def build_chunks(
    architecture: ArchitectureConfig,
    strategy: MegatronConfig,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    kernels: Kernels,
    seed: int,
    initialize: bool = True,
    groups: Any = None,
    value_head: bool = False,
    value_head_std: float = 0.0,
) -> list[Any]:
    """GPTModel chunks of this pipeline stage (one per virtual stage), with a deferred or a value head, without DDP.

    Weights are random; without `initialize` they are uninitialised memory, for callers that load them. `groups` is the
    ProcessGroupCollection of a second layout; None stands for Megatron's parallel state. Raises `LayoutError` if the
    layers do not divide into stages, or if this device or its libraries cannot compute the model.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module

    problems = build_problems(
        architecture,
        strategy,
        kernels,
        device=layout.device,
        dtype=dtype,
        tp_size=layout.tp_size,
        cp_size=layout.cp_size,
        value_head=value_head,
    )
    if problems:
        raise LayoutError("the model cannot be computed here: " + "; ".join(problems))
    strategy.chunk_layers(architecture.num_layers)  # raises where they do not divide
    all_groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    config = transformer_config(architecture, strategy, layout, dtype, kernels=kernels, initialize=initialize)
    if architecture.moe is not None:
        define_router_gemm()
        auxiliary, z_loss = router_loss_weights(config, all_groups.tp_cp)
        config.moe_aux_loss_coeff /= auxiliary
        config.moe_z_loss_coeff = config.moe_z_loss_coeff and config.moe_z_loss_coeff / z_loss
    with _seeded(seed + 100 * layout.pp_rank, all_groups, restore=groups is not None):
        chunks = []
        for chunk in range(layout.vpp_size):
            parts = (architecture, strategy, layout, kernels, dtype, seed, all_groups)
            gpt = _construct_chunk(chunk, config, *parts, value_head_std if value_head else None)
            gpt = gpt.to(device=layout.device, dtype=dtype)
            if not value_head:
                defer_head(gpt)
            if architecture.scaled_embedding:
                from roll_batching.modeling.layer_modules import scale_embedding

                scale_embedding(gpt)
            chunks.append(Float16Module(config, gpt) if config.bf16 or config.fp16 else gpt)
            keep_expert_biases_in_fp32(gpt)
    return chunks


def _construct_chunk(
    chunk: int,
    config: Any,
    architecture: ArchitectureConfig,
    strategy: MegatronConfig,
    layout: ParallelLayout,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
    groups: Any,
    value_head_std: float | None,
) -> Any:
    """The GPTModel of virtual stage `chunk`, as Megatron constructs it: not yet in `dtype`, nor on the layout's device.

    `value_head_std` None: no value head.
    """
    from megatron.core.models.gpt import GPTModel

    rotary, attention = rotary_settings(architecture), kernels.attention
    # Positions rotate queries and keys once: inside the attention core, or else in the GPTModel by its RoPE arguments.
    in_core = rotary if attention.rotates else None
    rotation = {"position_embedding_type": "none"} if attention.rotates else megatron_rotation(rotary)
    vp_stage = chunk if layout.vpp_size > 1 else None
    held = layers_of_chunk(config, layout.pp_rank, vp_stage)
    spec = packed_block_spec(
        config, len(held), in_core, first=held.start, attention=attention, layers_of=kernels.layers,
        sandwich_norms=architecture.sandwich_norms,
    )  # fmt: skip
    is_first = chunk == 0 and layout.pp_rank == 0
    is_last = chunk == layout.vpp_size - 1 and layout.is_last_stage
    kind: Any = GPTModel
    parts: dict[str, Any] = {}
    if architecture.mtp_num_layers and is_last:
        from roll_batching.modeling.mtp import MultiTokenModel, prediction_options  # few models have heads

        kind, detach = MultiTokenModel, strategy.mtp_detach_heads
        parts = prediction_options(config, groups, in_core, attention, detach_heads=detach)
    if architecture.vision is not None and is_first:
        from roll_batching.modeling.vision import VisionLanguageModel, vision_options  # few models take images

        kind, parts = VisionLanguageModel, vision_options(architecture, strategy, dtype, seed)
    gpt = kind(
        config,
        spec,
        vocab_size=padded_vocabulary(architecture.vocab_size, layout.tp_size),
        max_sequence_length=architecture.max_position_embeddings,
        **rotation,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings and value_head_std is None,
        vp_stage=vp_stage,
        pg_collection=groups,
        **parts,
    )
    _adapt_chunk(gpt, config, architecture, seed, groups, value_head_std)
    return gpt


def _adapt_chunk(
    gpt: Any, config: Any, architecture: ArchitectureConfig, seed: int, groups: Any, value_head_std: float | None
) -> None:
    """Adds what GPTModel lacks to a constructed one: weights of experts, marks of shards, norms, a value head."""
    if config.use_cpu_initialization and config.perform_initialization:
        draw_experts(gpt)
    mark_shards(gpt)
    if architecture.qk_layernorm == "all_heads":
        from roll_batching.modeling.layer_modules import normalise_all_heads  # few models need it

        normalise_all_heads(gpt, groups.tp)
    if value_head_std is not None:
        from roll_batching.modeling.layer_modules import set_value_head  # only critics have one

        set_value_head(gpt, value_head_std, seed)


@contextlib.contextmanager
def _seeded(seed: int, groups: Any, *, restore: bool) -> Iterator[None]:
    """Seeds torch and Megatron's RNG tracker for this rank's coordinates in `groups`; with `restore` only inside.

    A model in a second layout must restore them: ranks that share a layer in training draw the same dropout masks, and
    their coordinates in the second layout differ.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # Megatron adds 100 per expert-parallel rank to the seed of experts, and `seed` differs by 100 between stages:
    # without the factor, experts of one stage would start equal to those of another.
    expert_rank = groups.ep.rank() * groups.pp.size()
    coordinates = {"tp_rank": groups.tp.rank(), "ep_rank": expert_rank, "etp_rank": groups.expt_tp.rank()}
    before = get_cuda_rng_tracker().get_states() if restore else None
    with torch.random.fork_rng(devices, enabled=restore):
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, **coordinates)
        if not devices:
            # On the CPU dense weights come from this generator. Version 0.1 left it at the seed of the first rank's
            # experts; the offset keeps the models of existing seeds.
            torch.manual_seed(seed + 1024)
        try:
            yield
        finally:
            if before is not None:
                get_cuda_rng_tracker().set_states(before)


def wrap_ddp(chunks: list[Any], strategy: MegatronConfig, training: TrainingArgs) -> list[Any]:
    """Wraps chunks in Megatron's DistributedDataParallel, broadcasts parameters, sets gradient finalisation."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    if strategy.freeze_moe_router:
        for chunk in chunks:
            freeze_routers(chunk)
    in_fp32 = strategy.grad_reduce_in_fp32
    if in_fp32 is None:
        in_fp32 = strategy.main_grads_dtype == "fp32"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=(config.bf16 or config.fp16) and in_fp32,
        use_distributed_optimizer=_has_gradient_shards(training, strategy),
        overlap_grad_reduce=strategy.overlap_grad_reduce,
        overlap_param_gather=strategy.overlap_param_gather,
    )
    # One bucket for chunks after the first, as in Megatron's own training loop: their communication overlaps with the
    # backward pass of the chunks before them anyway.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if strategy.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Dtypes of optimizer state by setting. TransformerEngine stores FP8 as bytes."""


def optimizer_config(training: TrainingArgs, strategy: MegatronConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Megatron's OptimizerConfig for parameters of `dtype`.

    Raises `LayoutError` if the optimizer is not available: TransformerEngine's Adam (`use_precision_aware_optimizer`)
    or Muon.
    """
    from megatron.core.optimizer import OptimizerConfig

    if problems := optimizer_problems(training, strategy, device, dtype):
        raise LayoutError("; ".join(problems))
    return OptimizerConfig(
        optimizer=training.optimizer,
        **(_muon_options(training, strategy) if training.uses_muon else {}),
        lr=training.learning_rate,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_epsilon,
        clip_grad=training.max_grad_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        **_loss_scale_options(training, dtype),
        use_distributed_optimizer=_has_gradient_shards(training, strategy),
        overlap_param_gather=strategy.overlap_param_gather,
        use_precision_aware_optimizer=strategy.use_precision_aware_optimizer,
        main_grads_dtype=_STATE_DTYPES[strategy.main_grads_dtype],
        main_params_dtype=_STATE_DTYPES[strategy.main_params_dtype],
        exp_avg_dtype=_STATE_DTYPES[strategy.exp_avg_dtype],
        exp_avg_sq_dtype=_STATE_DTYPES[strategy.exp_avg_sq_dtype],
    )


def _has_gradient_shards(training: TrainingArgs, strategy: MegatronConfig) -> bool:
    """Whether ranks hold shards of gradients, as Adam's distributed optimizer needs; Muon needs whole matrices."""
    return strategy.use_distributed_optimizer and not training.uses_muon


def _muon_options(training: TrainingArgs, strategy: MegatronConfig) -> dict[str, Any]:
    """Keywords of OptimizerConfig for Muon, by the names of the installed Megatron-Core."""
    options: dict[str, Any] = {
        "muon_momentum": training.muon_momentum,
        "muon_split_qkv": training.muon_split_qkv,
        "muon_scale_mode": training.muon_scale_mode,
        "muon_extra_scale_factor": training.muon_extra_scale_factor,
        "muon_num_ns_steps": training.muon_num_ns_steps,
        "muon_tp_mode": training.muon_tp_mode,
        "muon_fp32_matmul_prec": training.muon_fp32_matmul_prec,
    }
    if is_muon_of_0_16():
        return {**options, "muon_use_nesterov": training.muon_nesterov}
    return {
        **options,
        "muon_nesterov": training.muon_nesterov,
        "muon_coefficient_type": training.muon_coefficient_type,
        "use_layer_wise_distributed_optimizer": strategy.use_distributed_optimizer,
    }


def _loss_scale_options(training: TrainingArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Options of fp16. Without it they are left out: Megatron divides gradients of bf16 by `loss_scale`, too."""
    if dtype is not torch.float16:
        return {}
    return {
        "fp16": True,
        "loss_scale": training.loss_scale,
        "initial_loss_scale": training.initial_loss_scale,
        "min_loss_scale": training.min_loss_scale,
        "loss_scale_window": training.loss_scale_window,
        "hysteresis": training.hysteresis,
    }


def build_optimizer(chunks: list[Any], training: TrainingArgs, strategy: MegatronConfig, dtype: torch.dtype) -> Any:
    """Megatron's optimizer for the wrapped chunks, with gradient clipping, sharded over DP ranks if configured.

    In fp16 the schedules multiply the loss by its loss scale: sets the config's `grad_scale_func`.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    device = next(chunks[0].parameters()).device
    config = optimizer_config(training, strategy, dtype, device)
    if training.uses_muon and is_muon_of_0_16():
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        shards = strategy.use_distributed_optimizer
        return get_megatron_muon_optimizer(config, chunks, layer_wise_distributed_optimizer=shards)
    optimizer = get_megatron_optimizer(config, chunks)
    if dtype is torch.float16:
        # A part without parameters (experts alone are trained) hears of no overflow: its scale never changes.
        parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]
        chunks[0].config.grad_scale_func = (parts[0] if parts else optimizer).scale_loss
    return optimizer


_DECAY_STYLES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


def build_scheduler(optimizer: Any, training: TrainingArgs, total_steps: int) -> Any:
    """Megatron's learning-rate schedule, counted in optimizer steps: warm-up, then `lr_scheduler_type`."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warmup = training.warmup_steps or math.ceil(training.warmup_ratio * total_steps)  # as Hugging Face's trainer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=training.lr_warmup_init if warmup else 0.0,
        max_lr=training.learning_rate,
        min_lr=training.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=_DECAY_STYLES[training.lr_scheduler_type],
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
