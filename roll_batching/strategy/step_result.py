"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass

from roll_batching.losses.metric_kinds import HostMetric, as_numbers
from roll_batching.strategy.clock import Phase


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """The loss over the whole mini-batch."""
    joined_metrics: dict[str, HostMetric]
    """The loss's metrics over all micro-batches and ranks, of their kinds, so that steps can be joined too."""
    grad_norm: float
    """Norm of the gradient before clipping; NaN when the step was skipped for it, 0 when nothing counted."""
    lr: float
    """Learning rate that the step used."""
    skipped: bool
    """Whether the optimizer did not step: the gradient's norm is not finite, or no mask of the loss counts a token."""
    seconds: float
    """Duration of the step on this rank, from packing to the updated weights; the device has finished them by then."""
    tokens: int
    """Real tokens of all ranks."""
    phases: dict[Phase, float]
    """Where this rank's time went, in seconds: see `strategy.clock.PHASES`."""
    flops: float | None
    """What the real tokens of all ranks ask of the model, forward and backward, by `modeling.cost`; None for a cost
    that counts something else."""
    ranks: int
    """World size."""
    device_rate: float | None
    """FLOP per second of a rank's device by its datasheet; None for one that is not known."""

    @property
    def metrics(self) -> dict[str, float]:
        """The loss's metrics as numbers."""
        return as_numbers(self.joined_metrics)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float | None:
        """What a rank computed of `flops`, per second."""
        return None if self.flops is None else self.flops / self.seconds / self.ranks

    @property
    def mfu(self) -> float | None:
        """`flops_per_second` as a share of what the device can compute; see `modeling.cost`."""
        rate = self.flops_per_second
        return None if rate is None or self.device_rate is None else rate / self.device_rate
