"""Pack the samples of a rank by a plan, and unpack results to samples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.packing.attention_backend import AttentionBackend, attention_backend
from roll_batching.packing.pack_layout import IntArray, PackLayout
from roll_batching.packing.params import PackedParams, RecurrentPacks, packed_params, slice_params
from roll_batching.packing.prefetch import copy_to_cuda, prefetch
from roll_batching.planning import MicroBatch, Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import ROUTED_EXPERTS
from roll_batching.samples.token_fields import inputs_of, mask_of, require_field


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch: inputs of the model, and fields for losses.

    Convention of fields: entry i is about the prediction of token i + 1. So `token` fields are shifted by one, and
    `next_token` fields are not; entries without a prediction have the pad value of the field.
    """

    layout: PackLayout
    params: PackedParams
    input_ids: torch.Tensor
    """[1, tokens / cp] int64, tokens of this context-parallel rank. Between the first and the last pipeline stage they
    are not read, and their values are meaningless."""
    padding_mask: torch.Tensor
    """[1, tokens / cp] bool, True for slot padding and filler, for MoE routing."""
    # The following tensors are for losses: they are empty before the last pipeline stage.
    labels: torch.Tensor
    """[tokens / cp] int64, the token after each local token; 0 where there is none."""
    head_tokens: torch.Tensor
    """int64, local tokens whose log-prob is needed: they predict, and at least one mask is set."""
    computed_tokens: torch.Tensor | None
    """[unshared] int64, index in the pack of each token of `layout.unshared`; None without shared prefixes, where both
    are the same. The following tensors are of `layout.unshared`, whose tokens are meant by [tokens]."""
    segment_ids: torch.Tensor
    """[tokens] int64, segment of each token; `samples` and above are filler."""
    predicts: torch.Tensor
    """[tokens] bool, whether a token has a label."""
    masks: dict[str, torch.Tensor]
    """[tokens] bool by name, False for tokens without a label."""
    fields: dict[str, Any]
    """Token and next_token fields [tokens, ...] in pack order, sample fields [samples, ...], static ones unchanged."""
    kinds: dict[str, str]
    """Kind of each field: token, next_token, sample or static."""
    ids: IntArray
    """[samples] global ids, in pack order."""
    slices: tuple[PackedParams, ...] = ()
    """Params of the slices that it is cut into, in place of `params` for the model; empty: computed as a whole."""
    routed_experts: torch.Tensor | None = None
    """[tokens that this rank routes, layers of this stage with experts, top-k]; -1: the router chooses. None: always"""

    @property
    def samples(self) -> int:
        """Number of samples; 0 for a filler."""
        return self.layout.samples


def _check_fields(local: SampleBatch, masks: Sequence[str]) -> None:
    require_field(local, "input_ids", "packing", "token")
    if (dtype := local["input_ids"].dtype).is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise DataError(f"input_ids must be integers, the ids of tokens; the batch has {dtype}")
    for name in masks:
        require_field(local, name, "the loss's `masks`", "token", "next_token")


def _check_samples(local: SampleBatch, plan: Plan, micro_batches: Iterable[MicroBatch]) -> None:
    for mb in micro_batches:
        if mb.is_filler:
            continue
        ids = plan.ids[mb.samples]
        indices, is_present = local.find(ids)
        if not bool(is_present.all()):
            missing = ids[~is_present.numpy()][:8].tolist()
            raise DataError(
                f"the plan gives this rank samples {missing}, which its local batch of {len(local)} does not hold: "
                "pass the result of distribute(batch, plan)"
            )
        actual, planned = local.lengths[indices].numpy(), plan.lengths[mb.samples]
        if (actual != planned).any():
            first = int(np.flatnonzero(actual != planned)[0])
            raise DataError(
                f"sample {ids[first]} has {actual[first]} tokens in the local batch and {planned[first]} in the plan: "
                "plan again from the lengths of this batch"
            )


