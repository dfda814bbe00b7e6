"""Prefixes shared behind a loop that packs by itself: its packs, labels and logits stay those of whole samples.

    from roll_batching.integrations.prefixes import share_prefixes_behind

    share_prefixes_behind(model)  # once, after the model is built

From then on a hook on the model leaves out the rows of a pack that repeat the beginning of another sample of this pack,
and rows that pad samples; a hook on the decoder's output puts a copy of each in its place. In between, all layers
compute each shared position once. The output head and the loss compute whole samples, as before. Samples share only
within a micro-batch, so that the loop saves most where it keeps responses to one prompt together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from roll_batching.distributed import consensus
from roll_batching.errors import IntegrationError
from roll_batching.integrations.host_model import settings_of_planned_passes
from roll_batching.modeling.adoption import ADOPTED_ENGINE
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.kernels import tell
from roll_batching.packing.collectives import gather_keys
from roll_batching.packing.pack_layout import IntArray, PackLayout
from roll_batching.packing.params import PackedParams, packed_params
from roll_batching.planning import BatchingSpec, SharedPrefixes
from roll_batching.planning.planner import SMALLEST_SAVING
from roll_batching.settings import BatchingConfig
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.pack_features import sharing_obstacle

_PROVED_WITH = BatchingSpec(mode="packed", max_tokens=4096)
"""Packs of the two samples on which the model is tried; the loop has its own cap."""


def share_prefixes_behind(model: Any) -> None:
    """Let packs that a loop passes to a GPTModel compute the common beginnings of their samples once. Collective.

    `model` is the model, in DDP and Float16Module or not, or a list of its virtual stages. Packs are inputs of one row
    [1, tokens / cp] with Megatron's `PackedSeqParams` in the form "thd", divided over context parallelism as Megatron
    divides them. A loop that pads samples may say their lengths: in `cu_seqlens_q`, beside `cu_seqlens_q_padded`, or in
    an attribute `unpadded` of the params, int32 [samples + 1] likewise. Every pipeline stage needs the `input_ids`: of
    its rank, or nested ones of whole samples. Other inputs pass unchanged. So does a pack in which less than 5% of the
    rows repeat or are padding, to TransformerEngine's attention: Megatron's local one has none for packs.

    Raises `IntegrationError` on all ranks where the model cannot share, with the reason, and `LayoutError` as
    `MegatronInferStrategy.from_model` does.
    """
    chunks = list(model) if isinstance(model, list | tuple | torch.nn.ModuleList) else [model]
    batching = BatchingConfig(train=_PROVED_WITH, infer=_PROVED_WITH, share_prefixes="auto")
    with _as_planned(chunks):
        state = MegatronInferStrategy.from_model(chunks, batching).state
    with consensus(state.layout.host_group, "share_prefixes_behind"):
        if (obstacle := sharing_obstacle(state) or _obstacle_behind(state)) is not None:
            raise IntegrationError(f"packs of this model cannot share prefixes: {obstacle}")
    sharing = _Sharing(state)
    for gpt in map(gpt_of, chunks):
        gpt.register_forward_pre_hook(sharing.leave_out, with_kwargs=True)
        if gpt.post_process:
            gpt.decoder.register_forward_hook(sharing.put_back, with_kwargs=True)


@contextlib.contextmanager
def _as_planned(chunks: list[Any]) -> Iterator[None]:
    """The settings with which the model is tried on planned packs; afterwards those of the loop."""
    config = gpt_of(chunks[0]).config
    settings = settings_of_planned_passes(config, next(gpt_of(chunks[0]).parameters()).device)
    kept = {name: getattr(config, name) for name in settings}
    vars(config).update(settings)
    try:
        yield
    finally:
        vars(config).update(kept)


def _obstacle_behind(state: ModelState) -> str | None:
    """What else a loop of somebody else's may not do; None: nothing."""
    config = gpt_of(state.chunks[0]).config
    if state.layout.pp_size > 1 and not config.variable_seq_lengths:
        return "its pipeline sends tensors of one size: set variable_seq_lengths=True"
    if getattr(config, "moe_enable_routing_replay", False):
        return "recorded experts belong to the rows of whole samples: set moe_enable_routing_replay=False"
    if config.fp8:
        return f"fp8={config.fp8} needs numbers of rows that this does not keep to: leave it out"
    return None


