"""How a parameter of Megatron's is made of a checkpoint's tensors: rules as data, and the rows and columns of a shard.

A rule names a parameter as Megatron has it, the tensors that it is made of with their shapes in words (`Sizes`), and
how they become one and are cut among tensor-parallel ranks. `pieces` turns that into index ranges, which import reads
and export writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Join = Literal["copy", "rows", "columns", "gated", "qkv", "vocabulary"]
"""copy: the same on every rank. rows, columns: cut along the first or second dimension. gated: two tensors, each cut
by rows, one above the other. qkv: three tensors, cut by query groups, each group's queries, key and value together.
vocabulary: cut by rows, the number of rows rounded up."""


@dataclass(frozen=True)
class TensorRule:
    """A parameter and the tensors that it is made of. `{layer}` and `{expert}` are numbers in the whole model."""

    ours: str
    """Name in a GPTModel of Megatron's local layer spec."""
    join: Join
    theirs: tuple[tuple[str, tuple[str, ...]], ...]
    """Names in the checkpoint, each with its shape in the names of `Sizes`."""
    fused: str | None = None
    """Name in a GPTModel of TransformerEngine's layer spec, where it is another."""

    def at(self, layer: int | None = None, expert: int | None = None) -> TensorRule:
        """The rule for one layer, and one expert in it."""

        def filled(name: str) -> str:
            return name.format(layer=layer, expert=expert)

        return TensorRule(
            filled(self.ours),
            self.join,
            tuple((filled(name), shape) for name, shape in self.theirs),
            None if self.fused is None else filled(self.fused),
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model that shapes are made of, in whole tensors."""

    vocabulary: int
    hidden: int
    queries: int
    """Query heads x width of a head."""
    keys: int
    """Key heads (query groups) x width of a head."""
    head: int
    groups: int
    """Query groups."""
    ffn: int
    experts: int = 0
    expert_ffn: int = 0

    @classmethod
    def of(cls, architecture: Any) -> Sizes:
        """Of the settings `model_args.architecture`."""
        moe = architecture.moe
        return cls(
            vocabulary=architecture.vocab_size,
            hidden=architecture.hidden_size,
            queries=architecture.num_attention_heads * architecture.head_dim,
            keys=architecture.kv_heads * architecture.head_dim,
            head=architecture.head_dim,
            groups=architecture.kv_heads,
            ffn=architecture.ffn_width,
            experts=0 if moe is None else moe.num_experts,
            expert_ffn=0 if moe is None else moe.ffn_hidden_size or architecture.ffn_width,
        )

    def shape(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """A shape in words as numbers."""
        return tuple(getattr(self, word) for word in words)


@dataclass(frozen=True)
class Piece:
    """Part of a checkpoint's tensor, and where in a rank's parameter it lies."""

    name: str
    rows: slice
    """Of the tensor."""
    columns: slice | None
    """Of the tensor; None: all."""
    at: slice
    """Rows of the parameter."""


def pieces(rule: TensorRule, sizes: Sizes, rank: int, ranks: int) -> Iterator[Piece]:
    """What the parameter of `rule` holds on tensor-parallel rank `rank` of `ranks`, in ascending rows.

    Rows of the parameter that no piece covers stand for no token: a vocabulary that was rounded up.
    """
    shapes = [(name, sizes.shape(words)) for name, words in rule.theirs]
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
        case "qkv":
            start = 0
            for group in range(rank * sizes.groups // ranks, (rank + 1) * sizes.groups // ranks):
                for name, shape in shapes:
                    share = shape[0] // sizes.groups
                    yield Piece(name, slice(group * share, (group + 1) * share), None, slice(start, start + share))
                    start += share


def local_shape(rule: TensorRule, sizes: Sizes, ranks: int) -> tuple[int, ...]:
    """Shape of the parameter of `rule` on each of `ranks` tensor-parallel ranks."""
    shapes = [sizes.shape(words) for _, words in rule.theirs]
    rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
    match rule.join:
        case "copy":
            return (rows, *rest)
        case "columns":
            return (rows, rest[0] // ranks)
        case _:
            return (-(-rows // ranks), *rest)


def expected_tensors(rules: Mapping[str, TensorRule], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with these rules has."""
    return {name: sizes.shape(words) for rule in rules.values() for name, words in rule.theirs}
