"""Prompts for engines: PNG files of resized images, and one token per image."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_batching.jobs.engines.protocol import PromptImages
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import GRIDS, PIXELS


def images_of_prompts(prompts: SampleBatch, vision: Any) -> list[PromptImages | None]:
    """The images of each prompt, None for one without; `vision` is the model's `VisionConfig`.

    An engine resizes them to the size that they have, as long as its own limits of pixels allow that.
    """
    if PIXELS not in prompts:
        return [None] * len(prompts)
    columns = (prompts.to_lists(name) for name in ("input_ids", PIXELS, GRIDS))
    return [
        _images(tokens.tolist(), pixels.cpu().numpy(), grids.tolist(), vision) if len(grids) else None
        for tokens, pixels, grids in zip(*columns, strict=True)
    ]


def _images(tokens: list[int], pixels: np.ndarray, grids: Sequence[Sequence[int]], vision: Any) -> PromptImages:
    marked = [token == vision.image_token_id for token in tokens]
    shorter = [token for place, token in enumerate(tokens) if not (marked[place] and place and marked[place - 1])]
    data, start = [], 0
    for _, height, width in grids:
        rows = pixels[start : start + height * width]
        data.append(_png(picture_of(rows, height, width, vision.patch_size, vision.spatial_merge_size)))
        start += height * width
    return PromptImages(tokens=shorter, data=tuple(data))


def picture_of(patches: np.ndarray, height: int, width: int, patch: int, merge: int) -> np.ndarray:
    """Pixels, uint8 `[y, x, 3]`, of an image of `height * width` patches in the order of `pixel_values`."""
    blocks = patches.reshape(height // merge, width // merge, merge, merge, 3, patch, patch)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * patch, width * patch, 3)


def _png(pixels: np.ndarray) -> str:
    """The image as a data: URL."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
