"""Runs a loss inside Megatron's schedule: one call per micro-batch, with Megatron's scaling cancelled.

A user's loss is already normalised over the whole step. Megatron scales it again, depending on
`calculate_per_token_loss`; the runner cancels that and nothing else. No device value is read on the host before the end
of the step.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roll_batching.errors import LossError, is_collective_timeout
from roll_batching.losses.contract import VALUES, LossOutput, LossSpec, Max, Mean, Metric, Min, Sum, metric_tensors
from roll_batching.losses.denominators import StepCounts
from roll_batching.losses.head import HeadContext
from roll_batching.losses.views import MissingField, TokenView
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.pack_layout import IntArray
from roll_batching.registry import user_place


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Megatron's scaling of the loss (`forward_step_calc_loss` and DDP), and the factors that cancel it.

    With `per_token` (`calculate_per_token_loss`) Megatron divides gradients by the sum of the token counts that the
    loss functions of a step return, unless it is 0. Otherwise it divides by the number of micro-batches, and averages
    gradients over data-parallel ranks: the loss is multiplied by micro-batches x data-parallel size to cancel both. The
    factor for context parallelism already cancels inside Megatron.
    `apply=False` keeps Megatron's scaling: gradients are divided by micro-batches x data-parallel size.
    """

    per_token: bool
    num_micro_batches: int
    dp_size: int
    apply: bool = True
    router_tokens: int = 0
    """Real tokens of the step on all ranks if MoE routers add losses, else 0. With `per_token` routers multiply their
    losses by token counts and rely on Megatron's division, so it must not be skipped."""

    def outputs(self, loss: torch.Tensor, record: Any, tokens: int) -> tuple[Any, ...]:
        """The return value of a Megatron loss function for a micro-batch of `tokens` real tokens on this rank.

        The loss is a new tensor, as Megatron scales it in place.
        """
        divisor = self.num_micro_batches * self.dp_size
        if not self.per_token:
            return loss * (float(divisor) if self.apply else 1.0), record
        factor = (self.router_tokens or 1.0) / (1.0 if self.apply else divisor)
        # With a sum of counts of 0 gradients stay: Megatron-Core 0.16 skips its division, 0.19 divides by 1.
        counted = tokens if self.router_tokens else 0
        return loss * factor, torch.full((), counted, dtype=torch.int, device=loss.device), record


def has_router_losses(config: Any) -> bool:
    """Whether the model's MoE routers add auxiliary or z-losses to the gradients."""
    if config.num_moe_experts is None:
        return False
    auxiliary = config.moe_aux_loss_coeff
    return bool(any(auxiliary) if isinstance(auxiliary, (list, tuple)) else auxiliary) or bool(config.moe_z_loss_coeff)


class MicroBatchRecord:
    """Loss and metrics of a micro-batch on the device, read once at the end of the step. Does not keep the pack."""

    def __init__(
        self,
        loss: torch.Tensor,
        metrics: dict[str, Metric],
        ids: IntArray,
        per_sample: torch.Tensor | None = None,
        *,
        is_counted: bool,
    ) -> None:
        self.loss, self.metrics, self._ids = loss.detach().clone(), metrics, ids
        self.is_counted = is_counted
        """Whether loss and metrics enter those of the step; false on ranks that repeat the first CP rank's result."""
        self._bad = None if per_sample is None else ~torch.isfinite(per_sample.detach())
        """[samples] bool: samples whose loss, or gradient with respect to log-probs or values, is not finite."""

    def watch(self, outputs: torch.Tensor | None, pack: PackedBatch) -> None:
        """Records, in backward, the samples with a non-finite gradient at a counted position."""

        def record_nonfinite(gradient: torch.Tensor) -> None:
            bad = (~torch.isfinite(gradient)).flatten(1).any(1) if gradient.dim() > 1 else ~torch.isfinite(gradient)
            bad &= torch.stack(list(pack.masks.values())).any(0)
            count = torch.zeros(len(pack.layout.unshared.segments), dtype=torch.int32, device=bad.device)
            self._bad = count.index_add_(0, pack.segment_ids, bad.int())[: pack.samples] > 0

        if outputs is not None and outputs.requires_grad:
            outputs.register_hook(record_nonfinite)

    def nonfinite_samples(self) -> list[int]:
        """Ids of the samples with a non-finite loss or gradient of log-probs; all ids of the pack if none is known."""
        bad = [] if self._bad is None else self._bad.nonzero()[:, 0].tolist()
        return self._ids[bad].tolist() if bad else self._ids.tolist()


