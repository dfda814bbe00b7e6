"""What goes with what: features, pairs of them that are refused, and pairs that a test trains.

The mechanism, and the table of a role: its model, precision, adapters and layers. `jobs/config/support.py` has the
table of a job. Rules of the schema, strategies, rehearsals and docs/what-goes-with-what.md read both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Feature:
    """Something that a configuration switches on: a way of sampling, a task, a part of a model, a layout."""

    name: str
    key: str
    """The key that switches it on, dotted; errors name it."""
    is_on: Callable[[Any], object]
    """Of the configuration that the table is about."""


@dataclass(frozen=True)
class Refusal:
    """Two features that do not go together."""

    feature: Feature
    """The one whose key the error names."""
    other: Feature
    reason: str
    """Behind the key in the error; `{0.name}` is a value of the configuration, `{1.name}` the name of `feature`."""
    cure: str

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the key to change."""
        return tuple(self.feature.key.split("."))

    def message(self, configuration: Any) -> str:
        """The error, without its key."""
        return f"{self.reason}; {self.cure}".format(configuration, self.feature)


def refusals_of(table: Mapping[tuple[Feature, ...], str]) -> tuple[Refusal, ...]:
    """The refusals of a table: its last feature of a row with each of the others, to "reason; cure"."""
    return tuple(
        Refusal(feature, other, *text.rsplit("; ", 1))
        for (*features, other), text in table.items()
        for feature in features
    )


def refused_pairs(table: Iterable[Refusal], configuration: Any) -> Iterator[Refusal]:
    """The rows of `table` whose features are both on."""
    return (row for row in table if row.feature.is_on(configuration) and row.other.is_on(configuration))


class Parts(NamedTuple):
    """What the table of a role is about: a model, its settings and its layout."""

    model: Any
    """The `ModelArgs`."""
    architecture: Any
    """The `ArchitectureConfig` that is built."""
    layout: Any
    """The `MegatronConfig`."""
    layers: str
    """Megatron's layers: local or transformer_engine."""

    @property
    def bias_rate(self) -> float:
        """How much training moves the expert biases; the layout's rate goes before the architecture's."""
        rate = self.layout.moe_router_bias_update_rate
        if rate is not None or self.architecture.moe is None:
            return float(rate or 0)
        return float(self.architecture.moe.router_bias_update_rate)


def _part(name: str, key: str) -> Feature:
    return Feature(name, f"model_args.architecture.{key}", lambda parts: getattr(parts.architecture, key))


_CONFIG = "strategy_args.strategy_config"
ADAPTERS = Feature("adapters (lora_target)", "model_args.lora_target", lambda parts: parts.model.lora_target)
FP8 = Feature("FP8", f"{_CONFIG}.fp8", lambda parts: parts.layout.fp8)
ENGINE_LAYERS = Feature(
    "the layers of transformer_impl: transformer_engine",
    f"{_CONFIG}.transformer_impl",
    lambda parts: parts.layers == "transformer_engine",
)
LOCAL_LAYERS = Feature(
    "Megatron's local layers", f"{_CONFIG}.transformer_impl", lambda parts: not ENGINE_LAYERS.is_on(parts)
)
VALUE_HEAD = Feature("the value head of a critic", "model_args.value_head", lambda parts: parts.model.value_head)
LATENT = _part("multi-latent attention", "multi_latent_attention")
HYBRID = _part("layers of one part each (hybrid)", "hybrid")
HEADS = _part("heads of multi-token prediction (mtp_num_layers)", "mtp_num_layers")
VISION = _part("a vision encoder", "vision")
DELTA_NETS = _part("gated delta nets", "gated_delta_net")
OUTPUT_GATES = _part("gated attention (attention_output_gate)", "attention_output_gate")
SANDWICH_NORMS = _part("sandwich norms", "sandwich_norms")
SINKS = _part("attention sinks", "attention_sinks")
ALL_BIASES = _part("biases of all linear layers (add_bias_linear)", "add_bias_linear")
MOVING_BIASES = Feature(
    "expert biases that training moves (moe_router_bias_update_rate)",
    f"{_CONFIG}.moe_router_bias_update_rate",
    lambda parts: parts.architecture.moe is not None and parts.bias_rate > 0,
)
MORE_RANKS_THAN_HEADS = Feature(
    "more tensor-parallel ranks than key-value heads",
    f"{_CONFIG}.tensor_model_parallel_size",
    lambda parts: parts.architecture.kv_heads < parts.layout.tensor_model_parallel_size,
)
_WITHOUT_ADAPTERS = (
    ENGINE_LAYERS, VALUE_HEAD, LATENT, HYBRID, HEADS, VISION, DELTA_NETS, OUTPUT_GATES, ALL_BIASES, MOVING_BIASES,
)  # fmt: skip
ROLE_REFUSALS = refusals_of(
    {
        **{
            (ADAPTERS, other): f"{{1.name}} are not supported with {other.name} for now; leave it out"
            for other in _WITHOUT_ADAPTERS
        },
        (ADAPTERS, MORE_RANKS_THAN_HEADS): (
            "{1.name} are not supported with TP = {0.layout.tensor_model_parallel_size}, above the "
            "{0.architecture.kv_heads} key-value heads (num_query_groups) for now; leave it out"
        ),
        **{
            (FP8, other): f"is not supported with {other.name}, which Megatron's local layers alone have; leave it out"
            for other in (HYBRID, SANDWICH_NORMS, SINKS, HEADS)
        },
    }
)
"""Pairs of a model's parts, adapters, precision and layout that are refused."""
ROLE_TESTED = {
    (ADAPTERS, LOCAL_LAYERS): "strategy/test_adapters.py",
    (HEADS, LOCAL_LAYERS): "strategy/test_mtp.py",
    (FP8, ENGINE_LAYERS): "te/test_fp8.py",
}
"""Pairs that a test trains together, and the test below `tests`."""


def refused_parts(feature: Feature, parts: Parts) -> list[str]:
    """The reasons against `feature` in a model with `parts` that have it, without the cure."""
    rows = (row for row in ROLE_REFUSALS if row.feature is feature)
    return [row.reason.format(parts, feature) for row in refused_pairs(rows, parts)]