class StepPacks:
    """Packs of one step on one rank, made one after the other during iteration.

    Construction checks samples and plan and makes the first pack, so that errors are raised before the schedule starts.
    On CUDA a thread makes each pack while the previous one is computed (`packing.prefetch`).

    Args:
        local: samples of this rank, from `distribute`, with a `token` field `input_ids`.
        plan: the plan of this step.
        dp_rank: data-parallel rank.
        cp_rank: context-parallel rank; with a context-parallel size per pack it follows from the plan.
        device: device of the packed tensors.
        masks: names of mask fields; None: all tokens with a label count.
        attention: backend of the model's layers; see `packed_params`.
        rotation_cp: for a model adopted by `adopt_model`; see `packed_params`.
        recurrent: for a model with recurrent layers; see `packed_params`.
        is_first_stage: whether this rank reads `input_ids`, as the first pipeline stage.
        is_last_stage: whether this rank computes logits, as the last pipeline stage.
        routed_experts: experts to replay, [tokens of `local`, layers of this stage with experts, top-k].
        token_part: (number, count): routers of this rank see this part of its tokens, under sequence parallelism.
        heads: number of heads of multi-token prediction; the first of `masks` says which tokens they learn.
        images: `packing.extra_inputs.BatchImages` of `local`, for a model with a vision encoder.

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
        attention: AttentionBackend | str | None = "auto",
        rotation_cp: tuple[int, int] | None = None,
        recurrent: RecurrentPacks | None = None,
        is_first_stage: bool = True,
        is_last_stage: bool = True,
        routed_experts: torch.Tensor | None = None,
        token_part: tuple[int, int] = (0, 1),
        heads: int = 0,
        images: Any = None,
    ) -> None:
        names = () if masks is None else tuple(masks)
        if is_last_stage or local.origin is None:
            _check_fields(local, names)
        self._micro_batches = plan.micro_batches[dp_rank]
        _check_samples(local, plan, self._micro_batches)
        self.layouts = [PackLayout.of(mb, mb.cp_size) for mb in self._micro_batches]
        """Layout of each pack, known before the pack is made."""
        self._local, self._inputs, self._plan, self._device = local, inputs_of(local), plan, device
        self._cp_ranks = [cp_rank if plan.blocks is None else dp_rank - mb.ranks.start for mb in self._micro_batches]
        self._context_groups: Mapping[int, Any] | None = None
        self._masks = {name: mask_of(local, name) for name in names} if is_last_stage else {}
        self._count_all, self._is_first_stage, self._is_last_stage = masks is None, is_first_stage, is_last_stage
        self._backend = None if attention is None else attention_backend(attention, device.type)
        self._rotation_cp, self._recurrent = rotation_cp, recurrent
        self._heads, self._images = heads, images
        self.routed_experts, self._token_part = routed_experts, token_part
        on_host = all(x.device.type == "cpu" for x in local.fields.values() if isinstance(x, torch.Tensor))
        self._packing_device = torch.device("cpu") if on_host else device
        self._timer: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda wait: wait
        self._first: PackedBatch | None = self._make(0) if self.layouts else None

    def set_timer(self, timer: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Measures how long passes wait for packs: `timer` wraps the function that returns the next pack."""
        self._timer = timer

    def set_context_groups(self, groups: Mapping[int, Any]) -> None:
        """Set the process group of each context-parallel size above 1 that the packs have (`context_groups`)."""
        self._context_groups = groups

    def __len__(self) -> int:
        return len(self.layouts)

    def __iter__(self) -> Iterator[PackedBatch]:
        static = {}  # for losses: unchanged, on whatever device they are
        if self._is_last_stage:
            schema = self._local.schema
            static = {name: self._local.fields[name] for name, spec in schema.items() if spec.kind == "static"}
        move = None if self._packing_device == self._device else functools.partial(copy_to_cuda, device=self._device)
        packs = prefetch(self._take, len(self), move)
        next_pack = self._timer(functools.partial(next, packs, None))
        with contextlib.closing(packs):
            while (pack := next_pack()) is not None:
                if self._context_groups is not None:
                    pack.params.set_context_group(self._context_groups.get(pack.layout.cp_size))
                pack.fields.update(static)
                yield pack

    def _take(self, number: int) -> PackedBatch:
        if number or self._first is None:
            return self._make(number)
        first, self._first = self._first, None  # frees the pack after its use
        return first

    def _make(self, number: int) -> PackedBatch:
        """Pack `number`, on the device of its fields; `prefetch` copies it to the device of the schedule."""
        inputs, pack_layout, device = self._inputs, self.layouts[number], self._packing_device
        ids = self._plan.ids[self._micro_batches[number].samples]
        sample_indices = inputs.rows_of(ids)
        source = torch.from_numpy(pack_layout.source(inputs.offsets[sample_indices].numpy()))
        real = torch.from_numpy(pack_layout.real)
        cp_rank = self._cp_ranks[number]
        local_tokens = torch.from_numpy(pack_layout.local_tokens(cp_rank))
        has_all_tokens = pack_layout.cp_size == 1
        params = packed_params(
            pack_layout, cp_rank, device,
            attention=self._backend, rotation_cp=self._rotation_cp, recurrent=self._recurrent,
        )  # fmt: skip
        if self._images is not None:
            params.axes, params.images = self._images.inputs(source, real, local_tokens, device)
        reads_tokens = self._is_first_stage or self._is_last_stage
        if reads_tokens:
            pad = inputs.schema["input_ids"].pad
            input_ids = _gather_tokens(inputs["input_ids"], source, real, pad, device).long()
            local_ids = input_ids if has_all_tokens else input_ids[local_tokens.to(device)]
        else:
            input_ids = local_ids = params.positions  # placeholder of the right shape
        loss_inputs = _LossInputs.empty(device)
        if self._is_last_stage:
            loss_inputs = self._make_loss_inputs(pack_layout, sample_indices, source, input_ids, local_tokens)
            if self._heads:
                from roll_batching.packing.extra_inputs import shift_tokens  # few models have heads

                counted = next(iter(loss_inputs.masks.values()), loss_inputs.predicts)
                params.mtp_inputs = shift_tokens(pack_layout, self._heads, input_ids, counted, local_tokens)
        routed_experts = None
        if self.routed_experts is not None:  # those of the tokens that this rank routes; -1 for padding
            part, parts = self._token_part
            tokens = local_tokens.chunk(parts)[part]
            routed_experts = _gather_tokens(self.routed_experts, source[tokens], real[tokens], -1, device)
        return PackedBatch(
            layout=pack_layout,
            params=params,
            input_ids=local_ids[None],
            padding_mask=(~real if has_all_tokens else (~real)[local_tokens]).to(device)[None],
            kinds={name: spec.kind for name, spec in self._local.schema.items()},
            ids=np.asarray(ids),
            slices=self._slices(params, pack_layout),
            routed_experts=routed_experts,
            **vars(loss_inputs),
        )

    def _slices(self, params: PackedParams, pack_layout: PackLayout) -> tuple[PackedParams, ...]:
        if self._plan.slices is None:
            return ()
        assert self._backend is not None  # `slice_obstacle` refuses models without one
        return tuple(slice_params(params, part, self._packing_device, self._backend) for part in pack_layout.slices)

    def _make_loss_inputs(
        self,
        pack_layout: PackLayout,
        sample_indices: torch.Tensor,
        source: torch.Tensor,
        input_ids: torch.Tensor,
        local_tokens: torch.Tensor,
    ) -> _LossInputs:
        """Labels, masks and fields of a pack, each shifted to the position that predicts its token."""
        local, device, has_all_tokens = self._local, self._packing_device, pack_layout.cp_size == 1
        labelled = torch.from_numpy(pack_layout.predicts)
        labels = _gather_tokens(local.fields["input_ids"], torch.where(labelled, source + 1, 0), labelled, 0, device)
        unshared, computed = pack_layout.unshared, None
        if unshared is not pack_layout:
            computed = torch.from_numpy(pack_layout.computed_tokens)
            source = torch.from_numpy(unshared.source(local.offsets[sample_indices].numpy()))
            input_ids = input_ids[computed.to(device)]
        predicts = torch.from_numpy(unshared.predicts)
        index = {"token": torch.where(predicts, source + 1, 0), "next_token": source}
        fields: dict[str, Any] = {}
        for name, spec in local.schema.items():
            values = local.fields[name]
            if name in ("input_ids", ROUTED_EXPERTS):
                continue
            if spec.per_token:
                fields[name] = _gather_tokens(values, index[spec.kind], predicts, spec.pad, device)
            elif spec.kind == "sample":
                fields[name] = values.index_select(0, sample_indices.to(values.device)).to(device)
        masks, counted = {}, predicts if self._count_all else torch.zeros_like(predicts)
        for name, mask in self._masks.items():
            packed_mask = _gather_tokens(mask, index[local.schema[name].kind], predicts, False, mask.device)
            counted = counted | packed_mask
            masks[name] = packed_mask.to(device)
        fields["input_ids"] = input_ids  # losses get them unshifted
        if computed is not None:  # a token is needed if any sample that shares it counts it
            needed = torch.zeros_like(labelled)
            needed[computed[counted]] = True
            counted, computed = needed, computed.to(device)
        return _LossInputs(
            labels=(labels if has_all_tokens else labels[local_tokens.to(device)]).long(),
            head_tokens=(counted if has_all_tokens else counted[local_tokens]).nonzero()[:, 0].to(device),
            computed_tokens=computed,
            segment_ids=torch.from_numpy(unshared.segment_ids).to(device),
            predicts=predicts.to(device),
            masks=masks,
            fields=fields,
        )


