"""A pipeline schedule whose unit is a slice of a pack.

Megatron's schedules take a pack as a whole, go backward first in first out, and make the loss of a micro-batch inside
its forward pass (`pipeline_parallel/schedules.py`). Here the last stage keeps the outputs of a pack's slices; the loss
runs on the whole pack, as everywhere, and its gradients go back slice by slice. Order and warm-up are those of
`planning.pipeline.slices`. The rest is as in `forward_backward_pipelining_without_interleaving` there: gradients are
reduced in the last backward pass, outputs are deallocated once they are sent, gradients are finalised.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    custom_backward,
    deallocate_output_tensor,
    forward_step_calc_loss,
    set_current_microbatch,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.utils import get_attr_wrapped_model

from roll_batching.distributed.groups import cached_group, gather_objects, group_timeout
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.modeling.attention.kept import KeptKeys
from roll_batching.modeling.head import gpt_of, is_deferred
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.pack_layout import IntArray, PackLayout
from roll_batching.packing.params import PackedParams
from roll_batching.planning.pipeline.schedule import Pass
from roll_batching.planning.pipeline.slices import slice_operations

ForwardSlice = Callable[[PackedBatch, PackedParams], torch.Tensor]


@dataclass(frozen=True)
class _Unit:
    """A slice of a pack, in the order of forward passes."""

    pack: int
    is_first: bool
    is_last: bool
    shape: tuple[int, int, int]
    """Of the input of a stage: [tokens / cp (/ tp with sequence parallelism), 1, hidden]."""


def units_of(layouts: Sequence[PackLayout], layout: ParallelLayout, hidden_size: int) -> list[_Unit]:
    """The slices of all packs in order."""
    units = []
    for number, pack in enumerate(layouts):
        for part in pack.slices:
            split = pack.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
            shape = (part.last - part.first) // split, 1, hidden_size
            units.append(_Unit(number, part.first == 0, part.last == pack.tokens, shape))
    return units


@dataclass
class _OpenPack:
    """A pack between its first forward and its last backward pass on this stage."""

    batch: PackedBatch
    kept: KeptKeys
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Last stage: outputs of its slices, detached, with the gradients of the loss once that is computed."""


