"""Pipeline p2p with receive shapes from the plan: no shape exchange, no device synchronisation.

Under `variable_seq_lengths` Megatron's communicator sends three integers before every transfer and waits for the device
to read them (18 exchanges for 4 micro-batches at PP2 x VPP2). All ranks have the plan, so that each knows the shapes
already; receives follow the order of the schedule's table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from roll_batching.errors import LayoutError

Shape = tuple[int, int, int]

_EXPECTED_PARAMETERS = ["self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"]


class PlannedP2P(P2PCommunicator):
    """A P2PCommunicator for one call of a schedule, with the receive shapes of its plan.

    Overrides the private `_communicate_shapes`, whose signature is the same from 0.16 to 0.19.

    Raises `LayoutError` where the installed Megatron-Core has another signature.
    """

    def __init__(self, pp_group: Any, config: Any, shapes: Sequence[Shape], vpp_size: int, group_size: int) -> None:
        super().__init__(pp_group, config)
        overridden = getattr(P2PCommunicator, "_communicate_shapes", None)
        if overridden is None or list(inspect.signature(overridden).parameters) != _EXPECTED_PARAMETERS:
            raise LayoutError(
                "this Megatron-Core exchanges pipeline shapes in a way that planned shapes do not know: use a version "
                "that this package was tried with, 0.16 to 0.19"
            )
        rank, size, count = pp_group.rank(), pp_group.size(), len(shapes)
        table = (
            get_schedule_table(count, vpp_size, group_size)
            if vpp_size > 1
            else [(micro_batch, 0) for micro_batch in range(count)]
        )
        # The first stage's first chunk reads the data and receives nothing.
        self._activations: Iterator[Shape] = iter([shapes[m] for m, chunk in table if not (rank == 0 and chunk == 0)])
        # A backward pass visits the chunks in reverse: the table's chunk 0 is the model's last, whose gradient
        # the last rank computes itself.
        self._gradients: Iterator[Shape] = iter(
            [shapes[m] for m, chunk in table if not (rank == size - 1 and chunk == 0)]
        )

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        no_shape = [0, 0, 0]
        try:
            return (
                next(self._activations) if recv_prev else no_shape,
                next(self._gradients) if recv_next else no_shape,
            )
        except StopIteration:
            raise LayoutError(
                "the pipeline schedule asks for more transfers than the plan has: this Megatron version orders its "
                "schedule differently. Use 0.16 to 0.19"
            ) from None

    def check_exhausted(self, forward_only: bool) -> None:
        """Raises `LayoutError` if planned receives are left over: schedule and plan disagree."""
        unused = [sum(1 for _ in self._activations), 0 if forward_only else sum(1 for _ in self._gradients)]
        if any(unused):
            raise LayoutError(
                f"the pipeline schedule ended with {unused[0]} activations and {unused[1]} gradients never received: "
                "this Megatron version orders its schedule differently. Use 0.16 to 0.19"
            )
