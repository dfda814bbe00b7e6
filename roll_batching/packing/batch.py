"""From a plan and this rank's samples to packed tensors, and from packed results back to samples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.packing.attention_backend import AttentionBackend, attention_backend
from roll_batching.packing.layout import IntArray, PackLayout
from roll_batching.packing.params import PackedParams, packed_params
from roll_batching.packing.prefetch import ahead, to_cuda
from roll_batching.planning import MicroBatch, Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_masks import mask_of


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch as the model takes it, and its fields as a loss sees them.

    Convention: row i is a prediction. `token` fields are shifted (row i shows token i + 1) and
    `next_token` fields are as they were; rows that predict nothing read the field's pad value.
    """

    layout: PackLayout
    params: PackedParams
    input_ids: torch.Tensor
    """[1, tokens / cp] int64, this context-parallel rank's rows. Behind a pipeline's first stage nobody reads them, and
    they are numbers of no meaning."""
    padding_mask: torch.Tensor
    """[1, tokens / cp] bool, True where a row is slot padding or filler (for MoE routing)."""
    # What follows is for losses: before a pipeline's last stage it is empty.
    labels: torch.Tensor
    """[tokens / cp] int64, the token after each local row; 0 where there is none."""
    head_rows: torch.Tensor
    """Local rows whose log-prob is wanted: they predict, and at least one mask counts them."""
    segment_ids: torch.Tensor
    """[tokens] int64 in pack order; `samples` and above are filler."""
    predicts: torch.Tensor
    """[tokens] bool in pack order."""
    masks: dict[str, torch.Tensor]
    """[tokens] bool in pack order, false where nothing is predicted."""
    fields: dict[str, Any]
    """Token and next_token fields [tokens, ...] in pack order, sample fields [samples, ...], static ones as is."""
    kinds: dict[str, str]
    """Kind of each field: token, next_token, sample or static."""
    ids: IntArray
    """[samples] global ids, in pack order."""

    @property
    def samples(self) -> int:
        """Number of samples; 0 for a filler."""
        return self.layout.samples


def _check_fields(local: SampleBatch, masks: Sequence[str]) -> None:
    if "input_ids" not in local.schema or local.schema["input_ids"].kind != "token":
        raise DataError("a batch to be packed needs a field input_ids of kind token")
    if (dtype := local["input_ids"].dtype).is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise DataError(f"input_ids are the numbers of tokens, so they must be integers; the batch has {dtype}")
    for name in masks:
        if name not in local.schema or not local.schema[name].per_token:
            known = [field for field, spec in local.schema.items() if spec.per_token]
            raise DataError(
                f"the loss declares the mask {name!r}, which is not a token or next_token field of the batch; it has "
                f"{', '.join(known)}"
            )


def _check_samples(local: SampleBatch, plan: Plan, micro_batches: Iterable[MicroBatch]) -> None:
    for mb in micro_batches:
        if mb.is_filler:
            continue
        ids = plan.ids[mb.samples]
        rows, found = local.find(ids)
        if not bool(found.all()):
            missing = ids[~found.numpy()][:8].tolist()
            raise DataError(
                f"the plan gives this rank samples {missing}, which its local batch of {len(local)} does not hold: "
                "call distribute(batch, plan) first, and pass what it returns"
            )
        have, planned = local.lengths[rows].numpy(), plan.lengths[mb.samples]
        if (have != planned).any():
            at = int(np.flatnonzero(have != planned)[0])
            raise DataError(
                f"sample {ids[at]} has {have[at]} tokens in the local batch and {planned[at]} in the plan: plan again "
                "from the lengths of the batch that is trained on"
            )