@dataclass(frozen=True)
class _HostPack:
    """A pack of whole samples: where they lie, and this rank's share of it."""

    starts: IntArray
    """First row of each sample in the whole pack, [samples]."""
    lengths: IntArray
    """Tokens of each sample, without its padding, [samples]."""
    layout: PackLayout
    """Segments with padding, and their division over context parallelism."""

    @classmethod
    def of(cls, params: Any, cp_size: int, tokens: int) -> _HostPack:
        """The pack of `tokens` rows on all context-parallel ranks that PackedSeqParams describe."""
        group = getattr(params, "cp_group", None)
        is_divided = cp_size > 1 or (group is not None and group.size() > 1)
        if is_divided and (group is not None or getattr(params, "cp_partition_mode", "zigzag") != "zigzag"):
            raise IntegrationError(
                "a pack has its own context-parallel group or another division than Megatron's zigzag: set one "
                "context-parallel size, or do not share prefixes behind this loop"
            )
        padded = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        unpadded = getattr(params, "unpadded", params.cu_seqlens_q)
        ends, real = (values.cpu().numpy().astype(np.int64) for values in (padded, unpadded))
        if len(ends) != len(real) or ends[-1] > tokens or (np.diff(ends) < np.diff(real)).any():
            raise IntegrationError(
                f"cu_seqlens {real.tolist()[:8]}, padded {ends.tolist()[:8]}, do not describe a pack of {tokens} rows"
            )
        segments = np.diff(np.append(ends, tokens))
        layout = PackLayout(lengths=np.diff(real), segments=segments, cp_size=cp_size)
        used = np.flatnonzero(layout.lengths)
        return cls(ends[:-1][used], layout.lengths[used], layout)

    def rows_of(self, order: IntArray) -> IntArray:
        """Rows of the samples' tokens in the whole pack, for the samples in `order`."""
        runs = [np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]
        return np.concatenate([runs[sample] for sample in order])


