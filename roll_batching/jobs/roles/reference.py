"""The reference on devices of its own: a frozen copy of the policy that gives log-probs of the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.roles.messages import Weights, patience_inside
from roll_batching.lifetime import die_with_parent

if TYPE_CHECKING:
    from roll_batching.samples import SampleBatch


@dataclass(frozen=True, kw_only=True)
class Request:
    """Samples whose log-probs are wanted."""

    number: int
    samples: SampleBatch
    """`input_ids` and the masks."""
    masks: tuple[str, ...]
    """Fields that say which rows are wanted."""

    @property
    def size(self) -> int:
        """Samples."""
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The log-probs of the samples of a request, in their order."""

    number: int
    size: int
    log_probs: np.ndarray
    """`[tokens]`, next_token."""


def serve(descriptor: int, parent: int) -> None:
    """One process of the reference's world, as a child of the process that it works for."""
    die_with_parent(parent)  # before imports that take seconds
    join(Connection(descriptor))


def join(connection: Connection) -> None:
    """One process of the reference's world; see `child.work`."""
    from roll_batching.jobs.roles.child import work

    work(connection, _Reference)


class _Reference:
    """The model, in the layout of the role."""

    def __init__(self, config: JobConfig) -> None:
        from roll_batching.strategy import MegatronInferStrategy

        assert config.reference is not None
        role = config.reference.model_copy(
            update={"device_mapping": None, "backend_timeout": patience_inside(config)},
        )
        self._verify = config.verify_checkpoint
        self.strategy = MegatronInferStrategy(role, seed=config.seed, temperature=config.logprob_temperature)
        self.strategy.initialize(weights=False)

    def load(self, weights: Weights) -> None:
        """Computes with `weights` from now on."""
        self.strategy.load(weights.path, verify=self._verify)

    def answer(self, request: Request) -> Answer | None:
        """Log-probs by the role's own plan, of samples that lie on the world's first replica as it begins."""
        import torch.distributed as dist

        from roll_batching.jobs.steps.agreed_plans import agreed
        from roll_batching.jobs.steps.update import REFERENCE, with_log_probs
        from roll_batching.samples import gather_lengths

        samples, layout = request.samples, self.strategy.layout
        here = samples if layout.dp_rank == 0 else samples.select(np.arange(0))
        table = gather_lengths(here)
        table = table.select(np.argsort(table.ids))
        plan = agreed(self.strategy, lambda: self.strategy.plan(table, forward=True))
        found = with_log_probs(self.strategy, here, [plan], REFERENCE, request.masks)
        if dist.get_rank() != 0:
            return None
        return Answer(number=request.number, size=len(samples), log_probs=found[REFERENCE].numpy())
