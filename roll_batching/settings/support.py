"""What goes with what: features, pairs of them that are refused, and pairs that a test trains.

The mechanism, and the table of a role: its model, precision, adapters and layers. `jobs/config/support.py` has the
table of a job. Rules of the schema, strategies, rehearsals and docs/what-goes-with-what.md read both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from roll_batching.errors import LayoutError
from roll_batching.settings.batching import SLICE_OBSTACLES


@dataclass(frozen=True)
class Feature:
    """Something that a configuration switches on: a way of sampling, a task, a part of a model, a layout."""

    name: str
    key: str
    """The key that switches it on, dotted; errors name it."""
    is_on: Callable[[Any], object]
    """Tests the configuration that the table is about."""

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the key."""
        return tuple(self.key.split("."))


@dataclass(frozen=True)
class Refusal:
    """Two features that do not go together."""

    feature: Feature
    """The one whose key the error names."""
    other: Feature
    reason: str
    """Text after the key in the error; `{0.name}` is a value of the configuration, `{1.name}` the name of `feature`."""
    cure: str

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the key to change."""
        return self.feature.path

    def message(self, configuration: Any) -> str:
        """The error, without its key."""
        return f"{self.reason}; {self.cure}".format(configuration, self.feature)

    def error(self, configuration: Any) -> str:
        """The error, with its key."""
        return f"{self.feature.key}: {self.message(configuration)}"


def refusals_of(table: Mapping[tuple[Feature, ...], str]) -> tuple[Refusal, ...]:
    """Reads a table of features to "reason; cure": each row refuses its last feature with each of the others."""
    return tuple(
        Refusal(feature, other, *text.rsplit("; ", 1))
        for (*features, other), text in table.items()
        for feature in features
    )


def refused_pairs(table: Iterable[Refusal], configuration: Any) -> Iterator[Refusal]:
    """The rows of `table` whose features are both on."""
    return (row for row in table if row.feature.is_on(configuration) and row.other.is_on(configuration))


class Parts(NamedTuple):
    """A model, its settings and its layout, which the rows of a role's table test. None: not known."""

    model: Any
    """The `ModelArgs`."""
    architecture: Any
    """The `ArchitectureConfig` that is built."""
    layout: Any
    """The `MegatronConfig`."""
    layers: str
    """Megatron's layers: local or transformer_engine."""
    rotates: bool = True
    """Whether the attention backend rotates queries and keys."""
    training: Any = None
    """The `TrainingArgs` of a role that trains."""

    @property
    def bias_rate(self) -> float:
        """How much training moves the expert biases; the layout's rate goes before the architecture's."""
        rate = self.layout.moe_router_bias_update_rate
        if rate is not None or self.architecture.moe is None:
            return float(rate or 0)
        return float(self.architecture.moe.router_bias_update_rate)

    @property
    def lacks_first_layers(self) -> bool:
        """Whether the first model chunk has fewer layers than the vision encoder has outputs for."""
        outputs = len(self.architecture.vision.deepstack_visual_indexes) if VISION.is_on(self) else 0
        try:
            return outputs > self.layout.chunk_layers(self.architecture.num_layers)[0][0]
        except LayoutError:  # layers that do not divide into chunks are refused elsewhere
            return False

    @property
    def splits_experts(self) -> bool:
        """Whether tensor-parallel ranks share experts."""
        return self.layout.tensor_model_parallel_size > 1 and bool(EXPERTS.is_on(self))


def _part(name: str, key: str) -> Feature:
    """A setting of the architecture with another value than its default."""

    def differs(parts: Parts) -> bool:
        architecture = parts.architecture
        if architecture is None:
            return False
        return (getattr(architecture, key) or None) != (type(architecture).model_fields[key].default or None)

    return Feature(name, f"model_args.architecture.{key}", differs)


def _layout(name: str, key: str, is_on: Callable[[Parts], object]) -> Feature:
    return Feature(name, f"strategy_args.strategy_config.{key}", is_on)


def _with_architecture(is_on: Callable[[Parts], object]) -> Callable[[Parts], object]:
    return lambda parts: parts.architecture is not None and is_on(parts)


