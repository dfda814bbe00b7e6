"""`SampleBatch`: ragged samples as flat values plus lengths, with a schema of their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roll_batching.errors import DataError
from roll_batching.samples import flatten
from roll_batching.samples.fields import FieldSpec, Schema, SchemaLike, check_dtype, normalise_schema
from roll_batching.samples.flatten import MaskPadding, PaddingSide, as_index, place, row_indices, starts_of, take


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Samples of different lengths, without padding. Immutable: every change makes a new batch.

    Ids and lengths are int64 tensors on the host, whatever the device of the fields, so that planning
    needs no device synchronisation. A batch may be empty (a rank without samples).

    Raises `DataError` for lengths or ids that are not one-dimensional integers, a sample without tokens, a repeated id,
    a field whose shape does not fit its kind, a field without a kind, a pad value out of the dtype's range.
    """

    ids: Tensor
    """int64 `[n]`, on the host: one id per sample, unique over all ranks of a job."""

    lengths: Tensor
    """int64 `[n]`, on the host: tokens per sample, at least 1."""

    fields: dict[str, Any]
    """Name to values: `[sum(lengths), ...]` for token and next_token fields, `[n, ...]` for sample fields,
    `[sum(counts), ...]` for rows, anything for static ones. A next_token field of L-1 rows per sample gets its last."""

    schema: Schema
    """Name to `FieldSpec`, for exactly the names in `fields`. A plain kind (`"token"`) is accepted."""

    origin: str | None = None
    """Tag of a batch that a driver sent to all ranks of a replica. Batches with one tag have the same samples, although
    pipeline stages may have only the fields that they read. Batches derived from this one have no tag."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", as_index(self.ids, "ids"))
        object.__setattr__(self, "lengths", as_index(self.lengths, "lengths"))
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "schema", normalise_schema(self.schema))
        if self.ids.numel() != self.lengths.numel():
            raise DataError(f"{self.ids.numel()} ids for {self.lengths.numel()} lengths: give one of each per sample.")
        if (empty := (self.lengths < 1).nonzero().flatten()).numel():
            raise DataError(f"No token in {flatten.name_rows(empty, self.ids)}: a sample has at least one.")
        is_repeated = self._sorted_ids[1:] == self._sorted_ids[:-1]
        if is_repeated.any():
            repeated = self._sorted_ids[1:][is_repeated].unique().tolist()
            raise DataError(f"Ids occur more than once in one batch: {repeated[:8]}. Ids name samples uniquely.")
        flatten.check_field_names(self.fields, self.schema)
        for name, spec in self.schema.items():
            self._check_field(name, spec)

    def _check_field(self, name: str, spec: FieldSpec) -> None:
        if spec.kind == "static":
            return
        values = self.fields[name]
        if not isinstance(values, Tensor):
            raise DataError(f"field {name!r} is a {type(values).__name__}: pass a tensor, e.g. torch.as_tensor(...)")
        check_dtype(name, spec, values.dtype)
        rows = int(self.rows_per_sample(name).sum())
        if spec.kind == "next_token" and values.dim() and len(self) and values.shape[0] == rows - len(self):
            self.fields[name] = flatten.append_pad(values, self.lengths, spec)
            return
        if values.dim() < 1 or values.shape[0] != rows:
            raise DataError(
                f"Field {name!r} is a {spec.kind} field with {rows} rows here, so its shape must be "
                f"[{rows}, ...]; got {tuple(values.shape)}."
            )

    def rows_per_sample(self, name: str) -> Tensor:
        """Rows of the field `name` for each sample, of any kind but static: int64 `[n]`, on the host."""
        spec = self.schema[name]
        if spec.counts is None:
            return self.lengths if spec.per_token else torch.ones_like(self.lengths)
        return flatten.counts_of(name, spec.counts, self.fields, self.schema)

    # ---- constructors

    @classmethod
    def from_padded(
        cls,
        tensors: Mapping[str, Any],
        attention_mask: Tensor,
        schema: SchemaLike,
        ids: Any = None,
        *,
        padding_side: MaskPadding = "right",
    ) -> SampleBatch:
        """Make a batch from padded rectangles.

        Args:
            tensors: by field name: `[B, S, ...]` for token fields, `[B, S, ...]` or `[B, S - 1, ...]` for
                next_token fields (column j belongs to token j + 1), `[B, ...]` for sample fields; of kind rows flat.
            attention_mask: bool or 0/1 `[B, S]`, contiguous in every row.
            schema: name to `FieldSpec` or kind, for exactly the names in `tensors`.
            ids: `[B]` integers; by default 0 to B-1.
            padding_side: the side on which all rows are padded; "both": each row on either side or both.

        Raises:
            DataError: for an all-padding row, a mask with holes, padding on the other side, a wrong width.
        """
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
            raise DataError(f"The attention mask must be a [B, S] tensor; got {shape}.")
        schema = normalise_schema(schema)
        ids = torch.arange(attention_mask.shape[0]) if ids is None else as_index(ids, "ids")
        lengths, fields = flatten.from_padded(tensors, attention_mask, schema, ids, padding_side)
        return cls(ids, lengths, fields, schema)

    @classmethod
    def from_lists(
        cls, columns: Mapping[str, Any], schema: SchemaLike, ids: Any = None, lengths: Any = None
    ) -> SampleBatch:
        """Make a batch from one list (or array, or tensor) per sample and field.

        Args:
            columns: by field name: n sequences of L values for token fields, of L or L-1 for next_token
                fields, n values for sample fields, n sequences for fields of kind rows. Integers become int64,
                floats torch's default dtype; arrays and tensors keep theirs.
            schema: name to `FieldSpec` or kind, for exactly the names in `columns`.
            ids: n integers; by default 0 to n-1.
            lengths: n integers; by default those of the first token field.

        Raises:
            DataError: for rows that do not fit their sample's length, values that are not numbers, empty rows.
        """
        schema = normalise_schema(schema)
        lengths = None if lengths is None else as_index(lengths, "lengths")
        lengths, fields = flatten.from_lists(columns, schema, lengths)
        return cls(torch.arange(lengths.numel()) if ids is None else ids, lengths, fields, schema)

    @classmethod
    def from_tensordict(
        cls,
        source: Mapping[str, Any] | Any,
        schema: SchemaLike,
        ids: Any = None,
        *,
        attention_mask: str = "attention_mask",
        padding_side: MaskPadding = "right",
    ) -> SampleBatch:
        """Make a batch from a TensorDict (or any mapping) of padded tensors, as `from_padded` does.

        Entries outside `schema` are ignored. `attention_mask` is the name of an entry, and `ids` may be one.

        Raises `DataError` for an entry that is missing, and all of `from_padded`.
        """
        present = set(source.keys())
        needed = [*schema, attention_mask, *([ids] if isinstance(ids, str) else [])]
        if missing := [name for name in needed if name not in present]:
            raise DataError(
                f"No entry {', '.join(map(repr, missing))}; present are {', '.join(sorted(map(str, present)))}."
            )
        return cls.from_padded(
            {name: source[name] for name in schema},
            source[attention_mask],
            schema,
            source[ids] if isinstance(ids, str) else ids,
            padding_side=padding_side,
        )

    @classmethod
    def concat(cls, batches: Sequence[SampleBatch]) -> SampleBatch:
        """Join batches with the same schema, in order; static fields must be equal.

        Raises `DataError` for no batch, schemas, dtypes or static values that differ, ids that repeat.
        """
        if not batches:
            raise DataError("Nothing to join: concat needs at least one batch.")
        first = batches[0]
        description = first.describe(static_values=True)
        for number, batch in enumerate(batches[1:], 1):
            if difference := flatten.describe_difference(description, batch.describe(static_values=True), "field "):
                raise DataError(f"Batches 0 (here) and {number} (there) do not fit: {difference}.")
        fields = {
            name: first[name] if spec.kind == "static" else torch.cat([batch[name] for batch in batches])
            for name, spec in first.schema.items()
        }
        ids = torch.cat([batch.ids for batch in batches])
        return cls(ids, torch.cat([batch.lengths for batch in batches]), fields, first.schema)

    # ---- reading

    def __len__(self) -> int:
        return self.lengths.numel()

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise DataError(f"No field {name!r}; this batch has {', '.join(self.fields) or 'none'}.") from None

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {text}" for name, text in self.describe().items())
        return f"SampleBatch({len(self)} samples, {self.num_tokens} tokens; {fields})"

    @cached_property
    def offsets(self) -> Tensor:
        """int64 `[n + 1]`, on the host: start of each sample in token fields; the last is their length."""
        return starts_of(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.offsets[-1])

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample; 0 for an empty batch."""
        return int(self.lengths.max()) if len(self) else 0

    @property
    def device(self) -> torch.device:
        """Device of the fields (of the first tensor; the host without any)."""
        tensors = (x for name, x in self.fields.items() if isinstance(x, Tensor) and name not in self._counts)
        return next((x.device for x in tensors), torch.device("cpu"))

    @cached_property
    def _counts(self) -> set[str | None]:
        return {spec.counts for spec in self.schema.values()}

    @cached_property
    def _id_order(self) -> Tensor:
        return torch.argsort(self.ids, stable=True)

    @cached_property
    def _sorted_ids(self) -> Tensor:
        return self.ids[self._id_order]

    def rows_of(self, ids: Any) -> Tensor:
        """Rows of the samples `ids`, in that order: int64, on the host.

        Raises `DataError` with the ids that this batch does not hold.
        """
        ids = as_index(ids, "ids")
        rows, is_present = self.find(ids)
        if not is_present.all():
            raise DataError(f"This batch of {len(self)} samples does not hold ids {ids[~is_present].tolist()[:8]}.")
        return rows

    def find(self, ids: Any) -> tuple[Tensor, Tensor]:
        """(rows, is_present) of `ids`: int64 rows, undefined for absent ids, and bool; both on the host."""
        ids = as_index(ids, "ids")
        if not len(self):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        position = torch.searchsorted(self._sorted_ids, ids).clamp_(max=len(self) - 1)
        return self._id_order[position], self._sorted_ids[position] == ids

    def describe(self, *, static_values: bool = False) -> dict[str, str]:
        """Kind, pad, dtype and shape of one value of every field, as text. Equal for batches that can be joined.

        With `static_values` also the static values (tensors as a digest of their bytes).
        """
        return flatten.describe_fields(self.schema, self.fields, static_values=static_values)

    def to_lists(self, name: str) -> list[Tensor]:
        """One view per sample: `[rows, ...]`, or `[...]` of a sample field."""
        values = self[name]
        spec = self.schema[name]
        if spec.kind == "static":
            raise DataError(f"Field {name!r} is static: it has no values per sample.")
        return list(values.unbind(0) if spec.kind == "sample" else values.split(self.rows_per_sample(name).tolist()))

    def to_padded(self, name: str, length: int | None = None, *, padding_side: PaddingSide = "right") -> Tensor:
        """A token or next_token field as `[n, length, ...]`, filled with the field's pad value.

        Args:
            name: the field.
            length: the width; by default the longest sample's length.
            padding_side: the side of the padding.

        Raises:
            DataError: for another kind of field, or a sample longer than `length`.
        """
        values = self[name]
        spec = self.schema[name]
        if not spec.per_token:
            raise DataError(f"Field {name!r} is a {spec.kind} field: only fields per token are padded.")
        width = self._width(length)
        rows = place(values, self._padded_index(width, padding_side), len(self) * width, spec.pad)
        return rows.view(len(self), width, *values.shape[1:])

    def padded_mask(self, length: int | None = None, *, padding_side: PaddingSide = "right") -> Tensor:
        """The attention mask that belongs to `to_padded`: bool `[n, length]`, on the host."""
        width = self._width(length)
        ones = torch.ones(self.num_tokens, dtype=torch.bool)
        return place(ones, self._padded_index(width, padding_side), len(self) * width, False).view(-1, width)

    def _width(self, length: int | None) -> int:
        if length is not None and (long := (self.lengths > length).nonzero().flatten()).numel():
            raise DataError(f"{flatten.name_rows(long, self.ids)} do not fit a width of {length}: pass None.")
        return self.max_length if length is None else length

    def _padded_index(self, width: int, side: PaddingSide) -> Tensor:
        if side not in ("right", "left"):
            raise DataError(f'padding_side is "right" or "left"; got {side!r}.')
        starts = torch.arange(len(self)) * width
        return row_indices(starts if side == "right" else starts + width - self.lengths, self.lengths)

    def require_finite(self, names: Iterable[str] | str | None = None) -> None:
        """Raises for NaN and infinities in the fields `names` (by default all floating-point fields).

        A sample's last row of a next_token field belongs to no token and is not checked. Costs one device
        synchronisation per field.

        Raises `DataError` with field, samples and, for fields per token, the first position.
        """
        if names is None:
            names = [n for n, v in self.fields.items() if isinstance(v, Tensor) and v.is_floating_point()]
        for name in [names] if isinstance(names, str) else names:
            values, spec = self[name], self.schema[name]
            flatten.require_finite(
                name, values, spec, self.ids, None if spec.kind == "static" else self.rows_per_sample(name)
            )

    # ---- derived batches

    def select(self, index: Any, ids: Any = None) -> SampleBatch:
        """The samples at rows `index`, in that order. Rows may repeat if new `ids` are given.

        Raises `DataError` for rows outside the batch, or rows repeated without new ids.
        """
        rows = as_index(index, "row indices")
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise DataError(
                f"Row indices run from {int(rows.min())} to {int(rows.max())}, the batch has {len(self)} rows: rows "
                "count from 0."
            )
        tokens = row_indices(self.offsets[:-1][rows], self.lengths[rows])
        fields = dict(self.fields)
        for name, spec in self.schema.items():
            if spec.kind == "rows":
                counts = self.rows_per_sample(name)
                fields[name] = take(fields[name], row_indices(starts_of(counts)[:-1][rows], counts[rows]))
            elif spec.kind != "static":
                fields[name] = take(fields[name], tokens if spec.per_token else rows)
        return SampleBatch(self.ids[rows] if ids is None else ids, self.lengths[rows], fields, self.schema)

    def select_ids(self, ids: Any) -> SampleBatch:
        """The samples with these ids, in that order.

        Raises `DataError` with the ids that this batch does not hold.
        """
        return self.select(self.rows_of(ids))

    def with_ids(self, ids: Any) -> SampleBatch:
        """The same samples under other ids."""
        return SampleBatch(as_index(ids, "ids"), self.lengths, self.fields, self.schema)

    def with_fields(self, fields: Mapping[str, Any], schema: SchemaLike) -> SampleBatch:
        """This batch with `fields` (flat, as stored) added or replaced; `schema` has the kind of each."""
        added = normalise_schema(schema)
        flatten.check_field_names(fields, added)
        return SampleBatch(self.ids, self.lengths, {**self.fields, **fields}, {**self.schema, **added})

    def without(self, names: Iterable[str] | str) -> SampleBatch:
        """This batch without the fields `names`.

        Raises `DataError` for an unknown name.
        """
        removed = {names} if isinstance(names, str) else set(names)
        if unknown := sorted(removed - self.fields.keys()):
            raise DataError(f"No field {', '.join(map(repr, unknown))}; this batch has {', '.join(self.fields)}.")
        return self.only(name for name in self.fields if name not in removed)

    def only(self, names: Iterable[str]) -> SampleBatch:
        """This batch with only the fields `names`, in that order."""
        names = list(names)
        return SampleBatch(self.ids, self.lengths, {n: self[n] for n in names}, {n: self.schema[n] for n in names})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampleBatch:
        """This batch with its tensors on `device`; ids, lengths and counts of rows stay on the host."""
        moved = {name: x for name, x in self.fields.items() if isinstance(x, Tensor) and name not in self._counts}
        fields = self.fields | {name: x.to(device, non_blocking=non_blocking) for name, x in moved.items()}
        return SampleBatch(self.ids, self.lengths, fields, self.schema)
