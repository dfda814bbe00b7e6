"""Flat ragged fields on the host: index arithmetic, making them from padded tensors or lists, descriptions and checks.

Errors name rows by number and id.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from roll_batching.distributed import digest
from roll_batching.errors import DataError, first_of
from roll_batching.samples.fields import FieldSpec, Schema, check_dtype

PaddingSide = Literal["right", "left"]
MaskPadding = Literal["right", "left", "both"]
"""Where rows are padded: all on one side, or ("both") each row on any side."""


def starts_of(lengths: Tensor) -> Tensor:
    """Offsets of the rows: int64 `[n + 1]`, from int64 `lengths` `[n]`; the last is the total."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def row_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Flat indices of rows that begin at `starts` and have `lengths` values: int64 `[sum(lengths)]`.

    Row j contributes `starts[j], starts[j] + 1, ..., starts[j] + lengths[j] - 1`, in order of j.
    """
    offsets = starts_of(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return shift + torch.arange(int(offsets[-1]), dtype=torch.int64)


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along the first dimension; a host index is copied to the device of `values`."""
    return values.index_select(0, index.to(values.device, non_blocking=True))


def place(values: Tensor, index: Tensor, rows: int, pad: int | float | bool) -> Tensor:
    """A tensor of `rows` rows with `values` at `index` and `pad` elsewhere.

    `values` is `[len(index), ...]`, the result `[rows, ...]` of the same dtype and device.
    """
    result = torch.full((rows, *values.shape[1:]), pad, dtype=values.dtype, device=values.device)
    result.index_copy_(0, index.to(values.device, non_blocking=True), values)
    return result


# ---- making fields


