"""From a plan and this rank's samples to packed tensors, and from packed results back to samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.data import SampleBatch
from roll_batching.errors import DataError
from roll_batching.packing.attention_backend import AttentionBackend, attention_backend
from roll_batching.packing.layout import IntArray, PackLayout
from roll_batching.packing.params import PackedParams, packed_params
from roll_batching.planning import MicroBatch, Plan


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch as the model takes it, and its fields as a loss sees them.

    Convention: row i is a prediction. `token` fields are shifted (row i shows token i + 1) and
    `next_token` fields are as they were; rows that predict nothing read the field's pad value.
    """

    layout: PackLayout
    params: PackedParams
    input_ids: torch.Tensor
    """[1, tokens / cp] int64, this context-parallel rank's rows."""
    padding_mask: torch.Tensor
    """[1, tokens / cp] bool, True where a row is slot padding or filler (for MoE routing)."""
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
    source: torch.Tensor
    """[tokens] row of each token in the flat local batch; meaningless where not real."""

    @property
    def samples(self) -> int:
        """Number of samples; 0 for a filler."""
        return self.layout.samples


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


def pack_step(
    local: SampleBatch,
    plan: Plan,
    *,
    dp_rank: int,
    cp_rank: int = 0,
    device: torch.device,
    masks: Sequence[str] | None = None,
    tokens: int | None = None,
    attention: AttentionBackend | str | None = "auto",
) -> list[PackedBatch]:
    """All micro-batches of `dp_rank`, packed in the plan's order.

    Args:
        local: this rank's samples, with a `token` field `input_ids`; as `distribute` returns it.
        plan: the plan of this step.
        dp_rank, cp_rank: this rank's coordinates.
        device: where the packed tensors go.
        masks: names of the fields that say which rows count; None counts every row that predicts.
        tokens: fill every pack up to this many tokens; None keeps the plan's.
        attention: what the model's layers were built with; see `packed_params`.

    Raises:
        DataError: when local samples and plan disagree, or a field is missing or has the wrong kind.
    """
    names = () if masks is None else tuple(masks)
    if "input_ids" not in local.schema or local.schema["input_ids"].kind != "token":
        raise DataError("a batch to be packed needs a field input_ids of kind token")
    if (dtype := local["input_ids"].dtype).is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise DataError(f"input_ids are the numbers of tokens, so they must be integers; the batch has {dtype}")
    for name in names:
        if name not in local.schema or not local.schema[name].per_token:
            known = [field for field, spec in local.schema.items() if spec.per_token]
            raise DataError(
                f"the loss declares the mask {name!r}, which is not a token or next_token field of the batch; it has "
                f"{', '.join(known)}"
            )
    micro_batches = plan.micro_batches[dp_rank]
    _check_samples(local, plan, micro_batches)
    host_masks = {name: local.fields[name].cpu() != 0 for name in names}
    backend = None if attention is None else attention_backend(attention, device.type)
    layouts = [PackLayout.of(mb, plan.constraints.cp_size, tokens) for mb in micro_batches]
    return [
        _pack(local, plan, mb, layout, cp_rank, device, host_masks, masks is None, backend)
        for mb, layout in zip(micro_batches, layouts, strict=True)
    ]


def _pack(
    local: SampleBatch,
    plan: Plan,
    mb: MicroBatch,
    layout: PackLayout,
    cp_rank: int,
    device: torch.device,
    host_masks: dict[str, torch.Tensor],
    every_row: bool,
    backend: AttentionBackend | None,
) -> PackedBatch:
    ids = plan.ids[mb.samples]
    sample_rows = local.rows_of(ids)
    source = torch.from_numpy(layout.source(local.offsets[sample_rows].numpy()))
    real, predicts = torch.from_numpy(layout.real), torch.from_numpy(layout.predicts)
    following = torch.where(predicts, source + 1, 0)

    def gather(values: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, pad: Any) -> torch.Tensor:
        if not len(values):  # a rank without samples
            return torch.full((len(index), *values.shape[1:]), pad, dtype=values.dtype, device=device)
        picked = values.index_select(0, index.to(values.device)).to(device, non_blocking=True)
        gap = (~valid).to(device, non_blocking=True)
        # Not `where`, which makes integers of a bool field whose pad is the number 0.
        return picked.masked_fill_(gap.view(-1, *[1] * (picked.dim() - 1)), pad)

    def in_view(name: str, values: torch.Tensor, pad: Any) -> torch.Tensor:
        return gather(values, following if local.schema[name].kind == "token" else source, predicts, pad)

    fields: dict[str, Any] = {}
    for name, spec in local.schema.items():
        values = local.fields[name]
        if spec.per_token:
            fields[name] = in_view(name, values, spec.pad)
        elif spec.kind == "sample":
            fields[name] = values.index_select(0, sample_rows.to(values.device)).to(device, non_blocking=True)
        else:
            fields[name] = values
    mine = torch.from_numpy(layout.rows(cp_rank))
    tokens = gather(local.fields["input_ids"], source, real, local.schema["input_ids"].pad).long()
    # A label of a row without a mask is never read; the shifted input_ids are the labels.
    masks = {name: in_view(name, mask, False) for name, mask in host_masks.items()}
    counted = predicts.clone() if every_row else torch.zeros_like(predicts)
    for name, mask in host_masks.items():
        if len(mask):
            index = following if local.schema[name].kind == "token" else source
            counted |= mask.index_select(0, index) & predicts
    on_device = mine.to(device)
    labels = torch.where(predicts.to(device), fields["input_ids"].long(), 0)
    fields["input_ids"] = tokens
    return PackedBatch(
        layout=layout,
        params=packed_params(layout, cp_rank, device, attention=backend),
        input_ids=tokens[on_device][None],
        padding_mask=(~real)[mine].to(device)[None],
        labels=labels[on_device],
        head_rows=counted[mine].nonzero()[:, 0].to(device, non_blocking=True),
        segment_ids=torch.from_numpy(layout.segment_ids).to(device, non_blocking=True),
        predicts=predicts.to(device, non_blocking=True),
        masks=masks,
        fields=fields,
        kinds={name: spec.kind for name, spec in local.schema.items()},
        ids=np.asarray(ids),
        source=source.to(device, non_blocking=True),
    )


def unpack_results(local: SampleBatch, packs: Sequence[PackedBatch], results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Per-row results [tokens, ...] of each pack -> one flat next_token field [sum(lengths), ...] of `local`.

    Rows that no pack holds (samples that the plan dropped, tokens it truncated) and each sample's
    last row, which predicts nothing, read 0.
    """
    like = results[0]
    flat = torch.zeros(local.num_tokens, *like.shape[1:], dtype=like.dtype, device=like.device)
    for pack, values in zip(packs, results, strict=True):
        rows = torch.from_numpy(np.flatnonzero(pack.layout.predicts)).to(like.device)
        flat[pack.source[rows]] = values[rows].to(flat.dtype)
    return flat