ADAPTERS = Feature("adapters (lora_target)", "model_args.lora_target", lambda parts: parts.model.lora_target)
MUON = Feature(
    "Muon (optimizer: muon)", "training_args.optimizer", lambda parts: parts.training and parts.training.uses_muon
)
MUON_OF_HEADS = Feature(
    "Muon for queries, keys and values apart (muon_split_qkv)",
    "training_args.muon_split_qkv",
    lambda parts: MUON.is_on(parts) and parts.training.muon_split_qkv,
)
FIRST_ADAPTERS = Feature(
    "adapters from a directory", "model_args.adapter_name_or_path", lambda parts: parts.model.adapter_name_or_path
)
FROZEN = Feature("frozen modules", "model_args.freeze_module_prefix", lambda parts: parts.model.freeze_module_prefix)
TRAINED_PART = Feature("a trained part of the model", ADAPTERS.key, lambda parts: parts.model.trains_part)
NO_DIRECTORY = Feature(
    "a model without a directory", "model_args.model_name_or_path", lambda parts: parts.model.model_name_or_path is None
)
OTHER_DTYPE = Feature(
    "weights in fp16, fp32 or fp64", "model_args.dtype", lambda parts: parts.model.dtype not in ("auto", "bf16")
)
NOT_FP32_OR_BF16 = Feature(
    "weights in another precision than fp32 or bf16",
    "model_args.dtype",
    lambda parts: parts.model.dtype not in ("auto", "fp32", "bf16"),
)
HALF = Feature("weights in fp16", "model_args.dtype", lambda parts: parts.model.dtype == "fp16")
VALUE_HEAD = Feature("the value head of a critic", "model_args.value_head", lambda parts: parts.model.value_head)
FP8 = _layout("FP8", "fp8", lambda parts: parts.layout.fp8)
ENGINE_LAYERS = _layout(
    "the layers of transformer_impl: transformer_engine",
    "transformer_impl",
    lambda parts: parts.layers == "transformer_engine",
)
LOCAL_LAYERS = _layout("Megatron's local layers", "transformer_impl", lambda parts: not ENGINE_LAYERS.is_on(parts))
NO_ROTATION = _layout("attention that does not rotate", "attention_backend", lambda parts: not parts.rotates)
CP_PER_PACK = _layout(
    "a context-parallel size per pack", "context_parallel_size", lambda parts: parts.layout.has_cp_per_pack
)
SLICES = _layout(
    "slices of packs (pipeline_slices)",
    "pipeline_slices",
    lambda parts: parts.layout.pipeline_slices not in (1, "auto"),
)
VIRTUAL_STAGES = _layout(
    "virtual pipeline stages", "virtual_pipeline_model_parallel_size", lambda parts: parts.layout.vpp_size > 1
)
PRECISION_AWARE = _layout(
    "the precision-aware optimizer",
    "use_precision_aware_optimizer",
    lambda parts: parts.layout.use_precision_aware_optimizer,
)
OVERLAPPED_GATHER = _layout(
    "parameters gathered while the forward runs (overlap_param_gather)",
    "overlap_param_gather",
    lambda parts: parts.layout.overlap_param_gather,
)
LATENT = _part("multi-latent attention", "multi_latent_attention")
HYBRID = _part("layers of one part each (hybrid)", "hybrid")
HEADS = _part("heads of multi-token prediction (mtp_num_layers)", "mtp_num_layers")
VISION = _part("a vision encoder", "vision")
EXPERTS = _part("a mixture of experts", "moe")
DELTA_NETS = _part("gated delta nets", "gated_delta_net")
OUTPUT_GATES = _part("gated attention (attention_output_gate)", "attention_output_gate")
SANDWICH_NORMS = _part("sandwich norms", "sandwich_norms")
SINKS = _part("attention sinks", "attention_sinks")
ALL_BIASES = _part("biases of all linear layers (add_bias_linear)", "add_bias_linear")
WINDOWS = _part("sliding windows", "sliding_window")
QUERY_NORMS = _part("norms of queries and keys (qk_layernorm)", "qk_layernorm")
DROPOUT = _part("dropout (hidden_dropout)", "hidden_dropout")
GROUPED_QUERIES = Feature(
    "fewer key-value heads than query heads",
    "model_args.architecture.num_query_groups",
    _with_architecture(lambda parts: parts.architecture.kv_heads != parts.architecture.num_attention_heads),
)
MOVING_BIASES = _layout(
    "expert biases that training moves (moe_router_bias_update_rate)",
    "moe_router_bias_update_rate",
    lambda parts: EXPERTS.is_on(parts) and parts.bias_rate > 0,
)
ROUTER_LOSSES = Feature(
    "losses of routers (aux_loss_coeff, z_loss_coeff)",
    "model_args.architecture.moe",
    lambda parts: (
        EXPERTS.is_on(parts) and (parts.architecture.moe.aux_loss_coeff or parts.architecture.moe.z_loss_coeff)
    ),
)
MORE_RANKS_THAN_HEADS = _layout(
    "more tensor-parallel ranks than key-value heads",
    "tensor_model_parallel_size",
    _with_architecture(lambda parts: parts.architecture.kv_heads < parts.layout.tensor_model_parallel_size),
)
SPLIT_EXPERTS = _layout(
    "experts over tensor-parallel ranks", "tensor_model_parallel_size", lambda parts: parts.splits_experts
)
SHORT_FIRST_CHUNK = _layout(
    "a first model chunk with fewer layers than vision.deepstack_visual_indexes",
    "pipeline_model_parallel_size",
    _with_architecture(lambda parts: parts.lacks_first_layers),
)
TIED_STAGES = _layout(
    "tied embeddings over several pipeline stages",
    "pipeline_model_parallel_size",
    _with_architecture(
        lambda parts: parts.architecture.tie_word_embeddings and parts.layout.pipeline_model_parallel_size > 1
    ),
)
ARCHITECTURE_FEATURES = {
    feature.path[-1]: feature
    for feature in (
        LATENT, HYBRID, HEADS, VISION, EXPERTS, DELTA_NETS, OUTPUT_GATES, SANDWICH_NORMS, SINKS, ALL_BIASES,
        WINDOWS, QUERY_NORMS, DROPOUT,
    )
}  # fmt: skip
"""Features of the architecture by its keys."""


