"""Keys that change rewards before advantages: a linear map, and a penalty for long responses."""

from __future__ import annotations

from roll_batching.settings.fields import Settings, setting


class RewardScaling(Settings):
    """`reward_scaling`: a linear map of rewards, clamped at both ends."""

    source_min: float = setting(0.0, help="Rewards up to this become target_min.")
    source_max: float = setting(1.0, help="Rewards from this on become target_max.")
    target_min: float = setting(0.0, help="Least reward.")
    target_max: float = setting(1.0, help="Largest reward.")


class OverlongBuffer(Settings):
    """`overlong_buffer`: a penalty on the last tokens before the longest response (DAPO)."""

    length: int = setting(help="Tokens before response_length over which the penalty grows from 0.", ge=1)
    penalty: float = setting(1.0, help="Subtracted from the reward of a response of response_length tokens.", gt=0)
    response_length: int | None = setting(
        None, help="Tokens at which the penalty is whole; it grows beyond. Default: the job's response_length.", ge=1
    )


class RewardShapingKeys(Settings):
    """The keys that change rewards before advantages."""

    reward_scaling: RewardScaling | None = setting(
        None, help="Map rewards linearly before advantages are computed: source_min to target_min, and so on."
    )
    overlong_buffer: OverlongBuffer | None = setting(
        None, help="Subtract a penalty from the rewards of long responses before advantages are computed."
    )

    @property
    def shapes_rewards(self) -> bool:
        """Whether advantages have other rewards than the reward function's."""
        return self.reward_scaling is not None or self.overlong_buffer is not None
