"""What a field of a batch means: one of four kinds, and the value that fills its gaps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

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
    """What a place without a value reads, in the field's dtype: padding, rows behind a truncation, samples left out."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FieldKind):
            raise DataError(f"A field's kind is one of {', '.join(get_args(FieldKind))}; got {self.kind!r}.")
        if not isinstance(self.pad, (bool, int, float)):
            raise DataError(f"A field's pad value is a number; got {self.pad!r}.")

    @property
    def per_token(self) -> bool:
        """Whether the field has one row per token (`token` and `next_token`)."""
        return self.kind in ("token", "next_token")


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *_WHOLE, *_FRACTIONS)
"""What torch can select, place and pad on every device; fields of other dtypes are refused."""


def check_dtype(name: str, spec: FieldSpec, dtype: torch.dtype) -> None:
    """Refuse a dtype that cannot be moved and a pad value that it cannot hold: nothing is promoted or wrapped.

    Raises:
        DataError: naming field, dtype and pad.
    """
    word = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise DataError(f"Field {name!r} is {word}, which cannot be selected or padded; cast it to one of {known}.")
    if not _holds(dtype, spec.pad):
        raise DataError(
            f"Field {name!r}: its pad value {spec.pad} does not fit its dtype {word}. Give FieldSpec({spec.kind!r}, "
            "pad=...) a value that it holds, or cast the field."
        )


def _holds(dtype: torch.dtype, pad: int | float | bool) -> bool:
    if dtype is torch.bool:
        return pad in (0, 1)
    if dtype in _WHOLE:
        whole = isinstance(pad, int) or pad.is_integer()
        return whole and torch.iinfo(dtype).min <= pad <= torch.iinfo(dtype).max
    return (isinstance(pad, float) and not math.isfinite(pad)) or abs(pad) <= torch.finfo(dtype).max


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