class SlicedSchedule:
    """One pass over the packs of a rank and pipeline stage, slice by slice.

    Args:
        layouts: the layouts of all packs, which say the shapes of transfers.
        packs: the packs, in order.
        chunk: this stage's model, in Megatron's DDP or not.
        forward: computes a slice of a pack, given its params.
        bind_loss: (pack, chunk) -> the `loss_func` of the whole pack.
        layout: the parallel layout.
        forward_only: no backward pass.
        collect: results of the loss function are any (Megatron's `collect_non_loss_data`).
        pg_collection: the process groups of the model.
    """

    def __init__(
        self,
        layouts: Sequence[PackLayout],
        packs: Iterator[PackedBatch],
        chunk: Any,
        forward: ForwardSlice,
        bind_loss: Callable[[PackedBatch, Any], Callable[..., Any]],
        layout: ParallelLayout,
        *,
        forward_only: bool,
        collect: bool,
        pg_collection: Any,
    ) -> None:
        self._packs, self._chunk, self._forward_slice, self._bind_loss = packs, chunk, forward, bind_loss
        self._layout, self._forward_only, self._collect = layout, forward_only, collect
        self._groups, self._config = pg_collection, gpt_of(chunk).config
        self._units = units_of(layouts, layout, self._config.hidden_size)
        self._num_packs, self._layouts = len(layouts), layouts
        counts = [len(pack.slices) for pack in layouts]
        operations = slice_operations(counts, layout.pp_rank, layout.pp_size)
        self._operations = [op for op in operations if not (forward_only and op.is_backward)]
        self._held = contextlib.ExitStack()
        self._open: dict[int, _OpenPack] = {}
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._results: list[Any] = []
        self._tokens = torch.zeros((), dtype=torch.int, device=layout.device)
        self._transfers = _Transfers(self._operations, [u.shape for u in self._units], layout, self._config)

    def run(self) -> list[Any]:
        """Results of the loss functions on the last stage, in the order of the packs; an empty list elsewhere."""
        config = self._config
        with self._held:
            self._hold_gradients()
            for place, operation in enumerate(self._operations):
                if operation.is_backward:
                    self._backward(operation.micro_batch, is_last=place == len(self._operations) - 1)
                else:
                    self._forward(operation.micro_batch)
        if not (self._forward_only or self._reduces_inside):
            config.grad_sync_func(self._chunk.parameters())
        self._transfers.wait()
        if not self._forward_only and config.finalize_model_grads_func is not None:
            tokens = self._tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func([self._chunk], tokens, pg_collection=self._groups)
        return self._results

    @property
    def _reduces_inside(self) -> bool:
        """Whether gradients are reduced as the last backward pass makes them.

        As in Megatron: with `grad_sync_func`, later stages reduce after it, while the first stage still computes.
        """
        return self._config.grad_sync_func is None or self._layout.pp_rank == 0

    def _hold_gradients(self) -> None:
        """Gradients add up from here on, and are not reduced before `_held` is closed."""
        if not self._forward_only:
            self._held.enter_context((self._config.no_sync_func or contextlib.nullcontext)())

    def _forward(self, number: int) -> None:
        unit = self._units[number]
        if unit.is_first:
            self._open[unit.pack] = _OpenPack(next(self._packs), KeptKeys())
        pack = self._open[unit.pack]
        params = pack.batch.slices[number - self._first_of(number)]
        params.kept = pack.kept
        received = self._transfers.receive_input(number)
        if received is not None and not self._forward_only:
            received.requires_grad_()
        get_attr_wrapped_model(self._chunk, "set_input_tensor")(received)
        if number == 0 and hasattr(self._chunk, "set_is_first_microbatch"):
            self._chunk.set_is_first_microbatch()
        set_current_microbatch(self._chunk, number)
        output = self._forward_slice(pack.batch, params)
        if self._layout.is_last_stage:
            pack.outputs.append(output.detach().requires_grad_(not self._forward_only))
        else:
            self._transfers.send_output(number, output.detach())
            if not self._forward_only:
                deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        if not self._forward_only:
            self._inputs[number], self._outputs[number] = received, output
        elif unit.is_last:
            self._loss(pack)
            del self._open[unit.pack]

    def _backward(self, number: int, *, is_last: bool) -> None:
        unit, output, received = self._units[number], self._outputs.pop(number), self._inputs.pop(number)
        pack = self._open[unit.pack]
        if unit.is_last:
            self._loss(pack)
        if is_last and self._reduces_inside:
            self._held.close()
        if self._layout.is_last_stage:
            leaf = pack.outputs.pop()
            torch.autograd.backward(output, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        elif self._config.deallocate_pipeline_outputs:
            custom_backward(output, self._transfers.receive_gradient(number))
        else:
            torch.autograd.backward(output, self._transfers.receive_gradient(number))
        if received is not None:
            assert received.grad is not None
            self._transfers.send_gradient(number, received.grad)
        if unit.is_first:
            del self._open[unit.pack]

    def _loss(self, pack: _OpenPack) -> None:
        """The loss of a pack whose last slice has been forward, and its gradients of the outputs of the slices."""
        loss_function = self._bind_loss(pack.batch, self._chunk)
        output = self._join(pack) if self._layout.is_last_stage else torch.zeros((), device=self._layout.device)
        loss, tokens = forward_step_calc_loss(
            self._chunk,
            output,
            loss_function,
            self._config,
            None,
            self._collect,
            self._num_packs,
            self._results,
            cp_group_size=self._groups.cp.size(),
            is_last_stage=self._layout.is_last_stage,
        )
        self._tokens += tokens.to(self._tokens.device)
        if self._layout.is_last_stage and not self._forward_only:
            # The loss makes the last gradient of a deferred head; a head tied to the embedding has its last there.
            gpt, is_last_pack = gpt_of(self._chunk), pack is self._open.get(self._num_packs - 1)
            is_complete = not (gpt.pre_process and gpt.share_embeddings_and_output_weights)
            if is_last_pack and is_complete and self._reduces_inside:
                self._held.close()
            scale = self._config.grad_scale_func
            torch.autograd.backward(loss if scale is None else scale(loss))
            if is_last_pack:
                self._held.close()
                self._hold_gradients()

    def _join(self, pack: _OpenPack) -> torch.Tensor:
        """The output of the whole pack, [1, tokens, ...], as the model returns it."""
        output = torch.cat(pack.outputs, 1)
        gpt, layout = gpt_of(self._chunk), self._layout
        if not (layout.sequence_parallel and is_deferred(gpt)):
            return output
        # Every rank has its part of each slice, and the head takes its part of the whole pack.
        rows = torch.from_numpy(_rows_of_parts([part.shape[1] for part in pack.outputs], layout.tp_size))
        gathered = gather_from_sequence_parallel_region(
            output.transpose(0, 1), tensor_parallel_output_grad=False, group=layout.tp_group
        )
        ordered = gathered.index_select(0, rows.to(output.device))
        return scatter_to_sequence_parallel_region(ordered, group=layout.tp_group).transpose(0, 1)

    def _first_of(self, number: int) -> int:
        """Number of the first slice of a slice's pack."""
        while not self._units[number].is_first:
            number -= 1
        return number


def _rows_of_parts(parts: Sequence[int], ranks: int) -> IntArray:
    """Rows of a pack in order, among slices of `parts` rows per rank that are gathered rank after rank."""
    starts = np.cumsum(parts) - parts
    runs = itertools.product(zip(starts, parts, strict=True), range(ranks))
    return np.concatenate([rank * sum(parts) + start + np.arange(part) for (start, part), rank in runs])


class _Transfers:
    """Messages between neighbouring stages, of known shapes.

    The next receive of each direction is posted before it is needed, so that it runs beside a pass.
    """

    def __init__(
        self, operations: Sequence[Pass], shapes: Sequence[tuple[int, int, int]], layout: ParallelLayout, config: Any
    ) -> None:
        self._layout, self._shapes, self._dtype = layout, shapes, config.pipeline_dtype
        self._sends: list[tuple[torch.Tensor, Any]] = []
        self._awaited: list[Iterator[int]] = [
            iter([op.micro_batch for op in operations if not op.is_backward] if layout.pp_rank > 0 else []),
            iter([op.micro_batch for op in operations if op.is_backward] if not layout.is_last_stage else []),
        ]
        self._posted: list[tuple[int, torch.Tensor, Any] | None] = [None, None]
        if layout.pp_size > 1:
            self._links = stage_links(layout)
            for direction in range(2):
                self._post(direction)

    def receive_input(self, number: int) -> torch.Tensor | None:
        """Input of a slice from the stage before; None on the first."""
        return self._receive(0, number) if self._layout.pp_rank > 0 else None

    def receive_gradient(self, number: int) -> torch.Tensor:
        """Gradient of the output of a slice, from the stage after."""
        return self._receive(1, number)

    def send_output(self, number: int, output: torch.Tensor) -> None:
        """Sends the output of a slice to the stage after."""
        self._send(0, number, output)

    def send_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Sends the gradient of a slice's input to the stage before."""
        self._send(1, number, gradient)

    def wait(self) -> None:
        """Waits for all messages that were sent."""
        for _, work in self._sends:
            work.wait()
        self._sends.clear()

    def _post(self, direction: int) -> None:
        number = next(self._awaited[direction], None)
        self._posted[direction] = None
        if number is not None:
            tensor = torch.empty(self._shapes[number], dtype=self._dtype, device=self._layout.device)
            source = self._links[direction][1 if direction else -1]
            self._posted[direction] = number, tensor, _start(dist.irecv, tensor, source, number)

    def _receive(self, direction: int, number: int) -> torch.Tensor:
        posted = self._posted[direction]
        assert posted is not None and posted[0] == number, "the stages' tables differ"
        _, tensor, work = posted
        work.wait()
        self._post(direction)
        return tensor

    def _send(self, direction: int, number: int, tensor: torch.Tensor) -> None:
        self._sends = [(sent, work) for sent, work in self._sends if not work.is_completed()]
        tensor = tensor.contiguous()
        target = self._links[direction][-1 if direction else 1]
        self._sends.append((tensor, _start(dist.isend, tensor, target, number)))


def _start(operation: Any, tensor: torch.Tensor, link: tuple[int, Any], number: int) -> Any:
    """Starts a transfer over a link. In a batch of one, for which NCCL uses the communicator of the link's group."""
    rank, group = link
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, group, tag=number)])
    return work


