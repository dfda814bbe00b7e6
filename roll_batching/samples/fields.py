"""Schema of a batch: the kind of each field (token, next_token, sample, rows, static) and its pad value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from roll_batching.errors import DataError

ROUTED_EXPERTS = "routed_experts"
"""A token field [tokens, layers with experts, top-k]: routers take these experts instead of their own choice."""
ROLLOUT_IDS = "rollout_ids"
"""sample, int64: samples of one rollout (turns, sub-agents, branches of a rewritten context) have one number."""
PIXELS = "pixel_values"
"""rows, uint8 [patches, 3 * patch_size ** 2]: each patch as [channel, y, x], before rescaling and normalisation, in the
order of transformers' `pixel_values`, and once where a still image has `temporal_patch_size` equal frames there."""
GRIDS = "image_grid_thw"
"""rows, int64 [images, 3]: 1, height and width of each image in patches."""
PATCHES = "image_patches"
"""sample, int64: rows of `PIXELS`."""
IMAGES = "images"
"""sample, int64: rows of `GRIDS`."""
MODEL_INPUTS = frozenset({"input_ids", ROUTED_EXPERTS, PIXELS, GRIDS, PATCHES, IMAGES})
"""Fields that enter the forward pass; all others are for losses. Samples share a position only where these agree."""
FieldKind = Literal["token", "next_token", "sample", "rows", "static"]


@dataclass(frozen=True)
class FieldSpec:
    """Kind and pad value of a field.

    Raises:
        DataError: for an unknown kind, a pad value that is not a number, `counts` without kind `rows` or the reverse.
    """

    kind: FieldKind
    """`token`: one value per token, stored flat as `[sum(lengths), ...]`.

    `next_token`: value i of a sample belongs to its token i+1 (log-probs, for example). Stored flat with as many rows
    as `token`; a sample's last row has no token (made from padded tensors or lists, it is `pad`).
    `sample`: one value per sample, `[n, ...]`.
    `rows`: any number of rows per sample, stored flat; the sample field `counts` has the number of each sample. Patches
    of images, for example.
    `static`: one value for the whole batch, of any type, equal on all ranks.
    """

    pad: int | float | bool = 0
    """Fill value, in the field's dtype, of padding, truncated rows and dropped samples."""
    counts: str | None = None
    """Kind `rows`: the sample field of integers that has the number of rows of each sample."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FieldKind):
            raise DataError(f"A field's kind is one of {', '.join(get_args(FieldKind))}; got {self.kind!r}.")
        if not isinstance(self.pad, (bool, int, float)):
            raise DataError(f"A field's pad value is a number; got {self.pad!r}.")
        if (self.kind == "rows") != (self.counts is not None):
            raise DataError(
                "A field of kind rows, and no other, names the sample field with its rows per sample: "
                f"FieldSpec('rows', counts='...'); got kind {self.kind!r} and counts {self.counts!r}."
            )

    @property
    def per_token(self) -> bool:
        """Whether the field has one row per token (`token` and `next_token`)."""
        return self.kind in ("token", "next_token")


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *_INTEGERS, *_FLOATS)
"""Dtypes that torch can index and fill on every device; fields of other dtypes are refused."""


def check_dtype(name: str, spec: FieldSpec, dtype: torch.dtype) -> None:
    """Raises for an unsupported dtype, or a pad value out of its range: values are never promoted or wrapped.

    Raises `DataError` naming field, dtype and pad.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        known = ", ".join(str(supported).removeprefix("torch.") for supported in DTYPES)
        raise DataError(
            f"Field {name!r} is {dtype_name}, which cannot be selected or padded; cast it to one of {known}."
        )
    if not _holds(dtype, spec.pad):
        raise DataError(
            f"Field {name!r}: its pad value {spec.pad} does not fit its dtype {dtype_name}. Give "
            f"FieldSpec({spec.kind!r}, pad=...) a value that it holds, or cast the field."
        )


def _holds(dtype: torch.dtype, pad: int | float | bool) -> bool:
    if dtype is torch.bool:
        return pad in (0, 1)
    if dtype in _INTEGERS:
        is_whole = isinstance(pad, int) or pad.is_integer()
        return is_whole and torch.iinfo(dtype).min <= pad <= torch.iinfo(dtype).max
    return (isinstance(pad, float) and not math.isfinite(pad)) or abs(pad) <= torch.finfo(dtype).max


EXPERTS_SPEC = FieldSpec("token", pad=-1)
"""Spec of `ROUTED_EXPERTS`. A token with -1 in all places is routed by the router."""

Schema = dict[str, FieldSpec]
SchemaLike = Mapping[str, "FieldSpec | FieldKind"]


def normalise_schema(schema: SchemaLike) -> Schema:
    """`schema` with every plain kind (`"token"`) turned into a `FieldSpec`."""
    result: Schema = {}
    for name, spec in schema.items():
        try:
            result[name] = spec if isinstance(spec, FieldSpec) else FieldSpec(spec)
        except DataError as error:
            raise DataError(f"Field {name!r}: {error}") from None
    return result
