"""Rules that map checkpoint tensors to Megatron parameters, and the index ranges of a tensor-parallel shard.

A rule names a Megatron parameter, its checkpoint tensors with symbolic shapes (`Sizes`), and how these are joined and
sharded over tensor-parallel ranks. `pieces` turns a rule into index ranges, for import and export alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Join = Literal[
    "copy", "rows", "columns", "gated", "qkv", "gated_qkv", "by_unit", "vocabulary", "expert", "expert_gated",
    "expert_halves", "expert_rows",
]  # fmt: skip
"""copy: replicated. rows, columns: sharded along the first or second dimension. gated: two tensors, each sharded by
rows, concatenated. qkv: three tensors; each group's queries, key and value are adjacent, and rows are sharded evenly:
with fewer groups than ranks, a group's rows are on several.
gated_qkv: the same, with a gate behind each query head, which the parameter has behind the group's queries.
by_unit: parts of tensors, sharded by the units of recurrent layers (key heads of gated delta nets, groups of Mamba);
each unit's rows of all parts are adjacent.
vocabulary: sharded by rows, whose number is rounded up. expert: an expert's part of a tensor of all experts, matrices
transposed, not sharded. expert_gated: the same, gate and up projection interleaved.
expert_halves, expert_rows: an expert's part, transposed and sharded: gate and up projection, each by the parameter's
rows; and the down projection, by the parameter's columns."""