class _Sharing:
    """The two hooks of a model. A pack's rows travel in its params, so that nothing is kept between them."""

    def __init__(self, state: ModelState) -> None:
        layout, self._attention = state.layout, state.attention
        self._rotates = state.rotates_rows
        self._tp_size, self._cp_size, self._cp_rank = layout.tp_size, layout.cp_size, layout.cp_rank
        self._cp_group, self._tp_group = layout.cp_group, layout.tp_group
        self._by_sequence = layout.sequence_parallel
        self._told = threading.Event()

    def leave_out(self, gpt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Before the model: its inputs without rows that repeat."""
        params = kwargs.get("packed_seq_params")
        if params is None or params.qkv_format != "thd" or isinstance(params, PackedParams):
            return None
        names = ("input_ids", "position_ids", "attention_mask", "decoder_input")
        inputs = dict(zip(names, args, strict=False)) | kwargs
        ids = inputs.get("input_ids")
        if inputs.get("decoder_input") is not None or ids is None:
            raise IntegrationError(
                f"a pack came to {type(gpt).__name__} without input_ids, or with decoder_input: shared prefixes are "
                "found by ids, so pass them on every pipeline stage"
            )
        pack, whole = self._whole_ids(ids, params)
        if not len(pack.lengths):
            return None
        order, layout = self._without_repeats(pack, whole)
        if layout.tokens > (1 - SMALLEST_SAVING) * pack.layout.tokens and self._attention is ADOPTED_ENGINE:
            return None
        self._tell(pack.layout.tokens, layout.tokens)
        device = params.cu_seqlens_q.device
        places = np.flatnonzero(layout.real) if layout.prefix_lengths is None else layout.computed_tokens
        sources, repeats = np.zeros(layout.tokens, np.int64), np.zeros(pack.layout.tokens, np.int64)
        rows = pack.rows_of(order)
        sources[places], repeats[rows] = rows, places
        shared = packed_params(
            layout,
            self._cp_rank,
            device,
            attention=self._attention,
            rotation_cp=(self._cp_size, self._cp_rank) if self._rotates else None,
        )
        shared.repeats = torch.from_numpy(repeats[pack.layout.local_tokens(self._cp_rank)]).to(device)
        mine = sources[layout.local_tokens(self._cp_rank)]
        if (mask := inputs.get("padding_mask")) is not None:
            self._require_padding(pack, rows, mask)
            inputs["padding_mask"] = self._padding(layout, places).to(mask.device)
        inputs |= {"input_ids": torch.from_numpy(whole[mine]).to(device)[None], "packed_seq_params": shared}
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = shared.positions[None]
        return (), inputs

    def _padding(self, layout: PackLayout, places: IntArray) -> torch.Tensor:
        """Megatron's padding_mask of this rank, bool[1, rows]: False at `places`, which have tokens."""
        mask = np.ones(layout.tokens, np.bool_)
        mask[places] = False
        return torch.from_numpy(mask[layout.local_tokens(self._cp_rank)])[None]

    def _require_padding(self, pack: _HostPack, rows: IntArray, mask: torch.Tensor) -> None:
        if not torch.equal(mask.reshape(1, -1).cpu(), self._padding(pack.layout, rows)):
            raise IntegrationError(
                "a pack's padding_mask marks other rows than those behind its samples, and which of them repeat others "
                "is not known: mark padding alone, or do not share prefixes behind this loop"
            )

    def _whole_ids(self, ids: torch.Tensor, params: Any) -> tuple[_HostPack, IntArray]:
        """The pack, and the ids of its rows on all context-parallel ranks, on the host."""
        if ids.is_nested:
            ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            pack = _HostPack.of(params, self._cp_size, int(ends[-1]))
            whole = np.zeros(pack.layout.tokens, np.int64)
            for start, row in zip(pack.layout.cu_seqlens, ids.unbind(), strict=False):
                whole[start : start + len(row)] = row.cpu().numpy()
            return pack, whole
        local = ids.reshape(-1)
        pack = _HostPack.of(params, self._cp_size, len(local) * self._cp_size)
        if self._cp_size > 1:
            parts = [torch.empty_like(local) for _ in range(self._cp_size)]
            dist.all_gather(parts, local.contiguous(), group=self._cp_group)
            local = torch.cat(parts)
        return pack, local.cpu().numpy().astype(np.int64)[pack.layout.restore]

    def _without_repeats(self, pack: _HostPack, whole: IntArray) -> tuple[IntArray, PackLayout]:
        """The order of the samples in the computed pack, and its layout."""
        prefixes = SharedPrefixes.of(whole[pack.rows_of(np.arange(len(pack.lengths)))], pack.lengths)
        own = pack.lengths[prefixes.order] - prefixes.shared
        unit = 2 * self._cp_size if self._cp_size > 1 else 1
        slots = -(-own // unit) * unit
        tail = int(-slots.sum() % (unit * self._tp_size))
        layout = PackLayout(
            lengths=own,
            segments=np.append(slots, tail) if tail else slots,
            cp_size=self._cp_size,
            prefix_lengths=prefixes.shared if prefixes.shared.any() else None,
        )
        return prefixes.order, layout

    def _tell(self, whole: int, computed: int) -> None:
        if dist.get_rank() == 0 and not self._told.is_set():
            self._told.set()
            tell(f"common prefixes are computed once behind this loop: {computed} of the {whole} rows of a first pack")

    def put_back(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After the decoder: the rows of whole samples."""
        params = kwargs.get("packed_seq_params")
        if not isinstance(params, PackedParams) or params.repeats is None:
            return None
        if not isinstance(output, torch.Tensor):
            raise IntegrationError(f"{type(decoder).__name__} returned a {type(output).__name__}, not hidden states")
        if self._by_sequence:
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self._tp_group
            )
        output = gather_keys(output, params, self._cp_group).index_select(0, params.repeats)
        return scatter_to_sequence_parallel_region(output, group=self._tp_group) if self._by_sequence else output
