"""Keys of asynchronous rollouts: how far ahead of training, how stale, and what happens on failures."""

from __future__ import annotations

import math

from roll_batching.settings.fields import Settings, setting


class AsyncKeys(Settings):
    """The keys of asynchronous rollouts."""

    async_generation_ratio: float = setting(
        0,
        help="How far rollouts run ahead of training, in units of rollout_batch_size: a separate process, the sampler, "
        "generates and scores them while the model trains. 0: synchronous, with the training model.",
        ge=0,
    )
    max_staleness: int | None = setting(
        None,
        help="async_generation_ratio: most RL steps between the weights that sampled a response and the current ones; "
        "older samples are dropped, counted and sampled again. Default: async_generation_ratio, rounded up, which "
        "drops none.",
        ge=0,
    )
    sampler_restarts: int = setting(
        2,
        help="Most restarts of the processes of a separate role (the sampler of async_generation_ratio, roles on "
        "separate devices) after one was killed or stalled; their unanswered requests are sent again. After that, and "
        "with 0 at once, the job ends.",
        ge=0,
    )
    rollout_timeout: float = setting(
        1800.0,
        help="Seconds that training waits for such processes without hearing of them before it takes them for stalled.",
        gt=0,
    )

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts run ahead of training."""
        return self.async_generation_ratio > 0

    @property
    def staleness_bound(self) -> int:
        """Most RL steps between the weights that sampled a response and the current ones."""
        return math.ceil(self.async_generation_ratio) if self.max_staleness is None else self.max_staleness