@dataclass(frozen=True)
class TensorRule:
    """A parameter and its checkpoint tensors. `{layer}` and `{expert}` stand for indices in the whole model."""

    ours: str
    """Parameter name with Megatron's local layer spec."""
    join: Join
    theirs: tuple[tuple[str, tuple[str | int, ...]], ...]
    """Names in the checkpoint, each with its shape in fields of `Sizes`, or in numbers."""
    fused: str | None = None
    """Parameter name with TransformerEngine's layer spec, if different."""
    expert: int | None = None
    """The expert, for joins of a tensor of all experts."""
    parts: tuple[tuple[str, ...], ...] = ()
    """by_unit: rows of the parts of each tensor, in fields of `Sizes`."""
    outputs_first: bool = False
    """expert_halves and expert_rows: whether matrices in the file are [outputs, inputs], as those of the parameter."""

    def at(self, layer: int | None = None, expert: int | None = None) -> TensorRule:
        """This rule with the numbers of a layer, and of an expert in it, filled into its names."""
        return dataclasses.replace(
            self,
            ours=self.ours.format(layer=layer, expert=expert),
            theirs=tuple((name.format(layer=layer, expert=expert), shape) for name, shape in self.theirs),
            fused=None if self.fused is None else self.fused.format(layer=layer, expert=expert),
            expert=expert,
        )

    def with_prefixes(self, prefixes: Iterable[tuple[str, str]]) -> TensorRule:
        """The rule with checkpoint name prefixes replaced: (in the rule, in the files), applied in turn."""
        theirs = self.theirs
        for old, new in prefixes:
            theirs = tuple((new + name[len(old) :] if name.startswith(old) else name, shape) for name, shape in theirs)
        return dataclasses.replace(self, theirs=theirs)

    def with_outputs_first(self) -> TensorRule:
        """The rule for files with matrices [outputs, inputs]; other rules stay."""
        if self.join not in ("expert_halves", "expert_rows"):
            return self
        theirs = tuple((name, (experts, outputs, inputs)) for name, (experts, inputs, outputs) in self.theirs)
        return dataclasses.replace(self, theirs=theirs, outputs_first=True)

    @property
    def first_checkpoint_name(self) -> str:
        """Name of its checkpoint tensor, the first of several."""
        return self.theirs[0][0]

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint tensor holds all experts."""
        return self.join.startswith("expert")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Dimensions of unsharded tensors."""

    vocabulary: int
    hidden: int
    queries: int
    """Query heads x head dimension."""
    keys: int
    """Query groups x head dimension."""
    values: int
    """Query heads x head dimension of values."""
    head: int
    groups: int
    """Query groups."""
    heads: int
    """Query heads."""
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    expert_gated_ffn: int = 0
    """Width of an expert's gate and up projection together."""
    shared_ffn: int = 0
    """Width of the shared experts together."""
    q_latent: int = 0
    """Multi-latent attention: width of the queries' latent."""
    kv_latent: int = 0
    kv_latent_and_rope: int = 0
    """Width of the latent of keys and values, and of the rotated channels that all heads share."""
    keys_values: int = 0
    """Heads x channels of keys that are not rotated, and of values."""
    gated_queries: int = 0
    """Query heads x head dimension, with as many channels of gates."""
    one: int = 1
    hidden_pair: int = 0
    """Two hidden states."""
    recurrent_units: int = 0
    """Key heads of gated delta nets, or groups of Mamba layers."""
    conv_kernel: int = 0
    delta_value_heads: int = 0
    """Gated delta nets: value heads, then rows of the parts of their projections."""
    delta_rates: int = 0
    """Rates and decays of all value heads."""
    delta_keys: int = 0
    delta_values: int = 0
    delta_mixed: int = 0
    """Queries, keys and values, which are convolved."""
    delta_gated: int = 0
    """Queries, keys, values and gates together."""
    delta_value_dim: int = 0
    mamba_heads: int = 0
    mamba_inner: int = 0
    """Heads x channels."""
    mamba_states: int = 0
    """Groups x states."""
    mamba_mixed: int = 0
    """Convolved channels."""
    mamba_projected: int = 0
    latent: int = 0
    """Width of the latent of experts."""
    expert_hidden: int = 0
    """Width of the inputs of experts."""

    @classmethod
    def of(cls, architecture: Any) -> Sizes:
        """The dimensions of an `ArchitectureConfig`."""
        moe, latent = architecture.moe, architecture.multi_latent_attention
        heads = architecture.num_attention_heads
        of_parts: dict[str, int] = {}
        if (delta := architecture.gated_delta_net) is not None:
            keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
            of_parts = {
                "recurrent_units": delta.num_key_heads,
                "delta_value_heads": delta.num_value_heads,
                "delta_rates": 2 * delta.num_value_heads,
                "delta_keys": keys,
                "delta_values": values,
                "delta_mixed": 2 * keys + values,
                "delta_gated": 2 * keys + 2 * values,
                "delta_value_dim": delta.value_head_dim,
                "conv_kernel": delta.conv_kernel_dim,
            }
        if (hybrid := architecture.hybrid) is not None:
            inner = hybrid.mamba_num_heads * hybrid.mamba_head_dim
            states = hybrid.mamba_num_groups * hybrid.mamba_state_dim
            of_parts = {
                "recurrent_units": hybrid.mamba_num_groups,
                "conv_kernel": hybrid.mamba_conv_kernel_dim,
                "mamba_heads": hybrid.mamba_num_heads,
                "mamba_inner": inner,
                "mamba_states": states,
                "mamba_mixed": inner + 2 * states,
                "mamba_projected": 2 * inner + 2 * states + hybrid.mamba_num_heads,
                "latent": hybrid.moe_latent_size or 0,
                "expert_hidden": hybrid.moe_latent_size or architecture.hidden_size,
            }
        if latent is not None:
            of_parts = {
                "q_latent": latent.q_lora_rank or 0,
                "kv_latent": latent.kv_lora_rank,
                "kv_latent_and_rope": latent.kv_lora_rank + latent.qk_pos_emb_head_dim,
                "keys_values": heads * (latent.qk_head_dim + latent.v_head_dim),
            }
        return cls(
            vocabulary=architecture.vocab_size,
            hidden=architecture.hidden_size,
            hidden_pair=2 * architecture.hidden_size,
            queries=heads * architecture.head_dim,
            keys=architecture.kv_heads * architecture.head_dim,
            values=heads * architecture.value_dim,
            head=architecture.head_dim,
            groups=architecture.kv_heads,
            ffn=architecture.ffn_width,
            experts=0 if moe is None else moe.num_experts,
            expert_ffn=0 if moe is None else moe.ffn_hidden_size or architecture.ffn_width,
            expert_gated_ffn=0 if moe is None else 2 * (moe.ffn_hidden_size or architecture.ffn_width),
            heads=heads,
            gated_queries=2 * heads * architecture.head_dim,
            shared_ffn=0 if moe is None else moe.shared_expert_ffn_hidden_size or 0,
            **of_parts,
        )

    def shape(self, names: tuple[str | int, ...]) -> tuple[int, ...]:
        """The numbers of a symbolic shape."""
        return tuple(name if isinstance(name, int) else getattr(self, name) for name in names)


@dataclass(frozen=True)
class Piece:
    """A slice of a checkpoint tensor, and its rows in a rank's parameter."""

    name: str
    rows: slice
    """Rows of the tensor."""
    columns: slice | None
    """Columns of the tensor; None for all."""
    at: slice
    """Rows of the parameter."""
    of_expert: bool = False
    """Whether `rows` is one expert, and `columns` are of the last dimension; a matrix is transposed."""
    inputs: slice | None = None
    """Of an expert's matrix, the part of its first dimension; None for all."""
    outputs_first: bool = False
    """Whether the file has the matrix transposed to what the fields above are about."""

    def select(self, expert: Any) -> Any:
        """A view of this piece in an expert's tensor, transposed to the orientation of the parameter."""
        expert = expert.t() if self.outputs_first else expert
        values = expert if self.columns is None else expert[..., self.columns]
        values = values if self.inputs is None else values[self.inputs]
        return values.t() if values.dim() == 2 else values


