"""Makes samples and packs for passes on fake tensors: real lengths, shapes and image sizes, but no contents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.losses.distillation import TEACHER_IDS, TEACHER_LOG_PROBS
from roll_batching.modeling.attention.varlen import VarlenSpans
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.prefetch import map_tensors
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.fields import GRIDS, IMAGES, PATCHES, PIXELS, ROLLOUT_IDS, FieldKind
from roll_batching.samples.image_fields import IMAGE_SCHEMA
from roll_batching.settings.model_parts import VisionConfig
from roll_batching.tools.rehearsal.recorder import set_attention_pairs

_NEXT_TOKENS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
_OF_SAMPLES = ("advantages", "rewards", "reference_point")


def samples_of(plan: Plan, dp_rank: int, top_k: int = 0, *, token_advantages: bool = False) -> SampleBatch:
    """Makes the samples that `plan` assigns to a data-parallel rank, with every field that a loss may read.

    Lengths are real, contents zeros. All tokens are response tokens; samples 2i and 2i + 1 are a pair. `top_k`: likely
    tokens of a teacher at each position; 0: no teacher. `token_advantages`: advantages per token, not per sample.
    """
    indices = plan.rank_samples(dp_rank)
    lengths = torch.from_numpy(plan.lengths[indices].copy())
    ids, count, tokens = torch.from_numpy(plan.ids[indices].copy()), len(lengths), int(lengths.sum())
    fields: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "response_mask": torch.ones(tokens, dtype=torch.bool),
        **{name: torch.zeros(tokens) for name in _NEXT_TOKENS},
        **{name: torch.zeros(count) for name in _OF_SAMPLES},
        "pair": ids // 2,
        "chosen": ids % 2 == 0,
        "desirable": ids % 2 == 0,
        ROLLOUT_IDS: ids,
    }
    kinds: dict[str, FieldKind] = {
        "input_ids": "token",
        "response_mask": "token",
        **dict.fromkeys(_NEXT_TOKENS, "next_token"),
        **dict.fromkeys(_OF_SAMPLES, "sample"),
        "pair": "sample",
        "chosen": "sample",
        "desirable": "sample",
        ROLLOUT_IDS: "sample",
    }
    if top_k:
        fields[TEACHER_LOG_PROBS] = torch.zeros(tokens, top_k)
        fields[TEACHER_IDS] = torch.zeros(tokens, top_k, dtype=torch.int32)
        kinds |= {TEACHER_LOG_PROBS: "next_token", TEACHER_IDS: "next_token"}
    if token_advantages:
        fields["advantages"], kinds["advantages"] = torch.zeros(tokens), "next_token"
    return SampleBatch(ids, lengths, fields, {name: FieldSpec(kind) for name, kind in kinds.items()})


def samples_of_critic(plan: Plan, dp_rank: int) -> SampleBatch:
    """Makes the samples of `samples_of` with the fields of the critic's loss only."""
    local = samples_of(plan, dp_rank).only(("input_ids", "response_mask"))
    names = ("returns", "old_values")
    return local.with_fields(
        {name: torch.zeros(local.num_tokens) for name in names}, {name: FieldSpec("next_token") for name in names}
    )


def fake_pack(pack: PackedBatch, device: torch.device, top_k: int = 0) -> PackedBatch:
    """Copy of `pack` with a fake tensor of the same shape and dtype on `device` for every tensor.

    Call it under a FakeTensorMode. Fields that share a tensor share the fake one. A teacher's fields have `top_k`
    tokens at each position, however many `pack` has: for the whole vocabulary they would fill the host's memory.
    """
    result = _copied(pack, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    for name in {TEACHER_LOG_PROBS, TEACHER_IDS} & set(result.fields):
        result.fields[name] = result.fields[name].new_empty(len(result.fields[name]), top_k)
    if pack.params.images is not None:
        result.params.images = keep_grids(result.params.images, pack.params.images)
    for real, fake in zip((pack.params, *pack.slices), (result.params, *result.slices), strict=True):
        if isinstance(spans := real.attention, VarlenSpans):
            queries, keys = spans.cu_queries.long().diff(), spans.cu_keys.long().diff()
            # Under the causal mask; the last query of a span sees all its keys.
            pairs = int((queries * keys - queries * (queries - 1) // 2).sum())
            set_attention_pairs(fake.attention.cu_queries, pairs)
    return result


def real_pack(pack: PackedBatch) -> PackedBatch:
    """Copy of `pack` in new memory, so that a recorder sees its allocation."""
    return _copied(pack, torch.clone)


def _copied(pack: PackedBatch, copy: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor)
        return copies[id(tensor)]

    result: PackedBatch = map_tensors(pack, copied)
    return result


# ---- images


_AROUND = 3
"""Fewest other tokens of a prompt with an image: the image's start and end token, and one of text."""
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
        """Sentence for the report: the assumed images of samples of these lengths."""
        largest = [self.largest(length) for length in lengths]
        grids = sorted({grid for grid in largest if grid is not None}, key=math.prod)
        if not grids:
            return f"images: none, as no sample has room for {self.least:,} tokens"
        height, width = grids[-1]
        size = f"{width * self.side:,} x {height * self.side:,} pixels = {height * width:,} tokens"
        who = "each sample" if None not in largest else f"each sample with room for {self.least:,} tokens"
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
        from roll_batching.huggingface.directory import find_directory
        from roll_batching.jobs.texts.image_tokenizer import ImageProcessor

        folder = None if name is None else find_directory(name)
        if folder is not None:
            low, high = ImageProcessor(folder, low, high).limits
    if high is None:
        text = (
            f"is missing, and {name} is not a directory here: set it, as a rehearsal needs the largest size of images"
        )
        raise config.error(Problem(("actor_train", "data_args", "image_max_pixels"), text))
    vision = architecture.vision
    pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    return ImageSizes(
        vision=vision,
        least=max(1, -(-(low or 1) // pixels)),
        most=max(1, high // pixels),
        prompt=None if config.is_supervised else config.prompt_length,
    )


def with_images(batch: SampleBatch, sizes: ImageSizes) -> SampleBatch:
    """Copy of `batch` in which each sample begins with its largest image; pixels are zeros.

    The tokens of `batch` must be zeros. Samples without room for an image stay as they are.
    """
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
    """Makes the `strategy.images.SequenceImages` of the rows of a rollout.

    `prompt_of`: index of each row's prompt. Positions of images are computed on the host. `with_values`: the result has
    real tensors, not fake ones.
    """
    from roll_batching.strategy.images import PromptImages, SequenceImages

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
    rows._shifts = copy(rows._shifts)  # read on the device, unlike the positions
    return rows


def keep_grids(copied: Any, images: Any) -> Any:
    """Copy of `copied` with the real grids of `images`: their values decide shapes inside the encoder.

    Both may be None.
    """
    return None if images is None else dataclasses.replace(copied, grids=images.grids)