def _parts(keys: str) -> tuple[Feature, ...]:
    return tuple(ARCHITECTURE_FEATURES.get(key) or _part(f"`{key}`", key) for key in keys.split())


ARCHITECTURE_REFUSALS = refusals_of(
    {
        **{
            (HEADS, other): f"is not supported with {other.path[-1]} for now; leave it out"
            for other in _parts("hybrid sliding_window sandwich_norms scaled_embedding add_bias_linear attention_sinks")
        },
        (
            *_parts(
                "mtp_num_layers multi_latent_attention hybrid sliding_window sandwich_norms scaled_embedding "
                "add_bias_linear attention_sinks hidden_dropout"
            ),
            VISION,
        ): "is not supported with vision for now; leave it out",
        (
            *_parts(
                "activation add_qkv_bias add_bias_linear attention_output_gate attention_sinks gated_delta_net "
                "multi_latent_attention qk_layernorm query_pre_attn_scalar rope_scaling rotary_local_base "
                "sandwich_norms scaled_embedding sliding_window swiglu_limit zero_centered_norms rotary_percent"
            ),
            HYBRID,
        ): "has no effect with hybrid; leave it out",
        (
            *_parts(
                "qk_layernorm add_qkv_bias add_bias_linear attention_sinks query_pre_attn_scalar rotary_local_base "
                "zero_centered_norms sandwich_norms attention_output_gate gated_delta_net rotary_percent"
            ),
            GROUPED_QUERIES,
            LATENT,
        ): "has no effect with multi_latent_attention; leave it out",
        (SANDWICH_NORMS, ALL_BIASES): (
            "is not supported with add_bias_linear, whose biases these norms would drop; leave one of them out"
        ),
    }
)
"""Pairs of settings of an architecture that are refused wherever one is made."""
ROLE_REFUSALS = ARCHITECTURE_REFUSALS + refusals_of(
    {
        **{
            (ADAPTERS, other): f"{{1.name}} are not supported with {other.name} for now; leave it out"
            for other in (
                *(ENGINE_LAYERS, VALUE_HEAD, MOVING_BIASES),
                *_parts("multi_latent_attention hybrid gated_delta_net attention_output_gate add_bias_linear"),
            )
        },
        (ADAPTERS, MORE_RANKS_THAN_HEADS): (
            "{1.name} are not supported with TP = {0.layout.tensor_model_parallel_size}, above the "
            "{0.architecture.kv_heads} key-value heads (num_query_groups) for now; leave it out"
        ),
        (HEADS, ADAPTERS): "is set, and lora_target freezes the model, heads too; leave one of them out",
        (FROZEN, ADAPTERS): "has no effect with lora_target, which freezes the whole model; leave it out",
        (FIRST_ADAPTERS, NO_DIRECTORY): (
            "needs the model directory that its adapters belong to (model_name_or_path); set that, or leave it out"
        ),
        **{
            (FP8, other): f"is not supported with {other.name}, which Megatron's local layers alone have; leave it out"
            for other in _parts("hybrid sandwich_norms attention_sinks mtp_num_layers vision")
        },
        (FP8, LOCAL_LAYERS): (
            "needs transformer_impl: transformer_engine, which is {0.layers}: Megatron's local layers would compute in "
            "bf16; set that, or leave it out"
        ),
        (FP8, CP_PER_PACK): "needs one context-parallel size; set context_parallel_size to a number instead of auto",
        (FP8, TRAINED_PART): "is not supported with lora_target or freeze_module_prefix; leave it out",
        **{
            (SLICES, other): f"is not supported with {other.name} for now, {SLICE_OBSTACLES[key]}; leave it out"
            for key, other in (
                *((feature.path[-1], feature) for feature in (HEADS, DELTA_NETS, HYBRID, VISION)),
                ("router losses", ROUTER_LOSSES),
            )
        },
        **{
            (SLICES, other): f"is not supported with {other.name} for now; leave one of them out"
            for other in (VIRTUAL_STAGES, CP_PER_PACK, FP8, ENGINE_LAYERS, NO_ROTATION)
        },
        (OTHER_DTYPE, FP8): (
            "is {0.model.dtype}, and strategy_config.fp8 needs weights in bf16; set bf16, or leave it out"
        ),
        (PRECISION_AWARE, HALF): (
            "is not supported with model_args.dtype: fp16 for now, whose loss scale is not tested with it; leave it out"
        ),
        (PRECISION_AWARE, FP8): (
            "fp8 is not supported with use_precision_aware_optimizer for now; set one of them only"
        ),
        (MUON, ADAPTERS): (
            "is muon, whose update orthogonalises whole weight matrices, and lora_target trains low-rank factors of "
            "them; set adam, or leave lora_target out"
        ),
        (
            MUON,
            FROZEN,
        ): "is muon, which is not supported with freeze_module_prefix for now; set adam, or leave that out",
        (MUON, NOT_FP32_OR_BF16): (
            "is muon, which Megatron trains with weights in fp32 or bf16, and model_args.dtype is {0.model.dtype}; set "
            "adam or another dtype"
        ),
        (PRECISION_AWARE, MUON): (
            "is TransformerEngine's Adam, and training_args.optimizer is muon; leave it out, or set adam"
        ),
        (OVERLAPPED_GATHER, MUON): (
            "needs shards of Adam's distributed optimizer, and training_args.optimizer is muon; leave it out, or set "
            "adam"
        ),
        (MUON_OF_HEADS, MORE_RANKS_THAN_HEADS): (
            "is true, and TP = {0.layout.tensor_model_parallel_size} is above the {0.architecture.kv_heads} key-value "
            "heads (num_query_groups), whose ranks hold parts of a head; set it to false, or lower TP"
        ),
        (MUON_OF_HEADS, OUTPUT_GATES): (
            "is true, and Megatron-Core 0.16 takes the gates of attention_output_gate for heads; set it to false"
        ),
        (HEADS, VISION, HYBRID, SANDWICH_NORMS, ENGINE_LAYERS): (
            "is tested beside Megatron's local layers only; set transformer_impl: local"
        ),
        (HEADS, VISION, HYBRID, DELTA_NETS, NO_ROTATION): (
            "is tested beside attention that rotates only; choose attention_backend dense, varlen or flash_attn"
        ),
        (HEADS, TIED_STAGES): (
            "with tied embeddings need one pipeline stage: Megatron gives the last stage a second copy of the head, "
            "which nothing trains; set pipeline_model_parallel_size: 1"
        ),
        (SHORT_FIRST_CHUNK, VISION): (
            "leaves the first model chunk fewer layers than vision.deepstack_visual_indexes has, whose outputs belong "
            "behind the first layers; lower it or virtual_pipeline_model_parallel_size, or give that chunk more layers"
        ),
        (VALUE_HEAD, VISION): (
            "a critic with a vision encoder is not supported for now; use an advantage estimator without a critic"
        ),
        (ALL_BIASES, SPLIT_EXPERTS): (
            "does not go with TP = {0.layout.tensor_model_parallel_size}: Megatron-Core adds the biases of experts on "
            "every tensor-parallel rank; use 1, and divide the model by pipeline_model_parallel_size and "
            "expert_model_parallel_size"
        ),
    }
)
"""Pairs of a model's parts, adapters, precision and layout that are refused."""
ROLE_TESTED = {
    **{(SLICES, other): "strategy/test_slices.py" for other in (LATENT, WINDOWS, SINKS, VALUE_HEAD)},
    (ADAPTERS, LOCAL_LAYERS): "strategy/test_adapters.py",
    **{(other, VISION): "huggingface/test_vision.py" for other in (ADAPTERS, EXPERTS, DELTA_NETS, OUTPUT_GATES)},
    (HEADS, LOCAL_LAYERS): "strategy/test_mtp.py",
    (FP8, ENGINE_LAYERS): "te/test_fp8.py",
}
"""Pairs that a test trains together, and the test below `tests`."""
