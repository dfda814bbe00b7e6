"""What a field of a batch means: one of four kinds, and the value that fills its gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from roll_batching.errors import DataError

FieldKind = Literal["token", "next_token", "sample", "static"]


@dataclass(frozen=True)
class FieldSpec:
    """The meaning of one field.

    Raises:
        DataError: for a kind that does not exist or a pad value that is not a number.
    """

    kind: FieldKind
    """`token`: one value per token, stored flat as `[sum(lengths), ...]`.

    `next_token`: value i of a sample speaks of its token i+1. Stored flat with as many rows as `token`; the
    last row of a sample speaks of nothing (made from padded tensors or lists, it holds `pad`).
    `sample`: one value per sample, `[n, ...]`.
    `static`: one value for the whole batch, of any type, equal on all ranks.
    """

    pad: int | float | bool = 0
    """What a place without a value reads: padding, rows behind a truncation, samples left out."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FieldKind):
            raise DataError(f"A field's kind is one of {', '.join(get_args(FieldKind))}; got {self.kind!r}.")
        if not isinstance(self.pad, (bool, int, float)):
            raise DataError(f"A field's pad value is a number; got {self.pad!r}.")

    @property
    def per_token(self) -> bool:
        """Whether the field has one row per token (`token` and `next_token`)."""
        return self.kind in ("token", "next_token")


Schema = dict[str, FieldSpec]
SchemaLike = Mapping[str, "FieldSpec | FieldKind"]


def normalise_schema(schema: SchemaLike) -> Schema:
    """Return `schema` with every plain kind (`"token"`) turned into a `FieldSpec`."""
    result: Schema = {}
    for name, spec in schema.items():
        try:
            result[name] = spec if isinstance(spec, FieldSpec) else FieldSpec(spec)
        except DataError as error:
            raise DataError(f"Field {name!r}: {error}") from None
    return result
