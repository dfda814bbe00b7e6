"""Training FLOPs by length of models whose layers have one part each: for the planner, for MFU and for rehearsals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roll_batching.planning import FlopsCost
from roll_batching.planning.cost_model import FIXED_TOKENS, FLOPS_PER_WEIGHT, ChunkCosts
from roll_batching.planning.recurrent_exchange import Divided, RecurrentExchange
from roll_batching.settings.model import ArchitectureConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """Sizes of a model with the layers of `HybridConfig`."""

    pattern: str
    hidden: int
    vocabulary: int
    ffn: int
    queries: int
    """Heads x channels."""
    keys: int
    """Query groups x channels."""
    inner: int
    """Mamba: heads x channels."""
    heads: int
    groups: int
    states: int
    kernel: int
    experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int
    latent: int | None

    @classmethod
    def of_settings(cls, model: ArchitectureConfig) -> HybridSizes:
        """The sizes of an architecture with `hybrid`."""
        hybrid, moe = model.hybrid, model.moe
        assert hybrid is not None
        return cls(
            pattern=hybrid.pattern,
            hidden=model.hidden_size,
            vocabulary=model.vocab_size,
            ffn=model.ffn_width,
            queries=model.num_attention_heads * model.head_dim,
            keys=model.kv_heads * model.head_dim,
            inner=hybrid.mamba_num_heads * hybrid.mamba_head_dim,
            heads=hybrid.mamba_num_heads,
            groups=hybrid.mamba_num_groups,
            states=hybrid.mamba_state_dim,
            kernel=hybrid.mamba_conv_kernel_dim,
            experts=0 if moe is None else moe.num_experts,
            topk=0 if moe is None else moe.router_topk,
            expert_ffn=0 if moe is None else moe.ffn_hidden_size or model.ffn_width,
            shared_ffn=0 if moe is None else moe.shared_expert_ffn_hidden_size or 0,
            latent=hybrid.moe_latent_size,
        )

    @classmethod
    def of_config(cls, config: Any, vocabulary: int) -> HybridSizes:
        """The sizes of a `HybridTransformerConfig`."""
        has_experts = config.num_moe_experts is not None
        return cls(
            pattern=config.layer_kinds,
            hidden=config.hidden_size,
            vocabulary=vocabulary,
            ffn=config.ffn_hidden_size,
            queries=config.num_attention_heads * config.kv_channels,
            keys=config.num_query_groups * config.kv_channels,
            inner=config.mamba_num_heads * config.mamba_head_dim,
            heads=config.mamba_num_heads,
            groups=config.mamba_num_groups,
            states=config.mamba_state_dim,
            kernel=config.mamba_conv_kernel_dim,
            experts=config.num_moe_experts or 0,
            topk=config.moe_router_topk if has_experts else 0,
            expert_ffn=config.moe_ffn_hidden_size if has_experts else 0,
            shared_ffn=config.moe_shared_expert_intermediate_size or 0 if has_experts else 0,
            latent=config.moe_latent_size,
        )

    def exchange(self, tp_size: int, divide: Divided) -> RecurrentExchange:
        """What context-parallel ranks send in Mamba layers."""
        return RecurrentExchange(
            layers=self.pattern.count("M"),
            units=self.groups // tp_size,
            heads=self.heads // self.groups,
            channels=(2 * self.inner + 2 * self.groups * self.states + self.heads) // tp_size,
            map_elements=self.states * (self.inner + self.heads) // tp_size,
            divide=divide,
        )

    def per_token(self) -> dict[str, int]:
        """Multiply-adds of a token in a layer, by its letter.

        A Mamba layer multiplies its states twice: to add the token, and to read the output.
        """
        mixed, inputs = self.inner + 2 * self.groups * self.states, self.latent or self.hidden
        mamba = self.hidden * (self.inner + mixed + self.heads) + mixed * self.kernel + 2 * self.inner * self.states
        experts = self.hidden * (self.experts + 2 * self.shared_ffn) + 2 * self.topk * inputs * self.expert_ffn
        return {
            "M": mamba + self.inner * self.hidden,
            "*": self.hidden * (2 * self.queries + 2 * self.keys),
            "-": 2 * self.hidden * self.ffn,
            "E": experts + 2 * self.hidden * (self.latent or 0),
        }


def hybrid_cost(sizes: HybridSizes, *, ranks: int, chunks: Sequence[range] | None = None) -> FlopsCost:
    """The cost per rank of a model that `ranks` ranks share; `chunks` are the layers of each model chunk, if given."""
    per_token = sizes.per_token()
    head = sizes.hidden * sizes.vocabulary

    def of_layers(pattern: str) -> int:
        return sum(per_token[kind] for kind in pattern)

    linear = FLOPS_PER_WEIGHT * (of_layers(sizes.pattern) + head) // ranks
    # Two products per pair, scores and weighted values, of which causal attention computes half.
    quadratic = FLOPS_PER_WEIGHT * sizes.pattern.count("*") * sizes.queries // ranks
    by_chunk = None
    if chunks is not None:  # in half multiply-adds, as `FlopsCost.from_model`
        letters = [sizes.pattern[held.start : held.stop] for held in chunks]
        tokens = [2 * of_layers(chunk_letters) for chunk_letters in letters]
        tokens[-1] += 2 * head
        pairs = tuple(2 * chunk_letters.count("*") * sizes.queries for chunk_letters in letters)
        by_chunk = ChunkCosts(linear=tuple(tokens), quadratic=pairs)
    return FlopsCost(linear=linear, quadratic=quadratic, fixed=linear * FIXED_TOKENS, chunks=by_chunk)
