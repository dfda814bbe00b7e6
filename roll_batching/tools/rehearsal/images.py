"""Images of rehearsed samples: one for each, as large as the job's limits and the prompt allow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.packing.prefetch import map_tensors
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import GRIDS, IMAGES, PATCHES, PIXELS
from roll_batching.samples.image_fields import IMAGE_SCHEMA
from roll_batching.settings.vision import VisionConfig

_AROUND = 3
"""Tokens of a prompt beside those of its image: its start, its end, and one of text."""
_LONGEST = 4
"""Largest ratio of an image's sides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Sizes of the images of a job."""

    vision: VisionConfig
    least: int
    """Fewest tokens of an image."""
    most: int
    """Most tokens of an image."""
    prompt: int | None
    """Most tokens of a prompt; None: samples have no separate prompts."""

    @property
    def side(self) -> int:
        """Pixels along a side of a token."""
        return self.vision.patch_size * self.vision.spatial_merge_size

    def largest(self, length: int) -> tuple[int, int] | None:
        """(height, width) in tokens of the image of a sample of `length` tokens; None: it has room for none."""
        room = min(self.most, min(length, self.prompt or length) - _AROUND)
        if room < self.least or room < 1:
            return None
        heights = range(math.isqrt(room), math.isqrt((room - 1) // _LONGEST), -1)
        height = max(heights, key=lambda height: height * (room // height))  # the first of several: nearest to a square
        width = room // height
        return (height, width) if height * width >= self.least else None

    def note(self, lengths: Sequence[int]) -> str:
        """Assumption about samples of these lengths, for the report."""
        found = [self.largest(length) for length in lengths]
        grids = sorted({grid for grid in found if grid is not None}, key=math.prod)
        if not grids:
            return f"images: none, as no sample has room for {self.least:,} tokens"
        height, width = grids[-1]
        size = f"{width * self.side:,} x {height * self.side:,} pixels = {height * width:,} tokens"
        who = "each sample" if None not in found else f"each sample with room for {self.least:,} tokens"
        room = f"the prompt's {self.prompt:,} tokens" if self.prompt else "the sample"
        most = "" if len(grids) == 1 else "at most "
        return (
            f"images: {who} has one, of {most}{size}: what fits {room} and the limit of {self.most:,} tokens per image"
        )


def image_sizes(config: JobConfig) -> ImageSizes | None:
    """Sizes of the images of a job; None for a job of texts.

    Raises `ConfigFileError` where the largest size is unknown, and the errors of the directory's image processor.
    """
    train = config.actor_train
    data, architecture = train.data_args, train.model_args.architecture
    if data.images is None or architecture is None or architecture.vision is None:
        return None
    low, high, name = data.image_min_pixels, data.image_max_pixels, train.model_args.model_name_or_path
    if low is None or high is None:
        limits = None if name is None else _limits_of(name, low, high)
        if limits is not None:
            low, high = limits
    if high is None:
        text = f"is missing, and {name} is not a directory here: a rehearsal needs the largest size of images"
        raise config.error(Problem(("actor_train", "data_args", "image_max_pixels"), text))
    vision = architecture.vision
    pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    return ImageSizes(
        vision=vision,
        least=max(1, -(-(low or 1) // pixels)),
        most=max(1, high // pixels),
        prompt=None if config.is_supervised else config.prompt_length,
    )


def _limits_of(name: str, low: int | None, high: int | None) -> tuple[int, int] | None:
    """Fewest and most pixels of an image by the processor of the directory `name`; None without a directory."""
    from roll_batching.huggingface.directory import find_directory
    from roll_batching.jobs.texts.image_processor import ImageProcessor

    folder = find_directory(name)
    return None if folder is None else ImageProcessor(folder, low, high).limits


def with_images(batch: SampleBatch, sizes: ImageSizes) -> SampleBatch:
    """`batch`, whose tokens are zeros, with the largest image of each sample at its start and zeros as pixels."""
    vision = sizes.vision
    ids, merge = batch["input_ids"].clone(), vision.spatial_merge_size
    fields: dict[str, torch.Tensor] = {"input_ids": ids}
    mask = batch["response_mask"].clone() if "response_mask" in batch.schema else None
    grids, images = [], []
    for start, length in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False):
        grid = sizes.largest(length)
        images.append(int(grid is not None))
        if grid is None:
            continue
        tokens = math.prod(grid)
        ids[start] = vision.vision_start_token_id
        ids[start + 1 : start + 1 + tokens] = vision.image_token_id
        ids[start + 1 + tokens] = vision.vision_end_token_id
        if mask is not None:
            mask[start : start + tokens + 2] = False
        grids.append([1, merge * grid[0], merge * grid[1]])
    if not grids:
        return batch
    fields[GRIDS] = torch.tensor(grids)
    fields[IMAGES] = torch.tensor(images)
    fields[PATCHES] = torch.zeros(len(batch), dtype=torch.int64)
    fields[PATCHES][fields[IMAGES] > 0] = fields[GRIDS].prod(1)
    fields[PIXELS] = torch.zeros(int(fields[PATCHES].sum()), 3 * vision.patch_size**2, dtype=torch.uint8)
    if mask is not None:
        fields["response_mask"] = mask
    schema = {name: batch.schema[name] for name in fields if name in batch.schema} | IMAGE_SCHEMA
    return batch.with_fields(fields, schema)


def prompts_with_images(count: int, context: int, sizes: ImageSizes) -> SampleBatch:
    """Prompts of `context` tokens with images."""
    lengths = torch.full((count,), context)
    fields = {"input_ids": torch.zeros(count * context, dtype=torch.int64)}
    return with_images(SampleBatch(torch.arange(count), lengths, fields, {"input_ids": FieldSpec("token")}), sizes)


def images_of_rows(model: Any, sizes: ImageSizes, context: int, prompt_of: Sequence[int], *, with_values: bool) -> Any:
    """`strategy.prompt_images.SequenceImages` of rows of a rollout, by the prompt of each.

    Places of images are found on the host. `with_values`: on real tensors.
    """
    from roll_batching.strategy.prompt_images import PromptImages, SequenceImages

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if with_values else torch.empty(tensor.shape, dtype=tensor.dtype, device=model.device)

    class RowImages(SequenceImages):
        def of_prefill(self, firsts: Sequence[int], width: int) -> Any:
            with _disable_current_modes():
                axes, images = super().of_prefill(firsts, width)
            return copy(axes), keep_grids(map_tensors(images, copy), images)

    on_host = dataclasses.replace(model, layout=dataclasses.replace(model.layout, device=torch.device("cpu")))
    with _disable_current_modes():
        source = PromptImages(prompts_with_images(max(prompt_of) + 1, context, sizes), on_host)
        rows = RowImages(source, torch.tensor(prompt_of))
    rows._shifts = copy(rows._shifts)
    return rows


def keep_grids(copied: Any, images: Any) -> Any:
    """`copied` with the grids of `images`, whose values decide shapes inside the encoder; both may be None."""
    return None if images is None else dataclasses.replace(copied, grids=images.grids)
