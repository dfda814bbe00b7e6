"""Settings of a strategy: which one, and Megatron's parallel layout and memory switches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from roll_batching.errors import LayoutError
from roll_batching.planning import ParallelDims
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS
from roll_batching.settings.fields import (
    POLICY,
    TRAINED,
    AlsoInFile,
    RegisteredName,
    Settings,
    Switch,
    require_positive,
    section_of,
    setting,
)

MEGATRON_STRATEGIES = ("megatron_train", "megatron_infer")
ENGINE_STRATEGIES = ("vllm", "sglang", "hf_infer")
FSDP_STRATEGIES = ("fsdp2_train", "fsdp2_infer", "deepspeed_train", "deepspeed_infer")

OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Keys of the precisions of an optimizer's state, as Megatron's OptimizerConfig has them."""
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_OR_TORCHS_NAME = AlsoInFile(  # NeMo-RL and Megatron in Python write precisions as torch does.
    Annotated[str, Field(pattern=f"^(torch\\.)?({'|'.join(_PRECISIONS)})$")],
    lambda value: _PRECISIONS.get(str(value).removeprefix("torch."), value),
)
_OR_WITH_COMMAS = AlsoInFile(  # Megatron's command line and ROLL write recompute_modules so.
    str, lambda value: [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
)


class ClusterConfig(section_of(Cluster)):  # type: ignore[misc]
    """`cluster`: rates by which plans weigh costs and choose sizes. Defaults are estimates for H100s, not measured."""

    file: str | None = setting(
        None,
        help="File of `roll-batching doctor --calibrate`, for rates that are left out here. `cluster: FILE` is short "
        "for `cluster: {file: FILE}`.",
    )
    device: str | None = setting(
        None, help="Device whose rates these are. Default: as the file says. A run on another device warns."
    )

    @property
    def rates(self) -> Cluster:
        """The rates, for the planner."""
        return Cluster(**self.model_dump(exclude={"file", "device"}))

    @model_validator(mode="before")
    @classmethod
    def _rates_of_file(cls, data: Any) -> Any:
        is_complete = isinstance(data, dict) and data.keys() >= cls.model_fields.keys()  # config.yaml of a run
        if not isinstance(data, dict) or not isinstance(data.get("file"), str) or is_complete:
            return data
        from roll_batching.settings.cluster_file import read_cluster_file  # few jobs have one

        file = read_cluster_file(data["file"])
        return {"device": file.device, **file.rates, **data}


_WEIGHTS = ("matmul_rate", "matmul_half_tokens", "attention_rate")
"""Rates that weigh costs in every layout."""
_OR_FILE = AlsoInFile(str, lambda value: {"file": value} if isinstance(value, str) else value)


def _readable_layout(value: str | list[list[str]] | None) -> str | list[list[str]] | None:
    if value is not None:
        from roll_batching.settings.pipeline_split import parse_layout  # most pipelines have equal stages

        parse_layout(value)
    return value


SPLIT_KEYS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Keys of pipeline stages of unequal size."""


_READ_IF = {
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split": Switch(
        lambda layout: layout.pipeline_model_parallel_size > 1, "pipeline_model_parallel_size is 1"
    ),
    "pipeline_slices": Switch(
        lambda layout: layout.pipeline_model_parallel_size > 1 or layout.pipeline_slices != "auto",
        "pipeline_model_parallel_size is 1, and auto shortens pipelines",
    ),
    "sequence_parallel": Switch(
        lambda layout: layout.tensor_model_parallel_size > 1, "tensor_model_parallel_size is 1"
    ),
    "recurrent_context_parallel": Switch(
        lambda layout: layout.context_parallel_size != 1, "context_parallel_size is 1"
    ),
    "mtp_detach_heads": Switch(
        lambda layout: layout.mtp_loss_scaling_factor, "mtp_loss_scaling_factor is 0: the heads are not trained"
    ),
    "microbatch_group_size_per_vp_stage": Switch(
        lambda layout: layout.vpp_size > 1, "virtual_pipeline_model_parallel_size is 1"
    ),
}


class MegatronConfig(Settings, read_if=_READ_IF):
    """`strategy_config` of the Megatron strategies. Keys left out are taken from actor_train's."""

    tensor_model_parallel_size: int = setting(1, help="Tensor-parallel size (TP).", ge=1)
    pipeline_model_parallel_size: int = setting(1, help="Pipeline-parallel size (PP).", ge=1)
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, help="Model chunks per pipeline stage (VPP); needs PP > 1.", ge=1
    )
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, help="Decoder layers of the first pipeline stage; the other stages share the rest equally.", ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, help="Decoder layers of the last pipeline stage; the other stages share the rest equally.", ge=1
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, help="Count the embedding as a layer of the first stage, which so has one decoder layer fewer."
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, help="Count head and loss as a layer of the last stage, which so has one decoder layer fewer."
    )
    pipeline_model_parallel_layout: Annotated[str | list[list[str]] | None, AfterValidator(_readable_layout)] = setting(
        None,
        help="Layers of each model chunk, in Megatron's notation: E embedding, t decoder layer, L loss, | between "
        "chunks, such as Ettt|tttt|tttL; or a list of lists. Chunks above PP are virtual stages.",
    )
    context_parallel_size: Annotated[int | Literal["auto"], AfterValidator(require_positive)] = setting(
        1, help="Context-parallel size (CP). auto: each pack has its own; needs use_sequence_packing."
    )
    max_context_parallel_size: int | None = setting(
        None,
        help="Largest size of a pack under context_parallel_size: auto, a power of two. Default: the largest that "
        "divides the ranks that share the data. The cap of a pack is then that of each of its ranks.",
        ge=1,
    )
    recurrent_context_parallel: Literal["auto", "heads", "sequence"] = setting(
        "auto",
        help="What context-parallel ranks divide in gated delta nets and Mamba layers: their heads, or the sequence. "
        "auto: for each pack that for which ranks send less; the sequence where heads do not divide.",
    )
    dynamic_context_parallel: bool = setting(False, help="Megatron's name for context_parallel_size: auto.")
    cluster: Annotated[ClusterConfig | None, _OR_FILE] = setting(
        None,
        help="Rates of devices and links, or the file of `roll-batching doctor --calibrate`. They weigh costs, and "
        "decide what is auto (context_parallel_size, pipeline_slices) and how many micro-batches a pipeline has.",
        passes=("train", "infer"),
    )
    pipeline_slices: Annotated[int | Literal["auto"], AfterValidator(require_positive)] = setting(
        1,
        help="Slices of a pack of mean cost, each a unit of the pipeline's schedule, so that stages hardly wait. "
        "auto: as many as shorten the predicted step; 1: whole packs.",
        passes=("train", "infer"),
        mode="packed",
    )
    expert_model_parallel_size: int = setting(
        1, help="Expert-parallel size (EP); above 1 it needs a mixture of experts.", ge=1
    )
    sequence_parallel: bool = setting(
        False, help="Split activations between tensor-parallel regions over TP; needs TP > 1."
    )
    use_distributed_optimizer: bool = setting(
        False,
        help="Shard the optimizer's state over data-parallel ranks. Checkpoints hold whole parameters, for any layout.",
        roles=TRAINED,
    )
    overlap_grad_reduce: bool = setting(False, help="Reduce gradients while the backward still runs.", roles=TRAINED)
    overlap_param_gather: bool = setting(
        False,
        help="Gather parameters while the forward runs; needs use_distributed_optimizer and overlap_grad_reduce.",
        roles=TRAINED,
    )
    grad_reduce_in_fp32: bool | None = setting(
        None,
        help="Sum the gradients of a bf16 or fp16 model in fp32, over micro-batches and data-parallel ranks; false: in "
        "its own precision. Default: true, false where main_grads_dtype is bf16.",
        roles=TRAINED,
    )
    use_precision_aware_optimizer: bool = setting(
        False,
        help="TransformerEngine's Adam, whose state has the precisions below (CUDA). Needs use_distributed_optimizer; "
        "its state is not saved.",
        roles=TRAINED,
    )
    main_grads_dtype: Annotated[Literal["fp32", "bf16"], _OR_TORCHS_NAME] = setting(
        "fp32",
        help="Gradients that the precision-aware optimizer reads; bf16 needs grad_reduce_in_fp32: false.",
        roles=TRAINED,
    )
    main_params_dtype: Annotated[Literal["fp32", "fp16"], _OR_TORCHS_NAME] = setting(
        "fp32", help="The precision-aware optimizer's copy of the parameters.", roles=TRAINED
    )
    exp_avg_dtype: Annotated[Literal["fp32", "fp16", "bf16", "fp8"], _OR_TORCHS_NAME] = setting(
        "fp32", help="The precision-aware optimizer's first moments.", roles=TRAINED
    )
    exp_avg_sq_dtype: Annotated[Literal["fp32", "fp16", "bf16", "fp8"], _OR_TORCHS_NAME] = setting(
        "fp32", help="The precision-aware optimizer's second moments.", roles=TRAINED
    )
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, help="Recompute activations in backward: whole layers, or parts of them.", roles=TRAINED
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, help="full: which layers are recomputed. Default: uniform.", roles=TRAINED
    )
    recompute_num_layers: int | None = setting(
        None, help="full: layers per recomputed unit, or recomputed layers.", ge=1, roles=TRAINED
    )
    recompute_modules: Annotated[list[str] | None, _OR_WITH_COMMAS] = setting(
        None, help="selective: parts of a layer. Default: core_attn.", roles=TRAINED
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None,
        help="Precision of the routers of a mixture of experts, before what the model's configuration says. Other "
        "models have none.",
    )
    moe_router_bias_update_rate: float | None = setting(
        None,
        help="How much each optimizer step moves the expert biases of routers, before "
        "architecture.moe.router_bias_update_rate; for models with expert biases.",
        ge=0,
        lt=1,
        roles=TRAINED,
    )
    freeze_moe_router: bool = setting(
        False,
        help="Leave the weights of a mixture's routers as loaded: they get no gradient and no optimizer step.",
        roles=TRAINED,
    )
    mtp_num_layers: int | None = setting(
        None,
        help="Heads of multi-token prediction that train with the policy (docs/models.md). Default: those of "
        "architecture.mtp_num_layers; 0: none.",
        ge=0,
        le=64,
        roles=POLICY,
    )
    mtp_loss_scaling_factor: float = setting(
        0.1,
        help="Weight of the mean of the heads' losses. 0: the heads stay as loaded, and are measured.",
        ge=0,
        roles=POLICY,
    )
    mtp_detach_heads: bool = setting(
        False, help="No gradient of the heads' losses reaches the rest of the model.", roles=POLICY
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = setting(
        "auto",
        help="Whose layers are built: Megatron's local ones, or TransformerEngine's (CUDA). auto: local.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = setting(None, help="TransformerEngine's layers multiply in FP8.")
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8", "delayed"] | None = setting(
        None, help="fp8: what has one scale: a tensor, 128 values (Hopper), 32 (Blackwell). delayed is refused."
    )
    first_last_layers_bf16: bool = setting(False, help="fp8: keep layers at both ends of the model in bf16.")
    num_layers_at_start_in_bf16: int = setting(1, help="first_last_layers_bf16: layers at the start.", ge=0)
    num_layers_at_end_in_bf16: int = setting(1, help="first_last_layers_bf16: layers at the end.", ge=0)
    attention_backend: Annotated[str, RegisteredName(ATTENTION_BACKENDS)] = setting(
        "auto",
        help="What attends to packs. (Megatron's key of this name chooses among TransformerEngine's kernels: "
        "NVTE_FLASH_ATTN and the like in system_envs do.)",
    )
    calculate_per_token_loss: bool = setting(
        True,
        help="Megatron's loss scaling underneath. Results do not depend on it, except for losses of a mixture's "
        "routers: true weighs those of a micro-batch by its tokens, false all micro-batches equally.",
        roles=TRAINED,
    )
    microbatch_group_size_per_vp_stage: int | Literal["auto"] | None = setting(
        None,
        help="Micro-batches per group of the interleaved schedule (VPP > 1). Default: PP. auto: the smallest that "
        "Megatron accepts for the number of micro-batches at hand.",
    )

    @property
    def layer_layout(self) -> tuple[tuple[str, ...], ...] | None:
        """Names of the layers of each model chunk under `pipeline_model_parallel_layout`."""
        if self.pipeline_model_parallel_layout is None:
            return None
        from roll_batching.settings.pipeline_split import parse_layout

        return parse_layout(self.pipeline_model_parallel_layout)

    @property
    def vpp_size(self) -> int:
        """Model chunks per stage; 1 without virtual pipelining."""
        given, layout = self.virtual_pipeline_model_parallel_size, self.layer_layout
        if given is None and layout is not None and len(layout) % self.pipeline_model_parallel_size == 0:
            return len(layout) // self.pipeline_model_parallel_size
        return given or 1

    @property
    def pack_multiple(self) -> int:
        """Multiple of the tokens that one rank holds, by precision: 1 in bf16 and fp32."""
        from roll_batching.settings.fp8 import token_multiple

        return token_multiple(self.fp8, self.fp8_recipe)

    @property
    def has_uneven_stages(self) -> bool:
        """Whether a key gives pipeline stages different numbers of layers."""
        return any(getattr(self, key) not in (None, False) for key in SPLIT_KEYS)

    def chunk_layers(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Decoder layers by pipeline stage and virtual stage. Raises `LayoutError` where they do not divide so."""
        from roll_batching.settings.pipeline_split import chunk_layers

        return chunk_layers(self, num_layers)

    @property
    def has_cp_per_pack(self) -> bool:
        """Whether each pack has its own context-parallel size."""
        return self.context_parallel_size == "auto"

    @property
    def cp_size(self) -> int:
        """Context-parallel size of the layout; 1 where each pack has its own."""
        return 1 if self.context_parallel_size == "auto" else self.context_parallel_size

    def max_cp_size(self, dp_size: int) -> int:
        """Largest context-parallel size of a pack among `dp_size` data-parallel ranks; 1 where all have the layout's.

        Raises `LayoutError` where the key does not divide the ranks.
        """
        if not self.has_cp_per_pack:
            return 1
        largest = self.max_context_parallel_size
        if largest is None:
            return dp_size & -dp_size
        if largest & (largest - 1) or dp_size % largest:
            raise LayoutError(
                f"max_context_parallel_size is {largest}: it must be a power of two that divides the {dp_size} ranks "
                "that share the data"
            )
        return largest

    @property
    def model_size(self) -> int:
        """Ranks that share one copy of the data: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.cp_size

    def misfit(self, world_size: int) -> str:
        """The error text when `world_size` processes do not divide into copies of this layout."""
        return (
            f"{world_size} processes do not divide into copies of TP {self.tensor_model_parallel_size} x "
            f"PP {self.pipeline_model_parallel_size} x CP {self.cp_size} = {self.model_size} ranks; "
            f"use a multiple of {self.model_size} processes, or smaller sizes"
        )

    def parallel_dims(self, world_size: int) -> ParallelDims:
        """The layout of `world_size` processes. Raises `LayoutError` when they do not divide into replicas."""
        return ParallelDims.of_world(
            world_size,
            tp_size=self.tensor_model_parallel_size,
            cp_size=self.cp_size,
            pp_size=self.pipeline_model_parallel_size,
            vpp_size=self.vpp_size,
            ep_size=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
        )

    @model_validator(mode="after")
    def _one_context_parallel_size(self) -> MegatronConfig:
        if self.dynamic_context_parallel and self.context_parallel_size not in (1, "auto"):
            raise ValueError(
                f"dynamic_context_parallel gives each pack its own size, and context_parallel_size is "
                f"{self.context_parallel_size}: set context_parallel_size: auto, and max_context_parallel_size for the "
                "largest"
            )
        if self.max_context_parallel_size is not None and not self.has_cp_per_pack:
            raise ValueError("max_context_parallel_size is read with context_parallel_size: auto only: leave it out")
        if self.cluster is not None and self.cluster.file is None:
            idle = [name for name in ClusterConfig.model_fields if name not in _WEIGHTS]
            is_read = self.has_cp_per_pack or self.pipeline_slices != 1
            for name in ["device"] if is_read else idle:
                if getattr(self.cluster, name) != ClusterConfig.model_fields[name].default:
                    needed = "" if name == "device" else "context_parallel_size auto, pipeline_slices or "
                    raise ValueError(f"cluster.{name} is read with {needed}cluster.file only: leave it out")
        return self

    @model_validator(mode="before")
    @classmethod
    def _dynamic_sizes(cls, data: Any) -> Any:
        is_dynamic = isinstance(data, dict) and data.get("dynamic_context_parallel") is True
        is_open = is_dynamic and data.get("context_parallel_size", 1) == 1
        return {**data, "context_parallel_size": "auto"} if is_open else data
