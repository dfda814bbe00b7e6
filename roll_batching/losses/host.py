"""`HostLoss`: the loss function of another framework, unmodified, as a loss of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import LossOutput
from roll_batching.losses.views import TokenView
from roll_batching.packing.pack_layout import IntArray
from roll_batching.samples import SampleBatch

HostFunction = Callable[[IntArray, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Any]]
"""(ids, log-probs, entropies) of a micro-batch -> its share of the loss, and any result for the caller."""


class HostLoss:
    """Calls a function of another framework once per micro-batch, in the form that it expects.

    The function gets the ids [samples] of the micro-batch, by which it finds its fields in the caller's batch; fp32
    log-probs by the position convention of `TokenView`; and entropies, or None. It returns (loss, result). The loss is
    the micro-batch's share, divided by the framework's counts over the whole step, as its own training would sum it.

    Args:
        function: the function, with its batch and counts bound.
        form: "padded": values are [samples, width], 0 behind each sample; "jagged": nested tensors.
        width: of padded rows; None: the longest sample of the micro-batch.
        entropy: compute entropies.
        masks: mask fields of the batch; log-probs and entropies are 0 where none of them counts.
        by_sample: call the function with one sample at a time, for functions that normalise over their samples.
    """

    def __init__(
        self,
        function: HostFunction,
        *,
        form: Literal["padded", "jagged"] = "padded",
        width: int | None = None,
        entropy: bool = False,
        masks: tuple[str, ...] = ("response_mask",),
        by_sample: bool = False,
    ) -> None:
        if form == "jagged" and by_sample:
            raise LossError("by_sample takes padded rows: leave form='jagged' out")
        self.needs = {"log_probs", "entropy"} if entropy else {"log_probs"}
        self.masks = masks
        self.results: list[tuple[IntArray, Any]] = []
        """(ids, result) of each call, in the order of calls; on the last pipeline stage only."""
        self._function, self._form, self._width, self._by_sample = function, form, width, by_sample

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The sum of the function's losses over the calls for this micro-batch."""
        values = {name: self._formed(tokens, getattr(tokens, name)) for name in self.needs}
        return LossOutput(self._call(tokens.ids, values["log_probs"], values.get("entropy")))

    def call_with_outputs(self, outputs: SampleBatch, device: torch.device) -> None:
        """Calls the function on outputs that were computed before, for its results.

        `outputs` has samples, and the next_token fields in `needs`. Raises `LossError` for a `width` that cuts one.
        """
        width = outputs.max_length if self._width is None else self._width
        if self._form == "padded" and width < outputs.max_length - 1:
            raise LossError(f"a width of {width} would cut a sample of {outputs.max_length} tokens")

        def formed(name: str) -> torch.Tensor:
            if self._form == "padded":
                return outputs.to_padded(name, max(width, outputs.max_length))[:, :width].to(device)
            longest, shortest = outputs.max_length, int(outputs.lengths.min())
            return torch.nested.nested_tensor_from_jagged(
                outputs[name].to(device), outputs.offsets.to(device), min_seqlen=shortest, max_seqlen=longest
            )

        entropy = formed("entropy") if "entropy" in self.needs else None
        with torch.no_grad():
            self._call(outputs.ids.numpy(), formed("log_probs"), entropy)

    def _formed(self, tokens: TokenView, x: torch.Tensor) -> torch.Tensor:
        return tokens.jagged(x) if self._form == "jagged" else tokens.rows(x, self._width)

    def _call(self, ids: IntArray, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        """The sum of the function's losses over one call, or over a call for each sample."""
        if not self._by_sample:
            return self._call_once(ids, log_probs, entropy)
        rows = [slice(row, row + 1) for row in range(len(ids))]
        losses = [self._call_once(ids[r], log_probs[r], None if entropy is None else entropy[r]) for r in rows]
        return torch.stack(losses).sum()

    def _call_once(self, ids: IntArray, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        answer = self._function(ids, log_probs, entropy)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], torch.Tensor):
            raise LossError(
                f"the loss function {self._function} returned {type(answer).__name__}: it must return (loss, result)"
            )
        loss: torch.Tensor = answer[0]
        self.results.append((ids, answer[1]))
        return loss.reshape(())