Links = dict[int, tuple[int, Any]]
"""(Rank, group of two) of the stage before (-1) and of the stage after (1)."""


def stage_links(layout: ParallelLayout) -> tuple[Links, Links]:
    """Links of this stage for activations, and for gradients. The first call is collective among all ranks.

    Each carries messages of one direction, which NCCL finishes in the order in which they were posted: on a common one
    a receive that is posted ahead would hold up a send behind it. All are used once here, as NCCL connects two ranks
    only when both are there.
    """
    members = tuple(dist.get_process_group_ranks(layout.pp_group))

    def make() -> tuple[Links, Links]:
        everyone, timeout = sorted(set(gather_objects(members, layout.host_group))), group_timeout(layout.pp_group)
        links: tuple[Links, Links] = ({}, {})
        for direction, pipeline in itertools.product(links, everyone):
            for before, after in itertools.pairwise(pipeline):
                group = dist.new_group([before, after], timeout)
                if dist.get_rank() in (before, after):
                    side = 1 if dist.get_rank() == before else -1
                    direction[side] = (after if side == 1 else before), group
        for direction in links:
            for side in sorted(direction):
                dist.all_reduce(torch.zeros(1, device=layout.device), group=direction[side][1])
        return links

    links: tuple[Links, Links] = cached_group(("slices", members), make)
    return links