class LossRunner:
    """A loss bound to one step: its counts, its scaling and its first error."""

    def __init__(
        self, loss: Any, spec: LossSpec, counts: StepCounts, head: HeadContext, scaling: Scaling, *, train: bool
    ) -> None:
        self._loss, self._spec, self._counts = loss, spec, counts
        self._head, self._scaling, self._train = head, scaling, train
        self.error: LossError | None = None
        """The first exception, wrong shape or missing gradient of the loss. The schedule still runs to its end on all
        ranks, so that all can raise the error together."""

    def _counts_pack(self, pack: PackedBatch) -> bool:
        """Whether this rank's loss of a pack counts: on the first CP rank, or on all if each computes a part."""
        is_part = self._spec.by_sequence and not self._spec.gather_cp
        return is_part or pack.params.cp_rank == 0

    def bind(self, pack: PackedBatch, chunk: Any) -> Callable[[torch.Tensor], tuple[Any, ...]]:
        """The loss function of one micro-batch, which Megatron's schedule calls with the model's output."""
        tokens = int(pack.layout.real_token_counts(pack.params.cp_rank).sum())

        def loss_func(output: torch.Tensor) -> tuple[Any, ...]:
            heads = None
            if self._spec.heads:
                from roll_batching.losses.mtp import MTPLosses, split_output  # few models have heads

                output, ahead = split_output(output, self._spec.heads)
                heads = MTPLosses.of(ahead, pack, chunk, self._head, self._spec, self._counts)
            record: MicroBatchRecord | None = None
            if not pack.samples:  # a filler: no user code, but the head takes part in its collectives and gradients
                loss = self._head.idle_output(output, pack, chunk)
            else:
                call = self._by_sequence if self._spec.by_sequence else self._by_token
                loss, record = call(output, pack, chunk)
            if heads is not None:
                loss = loss + heads.loss
                if record is not None:
                    record.metrics |= heads.metrics
            return self._scaling.outputs(loss, record, tokens)

        return loss_func

    def _guarded(
        self,
        call: Callable[[], tuple[torch.Tensor, MicroBatchRecord]],
        pack: PackedBatch,
        computed: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, MicroBatchRecord | None]:
        """(loss, record) of the user's code; if it raises, a loss of 0 and None.

        The loss of 0 depends on what the head `computed`, so that backward enters the same collectives as on
        tensor-parallel ranks whose loss did not raise.
        """
        try:
            return call()
        except torch.OutOfMemoryError:  # nothing more can be computed, as when the model itself runs out of memory
            raise
        except Exception as error:  # raised on all ranks at the end of the step
            # After a timeout in the loss's own collective, other ranks never reach the end of the step.
            if is_collective_timeout(error) and (place := _own_collective(error)):
                raise LossError(
                    f"{self._spec.name} timed out in a collective that not every rank entered ({place}). A loss is "
                    "called once per micro-batch, and ranks may have different numbers of them: remove the collective, "
                    "and return sums as metrics"
                ) from error
            if isinstance(error, MissingField):
                error = LossError(f"{error}{self._spec.prepare_hint}")
            if self.error is None:
                self.error = self._failure(error, pack)
        parts = [(x.nan_to_num(0, 0, 0) * 0).sum() for x in computed if x is not None]
        return torch.stack(parts).sum(), None

    def _failure(self, error: Exception, pack: PackedBatch) -> LossError:
        """The error for an exception of the user's loss, with its line and the pack's samples."""
        place = user_place(error)
        if isinstance(error, LossError):  # of a view that the loss called, or about what it returned
            return LossError(f"{error} ({place})") if place else error
        samples = ", ".join(map(str, pack.ids[:8])) + (", ..." if pack.samples > 8 else "")
        failure = LossError(
            f"{self._spec.name} failed on the pack of samples {samples} with {type(error).__name__}: {error} ({place})"
            f"{self._kinds_hint(error, pack)}"
        )
        failure.__cause__ = error
        return failure

    def _kinds_hint(self, error: Exception, pack: PackedBatch) -> str:
        """End of an error of a loss that seems to combine values per sample and per token; otherwise empty."""
        sizes, fields = set(re.findall(r"\d+", str(error))), [n for n, k in pack.kinds.items() if k == "sample"]
        if self._spec.by_sequence or not fields or not {str(pack.samples), str(len(pack.segment_ids))} <= sizes:
            return ""
        return (
            f". {', '.join(fields)} have one value per sample ({pack.samples}), and the pack has "
            f'{len(pack.segment_ids)} tokens: tokens.per_token("{fields[0]}") has one value per token'
        )

    def _by_token(
        self, output: torch.Tensor, pack: PackedBatch, chunk: Any
    ) -> tuple[torch.Tensor, MicroBatchRecord | None]:
        needs, log_probs, entropy, values, label_and_candidates = self._spec.needs, None, None, None, None
        logits = vocabulary = None
        if self._spec.candidates is not None:
            label_and_candidates, entropy = self._head.candidate_log_probs(
                output, pack, chunk, self._spec.candidates, entropy="entropy" in needs
            )
            log_probs = label_and_candidates[:, 0]
        elif needs & {"log_probs", "entropy"}:
            log_probs, entropy = self._head.log_probs(output, pack, chunk, entropy="entropy" in needs)
        if "logits" in needs:
            logits = self._head.gather(self._head.logits(output, chunk), pack)
            vocabulary = self._head.vocabulary_of(logits)
        if VALUES in needs:
            values = self._head.values(output, pack)
        view = TokenView(
            pack,
            self._counts,
            log_probs=log_probs if "log_probs" in needs else None,
            entropy=entropy,
            logits=logits,
            values=values,
            candidate_log_probs=None if label_and_candidates is None else label_and_candidates[:, 1:],
            vocabulary=vocabulary,
        )

        def call() -> tuple[torch.Tensor, MicroBatchRecord]:
            result = self._loss.token_loss(view)
            loss = self._checked(result, output)
            record = MicroBatchRecord(loss, dict(result.metrics), pack.ids, is_counted=self._counts_pack(pack))
            watched = log_probs if label_and_candidates is None else label_and_candidates
            # A gradient of log-probs that is not finite tells its sample; one of weights does not.
            record.watch(watched if values is None else values, pack)
            return loss, record

        return self._guarded(call, pack, (label_and_candidates, log_probs, entropy, logits, values))

    def _by_sequence(
        self, output: torch.Tensor, pack: PackedBatch, chunk: Any
    ) -> tuple[torch.Tensor, MicroBatchRecord | None]:
        from roll_batching.losses.sequences import SequenceParts, SequenceView, join_metrics  # for few losses

        statistics = bool(self._spec.needs & {"log_probs", "entropy"})
        parts = SequenceParts(output, pack, chunk, self._head, gather_cp=self._spec.gather_cp, statistics=statistics)

        def call() -> tuple[torch.Tensor, MicroBatchRecord]:
            views = [SequenceView(self._counts, parts, place) for place in range(pack.samples)]
            results = [self._loss.sequence_loss(view) for view in views]
            losses = torch.stack([self._checked(result, output) for result in results])
            loss = losses.sum()
            metrics, is_counted = join_metrics(results), self._counts_pack(pack)
            return loss, MicroBatchRecord(loss, metrics, pack.ids, losses, is_counted=is_counted)

        return self._guarded(call, pack, parts.logits)

    def _checked(self, result: Any, output: torch.Tensor) -> torch.Tensor:
        name = type(self._loss).__name__
        if not isinstance(result, LossOutput):
            raise LossError(f"{name} returned {type(result).__name__}: return LossOutput(loss, metrics)")
        loss = result.loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            unit = "sequence" if self._spec.by_sequence else "micro-batch"
            raise LossError(
                f"{name} returned a loss of shape {shape}: return one number per {unit}, reduced with the view's mean, "
                "sequence_mean or sequence_sum"
            )
        if self._train and not (loss.requires_grad and _reaches(loss, output)):
            raise LossError(
                f"{name} returned a loss without a gradient to the model: compute it from the view's log_probs, "
                "entropy, logits or values, and do not detach them"
            )
        for key, metric in result.metrics.items():
            if not isinstance(metric, (Sum, Mean, Max, Min)):
                raise LossError(
                    f"{name} returned the metric {key!r} as {type(metric).__name__}: wrap it in Sum, Mean, Max or Min"
                )
            for part in metric_tensors(metric):
                if not isinstance(part, (torch.Tensor, int, float)) or torch.as_tensor(part).numel() != 1:
                    kind = f"shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
                    raise LossError(f"{name} returned the metric {key!r} of {kind}: a metric holds one number")
        return loss.reshape(())


def _own_collective(error: Exception) -> str:
    """File and line where the user's loss called the collective that raised `error`; empty if it did not."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    outside_torch = [place for place in frames if "torch" not in place[0].parts]
    if len(outside_torch) == len(frames):
        return ""
    file, line = outside_torch[-1]
    packages = [sys.modules[name] for name in ("torch", "megatron.core", "roll_batching") if name in sys.modules]
    is_library = any(file.is_relative_to(folder) for package in packages for folder in package.__path__)
    return "" if is_library else f"{file}, line {line}"


def _reaches(loss: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether the autograd graph of `loss` contains the model's `output`.

    Checked before backward: without it the weights get no gradient, for which overlapped gradient reduction waits.
    """
    if output.grad_fn is None:  # the model is frozen
        return True
    visited, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is output.grad_fn:
            return True
        if node is not None and node not in visited:
            visited.add(node)
            pending += [following for following, _ in node.next_functions]
    return False
