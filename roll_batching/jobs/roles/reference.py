"""Worker of a reference on separate devices: it computes log-probs of samples by a frozen copy of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.roles.client import Weights, worker_timeout_minutes

if TYPE_CHECKING:
    from roll_batching.samples import SampleBatch


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for the log-probs of samples."""

    number: int
    samples: SampleBatch
    """`input_ids` and the masks."""
    masks: tuple[str, ...]
    """Fields that select tokens."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The log-probs of the samples of a request, in their order."""

    number: int
    size: int
    log_probs: np.ndarray
    """`[tokens]`, next_token."""


def serve(connection: Connection) -> None:
    """Runs one worker of the reference until `connection` closes; see `serve_requests`."""
    from roll_batching.jobs.roles.worker import serve_requests

    serve_requests(connection, lambda config, reply: _Reference(config))


class _Reference:
    """The model, in the parallel layout of the role."""

    def __init__(self, config: JobConfig) -> None:
        from roll_batching.strategy import MegatronInferStrategy

        assert config.reference is not None
        role = config.reference.model_copy(
            update={"device_mapping": None, "backend_timeout": worker_timeout_minutes(config)},
        )
        self._verify = config.verify_checkpoint
        self.strategy = MegatronInferStrategy(role, seed=config.seed, temperature=config.logprob_temperature)
        self.strategy.initialize(weights=False)

    def load(self, weights: Weights) -> None:
        """Loads the checkpoint of `weights`."""
        self.strategy.load(weights.path, verify=self._verify)

    def answer(self, request: Request) -> Answer | None:
        """Computes the log-probs of the samples; returns them on the first worker, None on the others.

        At first the first replica holds all samples; `run_on` plans and distributes them in the role's layout.
        """
        import torch.distributed as dist

        from roll_batching.jobs.steps.passes import log_prob_pass
        from roll_batching.strategy.roles import run_on

        samples, layout = request.samples, self.strategy.layout
        local_batch = samples if layout.dp_rank == 0 else samples.select(np.arange(0))
        results = run_on(self.strategy, local_batch, log_prob_pass(self.strategy, request.masks))
        if dist.get_rank() != 0:
            return None
        return Answer(number=request.number, size=len(samples), log_probs=results["log_probs"].numpy())
