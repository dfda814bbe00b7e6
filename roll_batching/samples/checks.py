"""Descriptions of batches for errors and for comparison between ranks; check for non-finite values."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roll_batching.distributed import digest
from roll_batching.errors import DataError
from roll_batching.samples.fields import FieldSpec, Schema
from roll_batching.samples.ragged import starts_of


def name_rows(rows: Tensor, ids: Tensor, limit: int = 8) -> str:
    """`row 3 (id 17), row 5 (id 20) and 7 more`: the first of `rows`, for an error."""
    shown = ", ".join(f"row {int(row)} (id {int(ids[row])})" for row in rows[:limit])
    more = rows.numel() - limit
    return shown + (f" and {more} more" if more > 0 else "")


def describe_fields(schema: Schema, fields: Mapping[str, Any], *, static_values: bool) -> dict[str, str]:
    """Kind, pad, dtype and shape of one value of every field, as text; with `static_values` those too."""
    texts = {}
    for name, spec in schema.items():
        values = fields[name]
        if spec.kind != "static":
            dtype = str(values.dtype).removeprefix("torch.")
            kind = spec.kind if spec.counts is None else f"{spec.kind} (counted by {spec.counts})"
            texts[name] = f"{kind} {dtype}{list(values.shape[1:]) or ''} pad {spec.pad}"
        else:
            texts[name] = f"static {_describe_static(values)}" if static_values else "static"
    return texts


def _describe_static(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(raw).hexdigest()[:16]
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} of bytes {digest}"


def describe_difference(one: Mapping[str, str], other: Mapping[str, str], noun: str = "") -> str:
    """The differences between two descriptions as text; empty if they are equal."""
    return "; ".join(
        f"{noun}{name} is {one.get(name, 'absent')} here and {other.get(name, 'absent')} there"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    )


def require_finite(name: str, values: Any, spec: FieldSpec, ids: Tensor, rows: Tensor | None) -> None:
    """Raises `DataError` for NaN and infinities in one field; see `SampleBatch.require_finite`.

    `rows` int64 `[n]` are those of the field for each sample; None for a static field.
    """
    if not isinstance(values, Tensor):
        raise DataError(f"Field {name!r} is not a tensor, so it cannot be checked for NaN.")
    bad = ~torch.isfinite(values)
    if rows is None:
        if bool(bad.any()):
            raise DataError(f"Static field {name!r} holds values that are not finite.")
        return
    bad = (bad.flatten(1).any(1) if bad.dim() > 1 else bad).cpu()
    offsets = starts_of(rows)
    if spec.kind == "next_token":
        bad[offsets[1:] - 1] = False  # a sample's last row predicts nothing
    positions = bad.nonzero().flatten()
    if not positions.numel():
        return
    detail = ""
    if spec.kind != "sample":
        samples = torch.searchsorted(offsets, positions, right=True) - 1
        first = int(samples[0])
        detail = f"; the first at position {int(positions[0] - offsets[first])} of {int(rows[first])}"
        positions = samples.unique_consecutive()
    raise DataError(f"Field {name!r} is not finite in {name_rows(positions, ids)}{detail}.")


def content_digest(ids: Tensor, lengths: Tensor, fields: Mapping[str, Any]) -> int:
    """Digest of samples and their fields.

    Fields on a device are left out, except `input_ids`: each would cost a synchronisation.
    """
    parts = []
    for name, values in sorted({"ids": ids, "lengths": lengths, **fields}.items()):
        if not isinstance(values, Tensor):
            parts.append(f"{name}={values!r}")
        elif values.device.type == "cpu" or name == "input_ids":
            raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            parts.append(f"{name}={values.dtype}{list(values.shape)}:{zlib.crc32(raw)}")
    return digest(*parts)