class StepPacks:
    """The packs of one rank's step: checked at once, made one by one as they are asked for.

    What can be wrong with samples and plan is found here, and the first pack is made, so that what comes later has
    nothing left to find; on CUDA a thread makes each pack while the one before it is computed (`packing.prefetch`).

    Args:
        local: this rank's samples, with a `token` field `input_ids`; as `distribute` returns it.
        plan: the plan of this step.
        dp_rank, cp_rank: this rank's coordinates.
        device: where the packed tensors go.
        masks: names of the fields that say which rows count; None counts every row that predicts.
        tokens: fill every pack up to this many tokens; None keeps the plan's.
        attention: what the model's layers were built with; see `packed_params`.
        is_first_stage: whether this rank's model reads `input_ids`: the first stage of a pipeline.
        is_last_stage: whether this rank's model ends in logits: the last stage of a pipeline.

    Raises:
        DataError: when local samples and plan disagree, or a field is missing or has the wrong kind.
    """

    def __init__(
        self,
        local: SampleBatch,
        plan: Plan,
        *,
        dp_rank: int,
        cp_rank: int = 0,
        device: torch.device,
        masks: Sequence[str] | None = None,
        tokens: int | None = None,
        attention: AttentionBackend | str | None = "auto",
        is_first_stage: bool = True,
        is_last_stage: bool = True,
    ) -> None:
        names = () if masks is None else tuple(masks)
        if is_last_stage or local.origin is None:
            _check_fields(local, names)
        self._micro_batches = plan.micro_batches[dp_rank]
        _check_samples(local, plan, self._micro_batches)
        self.layouts = [PackLayout.of(mb, plan.constraints.cp_size, tokens) for mb in self._micro_batches]
        """Of every pack, known before it is made."""
        self._local, self._plan, self._cp_rank, self._device = local, plan, cp_rank, device
        self._masks = {name: mask_of(local, name) for name in names} if is_last_stage else {}
        self._every_row, self._is_first_stage, self._is_last_stage = masks is None, is_first_stage, is_last_stage
        self._backend = None if attention is None else attention_backend(attention, device.type)
        on_host = all(x.device.type == "cpu" for x in local.fields.values() if isinstance(x, torch.Tensor))
        self._made_on = torch.device("cpu") if on_host else device
        self._timed: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda wait: wait
        self._first: PackedBatch | None = self._make(0) if self.layouts else None

    def timed_by(self, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """`timed` wraps what passes wait for: the making of a pack, or what a thread has left to do of it."""
        self._timed = timed

    def __len__(self) -> int:
        return len(self.layouts)

    def __iter__(self) -> Iterator[PackedBatch]:
        static = {name: self._local.fields[name] for name, spec in self._local.schema.items() if spec.kind == "static"}
        move = None if self._made_on == self._device else functools.partial(to_cuda, device=self._device)
        coming = ahead(self._take, len(self), move)
        following = self._timed(functools.partial(next, coming, None))
        with contextlib.closing(coming):
            while (pack := following()) is not None:
                if self._is_last_stage:
                    pack.fields.update(static)  # as they are, wherever they lie
                yield pack

    def _take(self, number: int) -> PackedBatch:
        if number or self._first is None:
            return self._make(number)
        first, self._first = self._first, None  # nobody holds a pack for longer than it is used
        return first

    def _make(self, number: int) -> PackedBatch:
        """The pack on the device where its fields lie; the schedule's device is `ahead`'s work."""
        local, layout, device = self._local, self.layouts[number], self._made_on
        ids = self._plan.ids[self._micro_batches[number].samples]
        sample_rows = local.rows_of(ids)
        source = torch.from_numpy(layout.source(local.offsets[sample_rows].numpy()))
        real = torch.from_numpy(layout.real)
        mine = torch.from_numpy(layout.rows(self._cp_rank))
        whole = layout.cp_size == 1
        params = packed_params(layout, self._cp_rank, device, attention=self._backend)
        tokens = params.positions
        if self._is_first_stage or self._is_last_stage:
            pad = local.schema["input_ids"].pad
            tokens = _gathered(local.fields["input_ids"], source, real, pad, device).long()
        seen = _LossInputs.nothing(device)
        if self._is_last_stage:
            seen = self._seen(layout, sample_rows, source, tokens, mine)
        held = tokens if whole or not (self._is_first_stage or self._is_last_stage) else tokens[mine.to(device)]
        return PackedBatch(
            layout=layout,
            params=params,
            input_ids=held[None],
            padding_mask=(~real if whole else (~real)[mine]).to(device)[None],
            kinds={name: spec.kind for name, spec in local.schema.items()},
            ids=np.asarray(ids),
            **vars(seen),
        )

    def _seen(
        self,
        layout: PackLayout,
        sample_rows: torch.Tensor,
        source: torch.Tensor,
        tokens: torch.Tensor,
        mine: torch.Tensor,
    ) -> _LossInputs:
        local, device, whole = self._local, self._made_on, layout.cp_size == 1
        predicts = torch.from_numpy(layout.predicts)
        index = {"token": torch.where(predicts, source + 1, 0), "next_token": source}
        fields: dict[str, Any] = {}
        for name, spec in local.schema.items():
            values = local.fields[name]
            if spec.per_token:
                fields[name] = _gathered(values, index[spec.kind], predicts, spec.pad, device)
            elif spec.kind == "sample":
                fields[name] = values.index_select(0, sample_rows.to(values.device)).to(device)
        masks, counted = {}, predicts if self._every_row else torch.zeros_like(predicts)
        for name, mask in self._masks.items():
            seen = _gathered(mask, index[local.schema[name].kind], predicts, False, mask.device)
            counted = counted | seen
            masks[name] = seen.to(device)
        # A label of a row without a mask is never read; the shifted input_ids are the labels.
        labels = fields["input_ids"].long().masked_fill(~predicts.to(device), 0)
        fields["input_ids"] = tokens
        return _LossInputs(
            labels=labels if whole else labels[mine.to(device)],
            head_rows=(counted if whole else counted[mine]).nonzero()[:, 0].to(device),
            segment_ids=torch.from_numpy(layout.segment_ids).to(device),
            predicts=predicts.to(device),
            masks=masks,
            fields=fields,
        )


@dataclass(kw_only=True)
class _LossInputs:
    """The part of a `PackedBatch` that losses see."""

    labels: torch.Tensor
    head_rows: torch.Tensor
    segment_ids: torch.Tensor
    predicts: torch.Tensor
    masks: dict[str, torch.Tensor]
    fields: dict[str, Any]

    @classmethod
    def nothing(cls, device: torch.device) -> _LossInputs:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(labels=none, head_rows=none, segment_ids=none, predicts=none.bool(), masks={}, fields={})


def _gathered(
    values: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, pad: Any, device: torch.device
) -> torch.Tensor:
    """`values` at `index` [n], and `pad` where not `valid` [n], on `device`."""
    if not len(values):  # a rank without samples
        return torch.full((len(index), *values.shape[1:]), pad, dtype=values.dtype, device=device)
    picked = values.index_select(0, index.to(values.device)).to(device)
    gap = (~valid).to(device)
    # Not `where`, which makes integers of a bool field whose pad is the number 0.
    return picked.masked_fill_(gap.view(-1, *[1] * (picked.dim() - 1)), pad)


def pack_step(local: SampleBatch, plan: Plan, **where: Any) -> list[PackedBatch]:
    """All micro-batches of a rank at once, in the plan's order: the list of `StepPacks(local, plan, **where)`."""
    return list(StepPacks(local, plan, **where))


def unpack_results(
    local: SampleBatch, plan: Plan, layouts: Sequence[PackLayout], results: Sequence[torch.Tensor], *, dp_rank: int = 0
) -> torch.Tensor:
    """Per-row results [tokens, ...] of each pack -> one flat next_token field [sum(lengths), ...] of `local`.

    `layouts` are those of the packs. Rows that no pack holds (samples that the plan dropped, tokens it truncated) and
    each sample's last row, which predicts nothing, read 0.
    """
    like = results[0]
    flat = torch.zeros(local.num_tokens, *like.shape[1:], dtype=like.dtype, device=like.device)
    for mb, layout, values in zip(plan.micro_batches[dp_rank], layouts, results, strict=True):
        rows = np.flatnonzero(layout.predicts)
        source = layout.source(local.offsets[local.rows_of(plan.ids[mb.samples])].numpy())[rows]
        at, to = (torch.from_numpy(index).to(like.device) for index in (rows, source))
        flat[to] = values[at].to(flat.dtype)
    return flat
