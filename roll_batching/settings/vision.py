"""Settings of a vision encoder (Qwen2.5-VL's), whose outputs replace the embeddings of image tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from roll_batching.settings.fields import MOST_TOKENS, Settings, setting

_MOST = 2**16


class VisionConfig(Settings):
    """The vision encoder of Qwen2.5-VL, in transformers' names, and how its outputs enter the text model."""

    depth: int = setting(help="Layers.", gt=0, le=_MOST)
    hidden_size: int = setting(help="Width of a layer.", gt=0, le=_MOST)
    intermediate_size: int = setting(help="Width of the gated feed-forward layer.", gt=0, le=_MOST)
    num_heads: int = setting(help="Heads of attention.", gt=0, le=_MOST)
    patch_size: int = setting(14, help="Pixels along a side of a patch.", gt=0, le=_MOST)
    temporal_patch_size: int = setting(2, help="Frames of a patch; of an image they are equal.", gt=0, le=_MOST)
    spatial_merge_size: int = setting(2, help="Patches along a side that become one token.", gt=0, le=_MOST)
    window_size: int = setting(112, help="Pixels along a side of the windows of attention.", gt=0, le=_MOST)
    fullatt_block_indexes: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (7, 15, 23, 31), help="Layers whose attention has no windows."
    )
    image_mean: tuple[float, float, float] = setting(
        (0.48145466, 0.4578275, 0.40821073), help="Mean of each channel, of pixels from 0 to 1."
    )
    image_std: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (
        setting((0.26862954, 0.26130258, 0.27577711), help="Standard deviation of each channel.")
    )
    mrope_section: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (
        setting((16, 24, 24), help="Pairs of rotated channels by the axis of their position: time, height, width.")
    )
    image_token_id: int = setting(help="Token that stands for a part of an image.", ge=0, le=MOST_TOKENS)
    video_token_id: int = setting(help="The same for videos, which are not supported.", ge=0, le=MOST_TOKENS)
    vision_start_token_id: int = setting(help="Token before an image.", ge=0, le=MOST_TOKENS)
    vision_end_token_id: int = setting(help="Token behind an image.", ge=0, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _check_shape(self) -> VisionConfig:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(f"hidden_size must be a multiple of 4 * num_heads = {4 * self.num_heads}")
        if self.window_size < self.patch_size * self.spatial_merge_size:
            raise ValueError("window_size must be at least patch_size * spatial_merge_size")
        return self
