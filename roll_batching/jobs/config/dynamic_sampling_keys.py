"""Keys of dynamic sampling."""

from __future__ import annotations

from roll_batching.settings.fields import MOST_TOKENS, Settings, setting


class DynamicSamplingKeys(Settings):
    """The keys of dynamic sampling."""

    dynamic_sampling: bool = setting(
        False,
        help="Train on rollout_batch_size prompts whose responses have different rewards: other groups are discarded, "
        "and more prompts are sampled until the step is full (docs/dynamic-sampling.md).",
    )
    dynamic_sampling_max_batches: int | None = setting(
        10,
        help="dynamic_sampling: most generation batches of a step; a step that is not full then ends the job with an "
        "error. ~: no limit.",
        ge=1,
    )
    dynamic_sampling_batch_size: int | None = setting(
        None,
        help="dynamic_sampling: prompts of one generation batch. Default: rollout_batch_size.",
        ge=1,
        le=MOST_TOKENS,
    )