@dataclass(kw_only=True)
class _LossInputs:
    """Fields of `PackedBatch` that only losses need."""

    labels: torch.Tensor
    head_tokens: torch.Tensor
    computed_tokens: torch.Tensor | None
    segment_ids: torch.Tensor
    predicts: torch.Tensor
    masks: dict[str, torch.Tensor]
    fields: dict[str, Any]

    @classmethod
    def empty(cls, device: torch.device) -> _LossInputs:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            labels=none,
            head_tokens=none,
            computed_tokens=None,
            segment_ids=none,
            predicts=none.bool(),
            masks={},
            fields={},
        )


def _gather_tokens(
    values: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, pad: Any, device: torch.device
) -> torch.Tensor:
    """`values` at `index` [n], with `pad` where `valid` [n] is False, on `device`."""
    if not len(values):  # a rank without samples
        return torch.full((len(index), *values.shape[1:]), pad, dtype=values.dtype, device=device)
    picked = values.index_select(0, index.to(values.device)).to(device)
    invalid = (~valid).to(device)
    # Not `where`: it converts a bool field with pad 0 to integers.
    return picked.masked_fill_(invalid.view(-1, *[1] * (picked.dim() - 1)), pad)


def pack_step(local: SampleBatch, plan: Plan, **options: Any) -> list[PackedBatch]:
    """All packs of a rank, in the order of the plan; `options` are those of `StepPacks`."""
    return list(StepPacks(local, plan, **options))


def unpack_results(
    local: SampleBatch, plan: Plan, layouts: Sequence[PackLayout], results: Sequence[torch.Tensor], *, dp_rank: int = 0
) -> torch.Tensor:
    """Unpack per-token results [tokens, ...] of each pack to a next_token field [sum(lengths), ...] of `local`.

    `layouts` are those of the packs; the tokens are those of the unshared layouts, as losses see them. The result is 0
    for tokens in no pack (dropped samples, truncated tokens) and for a sample's last token, which predicts nothing.
    """
    like = results[0]
    flat = torch.zeros(local.num_tokens, *like.shape[1:], dtype=like.dtype, device=like.device)
    for mb, pack_layout, values in zip(plan.micro_batches[dp_rank], layouts, results, strict=True):
        unshared = pack_layout.unshared
        predicting = np.flatnonzero(unshared.predicts)
        source = unshared.source(local.offsets[local.rows_of(plan.ids[mb.samples])].numpy())[predicting]
        index, target = (torch.from_numpy(array).to(like.device) for array in (predicting, source))
        flat[target] = values[index].to(flat.dtype)
    return flat