def pieces(rule: TensorRule, sizes: Sizes, rank: int, ranks: int) -> Iterator[Piece]:
    """The slices that make up the parameter of `rule` on tensor-parallel rank `rank` of `ranks`, in ascending rows.

    Rows of the parameter after the last slice are padding of the vocabulary.
    """
    shapes = [(name, sizes.shape(dimensions)) for name, dimensions in rule.theirs]
    (first, shape) = shapes[0]
    match rule.join:
        case "copy":
            yield Piece(first, slice(0, shape[0]), None, slice(0, shape[0]))
        case "columns":
            width = shape[1] // ranks
            yield Piece(first, slice(0, shape[0]), slice(rank * width, (rank + 1) * width), slice(0, shape[0]))
        case "vocabulary":
            share = -(-shape[0] // ranks)
            rows = slice(rank * share, min((rank + 1) * share, shape[0]))
            if rows.start < rows.stop:
                yield Piece(first, rows, None, slice(0, rows.stop - rows.start))
        case "rows" | "gated":
            start = 0
            for name, shape in shapes:
                share = shape[0] // ranks
                yield Piece(name, slice(rank * share, (rank + 1) * share), None, slice(start, start + share))
                start += share
        case "expert" | "expert_gated":
            assert rule.expert is not None
            expert_row, width = slice(rule.expert, rule.expert + 1), shape[-1]
            if rule.join == "expert":
                yield Piece(first, expert_row, None, slice(0, width), of_expert=True)
            else:
                for half in range(2):  # their columns alternate between gate and up; ours has all gates, then all ups
                    half_rows = slice(half * width // 2, (half + 1) * width // 2)
                    yield Piece(first, expert_row, slice(half, None, 2), half_rows, of_expert=True)
        case "expert_halves" | "expert_rows":
            yield from _shards_of_expert(rule, first, shape, rank, ranks)
        case "qkv" | "gated_qkv" | "by_unit":
            share = sum(shape[0] for _, shape in shapes) // ranks
            yield from _part(_rows(rule, shapes, sizes), rank * share, (rank + 1) * share)


def _shards_of_expert(rule: TensorRule, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Iterator[Piece]:
    assert rule.expert is not None
    row, flipped = slice(rule.expert, rule.expert + 1), rule.outputs_first
    inputs, outputs = reversed(shape[1:]) if flipped else shape[1:]
    if rule.join == "expert_rows":
        share = slice(rank * inputs // ranks, (rank + 1) * inputs // ranks)
        yield Piece(name, row, None, slice(0, outputs), of_expert=True, inputs=share, outputs_first=flipped)
        return
    half, count = outputs // 2, outputs // 2 // ranks
    for first in (0, half):
        columns = slice(first + rank * count, first + (rank + 1) * count)
        rows = slice(first // ranks, first // ranks + count)
        yield Piece(name, row, columns, rows, of_expert=True, outputs_first=flipped)


def _rows(rule: TensorRule, shapes: list[tuple[str, tuple[int, ...]]], sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """The unsharded parameter from top to bottom, as (tensor, first row, number of rows)."""
    if rule.join == "by_unit":
        for unit in range(sizes.recurrent_units):
            for (name, _), parts in zip(shapes, rule.parts, strict=True):
                first = 0
                for rows in sizes.shape(parts):
                    share = rows // sizes.recurrent_units
                    yield name, first + unit * share, share
                    first += rows
        return
    (queries, shape), *others = shapes
    per_group = shape[0] // sizes.groups
    for group in range(sizes.groups):
        if rule.join == "qkv":
            yield queries, group * per_group, per_group
        else:  # its queries, and behind them their gates
            for half in range(2):
                for first in range(group * per_group, (group + 1) * per_group, 2 * sizes.head):
                    yield queries, first + half * sizes.head, sizes.head
        for name, (rows, *_) in others:
            yield name, group * rows // sizes.groups, rows // sizes.groups


def _part(rows: Iterable[tuple[str, int, int]], start: int, stop: int) -> Iterator[Piece]:
    """Rows `start` to `stop` of a parameter; a shard may begin and end inside a group's queries, key or value."""
    end = 0
    for name, first, count in rows:
        begin, end = end, end + count
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield Piece(name, slice(first + low - begin, first + high - begin), None, slice(low - start, high - start))


def local_shape(rule: TensorRule, sizes: Sizes, ranks: int) -> tuple[int, ...]:
    """Shape of the parameter of `rule` on each of `ranks` tensor-parallel ranks."""
    shapes = [sizes.shape(dimensions) for _, dimensions in rule.theirs]
    rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
    match rule.join:
        case "copy":
            return (rows, *rest)
        case "columns":
            return (rows, rest[0] // ranks)
        case "expert" | "expert_gated":
            return tuple(reversed(rest))
        case "expert_halves" | "expert_rows":
            inputs, outputs = reversed(rest) if rule.outputs_first else rest
            return (outputs // ranks, inputs) if rule.join == "expert_halves" else (outputs, inputs // ranks)
        case _:
            return (-(-rows // ranks), *rest)


def expected_tensors(rules: Mapping[str, TensorRule], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint with these rules, by name."""
    return {name: sizes.shape(dimensions) for rule in rules.values() for name, dimensions in rule.theirs}
