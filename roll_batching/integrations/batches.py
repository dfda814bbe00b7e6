"""Reads a host's batch as a `SampleBatch`, and writes fields of a `SampleBatch` in the form of the host's batch.

| host | its batch | whole rows |
|---|---|---|
| verl's engines | TensorDict | jagged `input_ids`; in the trainer beside a padded `attention_mask` |
| verl's trainer, ROLL | DataProto | `[B, S]` under `attention_mask`, padded on either side or both |
| NeMo-RL | BatchedDataDict | `[B, S]`, padded on the right from `input_lengths` on |

Hosts do not store which token a column of a field belongs to. `forms` names it for each field, as a `HostForm`. verl's
log-probs, advantages and masks are "response", ROLL's log-probs "next_token", all of NeMo-RL's columns "token".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from roll_batching.errors import DataError
from roll_batching.samples import FieldKind, SampleBatch
from roll_batching.samples.flatten import MaskPadding, as_index, locate_rows

HostForm = Literal["token", "next_token", "response", "sample", "static"]
"""Where a host's field has its values.

`token`: one per token, jagged or `[B, S]`.
`next_token`: column j belongs to token j + 1; jagged rows of L or L - 1 values, `[B, S]` or `[B, S - 1]`.
`response`: one per token of `responses`, jagged or `[B, R]`. In a `SampleBatch` a token field, 0 in the prompt.
`sample`: `[B]` numbers, also among the non-tensors of a DataProto.
`static`: any one value, also of a DataProto's `meta_info`.
"""


def read_host_batch(
    data: Any, forms: Mapping[str, HostForm], ids: Any = None, *, padding_side: MaskPadding = "both"
) -> SampleBatch:
    """The samples of a host's batch, in its order, with the fields of `forms`.

    `ids` are by default 0 to B - 1; `padding_side` is where `attention_mask` may pad. Raises DataError with the field
    and what to change: a missing field, a mask with holes, lengths that are not whole numbers from 1 to S, rows that
    do not fit their form, no samples.
    """
    host = _HostBatch(data, padding_side)
    kinds: dict[str, FieldKind] = {name: "token" if form == "response" else form for name, form in forms.items()}
    columns = {name: host.read(name, form) for name, form in forms.items()}
    return SampleBatch.from_lists(columns, kinds, ids, host.lengths)


def make_host_fields(batch: SampleBatch, data: Any, forms: Mapping[str, HostForm]) -> dict[str, Tensor]:
    """Fields of `batch` by name, in the form of `data`, the host's batch from which `batch` was read.

    The samples of `batch` are in the order of `data`. Where a field's kind and form differ, values move by one token:
    from a token to the token that predicts it, or back. Rows are jagged where `input_ids` (for responses: `responses`)
    are, otherwise padded with the field's pad value. Raises DataError for other samples than those of `data`, and for
    static fields.
    """
    host = _HostBatch(data, "both")
    lengths, expected = batch.lengths.tolist(), host.lengths.tolist()
    if lengths != expected:
        raise DataError(
            f"the samples have the lengths {lengths[:8]} and the host's batch {expected[:8]}: select_ids(...) gives "
            "them in the order in which they were read"
        )
    return {name: host.write(batch, name, form) for name, form in forms.items()}


class _HostBatch:
    """A host's batch: its fields by name, and where its rows lie."""

    def __init__(self, data: Any, side: MaskPadding) -> None:
        is_proto = hasattr(data, "non_tensor_batch")
        self.sources = [data.batch, data.non_tensor_batch, data.meta_info] if is_proto else [data]
        ids = self.tensor("input_ids")
        count = ids.shape[0] if ids.dim() else 0
        if not count:
            raise DataError("'input_ids' has no rows: a host's batch has at least one sample")
        if not ids.is_nested and ids.dim() != 2:
            raise DataError(f"'input_ids' must be jagged or [B, S]; got the shape {tuple(ids.shape)}")
        self.firsts = torch.zeros(count, dtype=torch.int64)
        self.width = 0 if ids.is_nested else ids.shape[1]
        self.mask = self.tensor("attention_mask").cpu() if self.has("attention_mask") else None
        if self.mask is not None and not self.mask.is_nested:
            shape = (count, self.width or self.mask.shape[-1])
            if tuple(self.mask.shape) != shape:
                raise DataError(f"'attention_mask' has shape {tuple(self.mask.shape)}: give it {shape}, as 'input_ids'")
            self.width = shape[1]
            self.firsts, self.lengths = locate_rows(self.mask, torch.arange(count), side)
        if ids.is_nested:
            lengths = torch.tensor([len(row) for row in ids.unbind()])
            if self.width and not torch.equal(lengths, self.lengths):
                raise DataError("'input_ids' and 'attention_mask' have different lengths: pass both of one batch")
            self.lengths = lengths
        elif self.mask is None:
            self.lengths = self._checked_lengths(count)

    def _checked_lengths(self, count: int) -> Tensor:
        lengths = as_index(self["input_lengths"], "'input_lengths'")
        if len(lengths) != count:
            raise DataError(f"'input_lengths' has {len(lengths)} values: give one for each of the {count} rows")
        if len(wrong := ((lengths < 1) | (lengths > self.width)).nonzero().flatten()):
            raise DataError(
                f"'input_lengths' of row {int(wrong[0])} is {int(lengths[wrong[0]])}: lengths are 1 to {self.width}, "
                "the width of 'input_ids'"
            )
        return lengths

    def has(self, name: str) -> bool:
        return any(name in source.keys() for source in self.sources)

    def __getitem__(self, name: str) -> Any:
        for source in self.sources:
            if name in source.keys():
                return source[name]
        names = sorted(str(key) for source in self.sources for key in source.keys())
        raise DataError(f"the host's batch has no {name!r}; it has {', '.join(names)}")

    def tensor(self, name: str) -> Tensor:
        values = self[name]
        if not isinstance(values, Tensor):
            raise DataError(f"field {name!r} is a {type(values).__name__}: pass a tensor, e.g. torch.as_tensor(...)")
        return values

    @cached_property
    def response_lengths(self) -> list[int]:
        """Tokens of each row of `responses`, which are the last of `input_ids`."""
        responses = self.tensor("responses")
        if responses.is_nested:
            rows = list(responses.unbind())
        elif self.mask is None:
            raise DataError("'responses' are padded, and 'attention_mask' of [B, S] is missing: pass it in the batch")
        else:
            valid = self.mask[:, self.width - responses.shape[1] :].sum(1).tolist()
            rows = [row[:length] for row, length in zip(responses, valid, strict=True)]
        for number, (row, tokens) in enumerate(zip(rows, self.read("input_ids", "token"), strict=True)):
            if not torch.equal(row, tokens[len(tokens) - len(row) :]):
                raise DataError(
                    f"'responses' of row {number} are not the last tokens of 'input_ids': fields of responses have no "
                    "known place then. Give fields of whole rows ('token', 'next_token')"
                )
        return [len(row) for row in rows]

    def read(self, name: str, form: HostForm) -> Any:
        """A field for `SampleBatch.from_lists`: rows without padding, or the value of a static field."""
        if form in ("sample", "static"):
            values = self[name]
            if form == "sample" and isinstance(values, Tensor) and not values.dim():
                raise DataError(f"Field {name!r} is one value; as 'sample' it must be one for each row: use 'static'")
            is_objects = form == "sample" and not isinstance(values, Tensor) and hasattr(values, "tolist")
            return values.tolist() if is_objects else values  # numpy's arrays of objects, tensordict's stacks
        values = self.tensor(name)
        lengths, firsts, width = self.lengths.tolist(), self.firsts.tolist(), self.width
        if form == "response":
            lengths, firsts, width = self.response_lengths, [0] * len(lengths), self["responses"].shape[-1]
        if values.is_nested:
            rows = list(values.unbind())
        else:
            widths = (width, width - 1) if form == "next_token" else (width,)
            if values.dim() < 2 or values.shape[0] != len(lengths) or values.shape[1] not in widths:
                shapes = " or ".join(f"[{len(lengths)}, {width}, ...]" for width in widths)
                raise DataError(f"Field {name!r} has the shape {tuple(values.shape)}; as {form!r} it must be {shapes}")
            rows = [row[f : f + n] for row, f, n in zip(values, firsts, lengths, strict=True)]
        if form != "response":
            return rows
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                raise DataError(f"Field {name!r}, row {number}: {len(row)} values for a response of {length} tokens")
        prompts = (self.lengths - torch.tensor(lengths)).tolist()
        return [torch.cat([row.new_zeros(p, *row.shape[1:]), row]) for row, p in zip(rows, prompts, strict=True)]

    def write(self, batch: SampleBatch, name: str, form: HostForm) -> Tensor:
        """A field of `batch` in the host's form."""
        values: Tensor = batch[name]
        kind, pad = batch.schema[name].kind, batch.schema[name].pad
        if form == "static" or (form == "sample") != (kind == "sample"):
            raise DataError(f"Field {name!r} of the samples is a {kind} field, which cannot be written as {form!r}")
        if form == "sample":
            return values
        if (kind == "next_token") != (form == "next_token"):
            values = values.roll(1 if kind == "next_token" else -1, 0)
            ends = batch.offsets[:-1] if kind == "next_token" else batch.offsets[1:] - 1
            values[ends.to(values.device)] = pad  # a first token has no prediction, a last one none to make
        rows, firsts, width = list(torch.split(values, batch.lengths.tolist())), self.firsts.tolist(), self.width
        is_jagged = self["input_ids"].is_nested
        if form == "response":
            rows = [row[len(row) - length :] for row, length in zip(rows, self.response_lengths, strict=True)]
            firsts, width, is_jagged = [0] * len(rows), self["responses"].shape[-1], self["responses"].is_nested
        if is_jagged:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        if form == "next_token":
            rows, width = [row[:-1] for row in rows], width - 1
        padded = values.new_full((len(rows), width, *values.shape[1:]), pad)
        for row, (first, row_values) in enumerate(zip(firsts, rows, strict=True)):
            padded[row, first : first + len(row_values)] = row_values
        return padded
