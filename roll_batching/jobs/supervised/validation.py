"""The loss on held-out texts or pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll_batching.distributed import consensus
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.steps.steps import Encoder, Learnt, planned
from roll_batching.jobs.steps.update import with_reference
from roll_batching.losses import loss_spec
from roll_batching.samples import distribute
from roll_batching.strategy import MegatronInferStrategy


class Validation:
    """Held-out samples, planned once and lying where they are computed. Building it is collective.

    Args:
        texts: at least one, the same on every rank.
        encoder: turns them into samples.
        strategy: what is measured.
        reference: whose log-probs the loss reads, if any: computed here, once.
        loss: a loss object.
    """

    def __init__(
        self,
        texts: Sequence[Learnt],
        encoder: Encoder,
        strategy: MegatronInferStrategy,
        reference: MegatronInferStrategy | None,
        loss: Any,
    ) -> None:
        self.strategy, self.loss, self._texts = strategy, loss, len(texts)
        layout = strategy.layout
        with consensus(layout.host_group, "encoding held-out texts"):
            home = encoder.share(texts, layout.dp_rank, layout.dp_size)
        self._plan = planned(home, encoder, strategy, forward=True)
        if reference is not None:
            home = with_reference(strategy, reference, home, lambda: self._plan, loss_spec(loss).masks)
        self._local = distribute(home, self._plan)

    def __call__(self, updates: int) -> Row:
        """Figures after `updates` optimizer steps: `eval_loss`, the loss's metrics, texts. Collective."""
        figures = self.strategy.evaluate(self._local, self._plan, self.loss)
        named = {f"eval_{name}": value for name, value in figures.items()}
        return {"eval_updates": updates, **named, "eval_samples": self._texts}