def as_index(values: Any, what: str) -> Tensor:
    """`values` (tensor, array or sequence of integers) as a one-dimensional int64 tensor on the host.

    Raises `DataError` when the values are not integers or not one-dimensional.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    elif isinstance(values, (str, bytes)) or not isinstance(values, (Iterable, np.ndarray)):
        raise DataError(f"{what} must be a one-dimensional list of integers; got {values!r}.")
    else:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iub":
            raise DataError(f"{what} must be integers; got dtype {array.dtype}.")
        tensor = torch.from_numpy(array.astype(np.int64, copy=True))
    if tensor.dim() != 1:
        raise DataError(f"{what} must be one-dimensional; got shape {tuple(tensor.shape)}.")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{what} must be integers; got dtype {tensor.dtype}.")
    return tensor.to(torch.int64)


def check_field_names(names: Iterable[str], schema: Schema) -> None:
    """Raises `DataError` for fields without a kind and kinds without a field."""
    names = set(names)
    if unknown := sorted(names - schema.keys()):
        raise DataError(
            f"Field{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} not in the schema: "
            "say what kind each is (token, next_token, sample or static), or leave it out."
        )
    if missing := sorted(schema.keys() - names):
        raise DataError(f"The schema names {', '.join(map(repr, missing))}: give these fields, or take them out of it.")


def locate_rows(attention_mask: Tensor, ids: Tensor, side: MaskPadding) -> tuple[Tensor, Tensor]:
    """(first columns, lengths) of the rows of a `[B, S]` mask of zeros and ones: int64 `[B]`, on the host.

    Raises `DataError` for a row without tokens, a mask with holes, padding on another side than `side`, values that are
    not 0 or 1.
    """
    if side not in ("right", "left", "both"):
        raise DataError(f'padding_side is "right", "left" or "both"; got {side!r}.')
    mask = attention_mask.detach().cpu()
    valid = mask.to(torch.bool)
    # An additive mask (0 and -inf) would read inverted as a boolean one.
    if mask.dtype != torch.bool and bool((mask != valid.to(mask.dtype)).any()):
        wrong = mask[mask != valid.to(mask.dtype)][0].item()
        raise DataError(f"The attention mask holds {wrong}: pass only 0 and 1; additive masks are not understood.")
    lengths = valid.sum(1, dtype=torch.int64)
    if (empty := (lengths == 0).nonzero().flatten()).numel():
        raise DataError(f"No token in {name_rows(empty, ids)}: the attention mask is all padding there.")
    columns, firsts = torch.arange(mask.shape[1]), (valid.cumsum(1) == 0).sum(1)
    contiguous = (columns >= firsts[:, None]) & (columns < (firsts + lengths)[:, None])
    if (bad := (valid != contiguous).any(1).nonzero().flatten()).numel():
        raise DataError(
            f"{name_rows(bad, ids)}: the attention mask has holes (a 0 between two 1s). A sample's tokens must be "
            "contiguous."
        )
    gaps = {"right": firsts, "left": mask.shape[1] - firsts - lengths}
    if side != "both" and (bad := gaps[side].nonzero().flatten()).numel():
        other_side = "left" if side == "right" else "right"
        raise DataError(
            f'{name_rows(bad, ids)}: padded on the {other_side}, but padding_side="{side}". Pass '
            f'padding_side="{other_side}" when all rows are padded there, or "both".'
        )
    return firsts, lengths


def from_padded(
    tensors: Mapping[str, Any], attention_mask: Tensor, schema: Schema, ids: Tensor, side: MaskPadding
) -> tuple[Tensor, dict[str, Any]]:
    """(lengths, fields) from `[B, S, ...]` tensors; see `SampleBatch.from_padded`."""
    check_field_names(tensors, schema)
    batch, width = attention_mask.shape
    firsts, lengths = locate_rows(attention_mask, ids, side)
    firsts = firsts + torch.arange(batch) * width
    token_index = row_indices(firsts, lengths)
    fields: dict[str, Any] = {}
    for name, spec in schema.items():
        values = tensors[name]
        if spec.kind == "static":
            fields[name] = values
            continue
        if not isinstance(values, Tensor):
            raise DataError(f"field {name!r} is a {type(values).__name__}: pass a tensor, e.g. torch.as_tensor(...)")
        check_dtype(name, spec, values.dtype)
        if spec.kind in ("sample", "rows"):
            fields[name] = values
            continue
        widths = (width,) if spec.kind == "token" else (width, width - 1)
        if values.dim() < 2 or values.shape[0] != batch or values.shape[1] not in widths:
            shapes = " or ".join(f"[{batch}, {w}, ...]" for w in widths)
            raise DataError(
                f"Field {name!r} is a {spec.kind} field, so its shape must be {shapes} like the mask; "
                f"got {tuple(values.shape)}."
            )
        flat = values.reshape(batch * values.shape[1], *values.shape[2:])
        if spec.kind == "token":
            fields[name] = take(flat, token_index)
        else:
            # `firsts` counts in rows of S values; these may have S - 1.
            columns = firsts - torch.arange(batch) * (width - values.shape[1])
            fields[name] = append_pad(take(flat, row_indices(columns, lengths - 1)), lengths, spec)
    return lengths, fields


def append_pad(values: Tensor, lengths: Tensor, spec: FieldSpec) -> Tensor:
    """Adds a last row of padding to each sample: from L-1 rows per sample in `values` to L."""
    offsets = starts_of(lengths)
    return place(values, row_indices(offsets[:-1], lengths - 1), int(offsets[-1]), spec.pad)


def from_lists(columns: Mapping[str, Any], schema: Schema, lengths: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """(lengths, fields) from per-sample lists; see `SampleBatch.from_lists`."""
    check_field_names(columns, schema)
    if lengths is None:
        per_token = [name for name, spec in schema.items() if spec.kind == "token"]
        if not per_token:
            raise DataError("Without a token field, pass lengths: nothing else says how long the samples are.")
        lengths = torch.tensor([len(row) for row in columns[per_token[0]]], dtype=torch.int64)
    count = lengths.numel()
    fields: dict[str, Any] = {}
    for name, spec in schema.items():
        values = columns[name]
        if spec.kind == "static":
            fields[name] = values
            continue
        if len(values) != count:
            raise DataError(f"Field {name!r} has {len(values)} samples: give one value for each of {count}.")
        if spec.kind == "sample":
            fields[name] = values if isinstance(values, Tensor) else _tensor(name, values)
            continue
        row_lengths = torch.tensor([len(row) for row in values], dtype=torch.int64)
        flat = _concatenate(name, values)
        check_dtype(name, spec, flat.dtype)
        if spec.kind == "rows":  # `SampleBatch` compares the sum; this names the sample
            counts = as_index(columns[str(spec.counts)], f"field {spec.counts!r}")
            if row_lengths.shape != counts.shape or (row_lengths != counts).any():
                raise DataError(
                    f"Field {name!r} has {row_lengths.tolist()[:8]} rows in its first samples, but its counts say "
                    f"{counts.tolist()[:8]}: make them equal."
                )
            fields[name] = flat
        elif spec.kind == "token":
            _check_row_lengths(name, row_lengths, lengths, "")
            fields[name] = flat
        else:
            is_short = row_lengths == lengths - 1
            _check_row_lengths(name, row_lengths + is_short, lengths, " or one less")
            index = row_indices(starts_of(row_lengths)[:-1], lengths - 1)
            fields[name] = append_pad(take(flat, index), lengths, spec)
    return lengths, fields


def _check_row_lengths(name: str, row_lengths: Tensor, lengths: Tensor, note: str) -> None:
    if (bad := (row_lengths != lengths).nonzero().flatten()).numel():
        row = int(bad[0])
        raise DataError(
            f"Field {name!r}, row {row}: {int(row_lengths[row])} values for a sample of {int(lengths[row])} tokens "
            f"(as many{note} are needed); {bad.numel()} such row{'s' if bad.numel() > 1 else ''}."
        )


def counts_of(name: str, counts: str, fields: Mapping[str, Any], schema: Schema) -> Tensor:
    """Rows of the field `name` for each sample, from the field `counts`: int64 `[n]`, on the host.

    Raises `DataError` unless `counts` is a sample field of integers, none negative, with the pad value 0.
    """
    values, spec = fields.get(counts), schema.get(counts)
    if spec is None or spec.kind != "sample" or spec.pad != 0:
        raise DataError(
            f"Field {name!r} has its rows per sample in {counts!r}, which must be a sample field of this batch with "
            f"the pad value 0; it is {'absent' if spec is None else spec}."
        )
    rows = as_index(values, f"field {counts!r}")
    if bool((rows < 0).any()):
        raise DataError(f"Field {counts!r} counts the rows of {name!r}: {int(rows.min())} must be 0 or more.")
    return rows


def _concatenate(name: str, rows: Sequence[Any]) -> Tensor:
    if not len(rows):
        return torch.empty(0, dtype=torch.int64)
    if any(isinstance(row, (Tensor, np.ndarray)) for row in rows):
        parts = [torch.as_tensor(row) for row in rows]
        if len({part.shape[1:] for part in parts}) > 1 or len({part.dtype for part in parts}) > 1:
            raise DataError(f"Field {name!r}: its rows differ in dtype or in the shape of one value: make them equal.")
        return torch.cat(parts)
    return _tensor(name, list(chain.from_iterable(rows)))


def _tensor(name: str, values: Sequence[Any]) -> Tensor:
    if values and all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values))
    try:
        return torch.as_tensor(np.asarray(values)) if isinstance(values, np.ndarray) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"Field {name!r} does not hold numbers of one shape: {error}") from None


# ---- descriptions and checks


def name_rows(rows: Tensor, ids: Tensor, limit: int = 8) -> str:
    """`row 3 (id 17), row 5 (id 20) and 7 more`: the first of `rows`, for an error."""
    return first_of([f"row {row} (id {int(ids[row])})" for row in rows.tolist()], limit, ", ")


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
        raise DataError(f"Field {name!r} is a {type(values).__name__}: pass a tensor to check it for NaN.")
    bad = ~torch.isfinite(values)
    if rows is None:
        if bool(bad.any()):
            raise DataError(f"Static field {name!r} holds values that are not finite: correct them.")
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
