"""Fields of samples with images, their check, and the places and positions of image tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll_batching.errors import DataError
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import GRIDS, IMAGES, PATCHES, PIXELS, FieldSpec
from roll_batching.samples.flatten import row_indices, starts_of
from roll_batching.samples.token_fields import token_place

RESPONSE = "response_mask"
"""token, bool, where a batch has it: image tokens that a model sampled are text wherever they are. It is cleared for
masked samples (`mask_overlong`), whose sampled tokens are unknown then: all may be."""
IMAGE_SCHEMA = {
    PIXELS: FieldSpec("rows", counts=PATCHES),
    GRIDS: FieldSpec("rows", counts=IMAGES),
    PATCHES: FieldSpec("sample"),
    IMAGES: FieldSpec("sample"),
}
"""Kinds of the four fields. A batch without them is a text batch."""


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How a model takes images, in transformers' names."""

    patch_size: int
    """Pixels along a side of a patch."""
    spatial_merge_size: int
    """Patches along a side that become one token."""
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Images of a batch: their tokens in the flat `input_ids`, and positions of all tokens. All int64, on the host."""

    positions: Tensor
    """[3, tokens]: position of each token on the axes time, height and width (M-RoPE)."""
    image: Tensor
    """[tokens]: image that a token belongs to, a row of `grids`; -1: none."""
    starts: Tensor
    """[images]: first token of each image."""
    sizes: Tensor
    """[images]: tokens of each image."""
    grids: Tensor
    """[images, 3]: as in the batch."""
    patches: Tensor
    """[images + 1]: first row of each image in `PIXELS`, and the number of rows."""

    def next_positions(self, batch: SampleBatch) -> Tensor:
        """Position of the token after each sample, the same on all axes, [samples]."""
        owner = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        largest = torch.zeros(len(batch), dtype=torch.int64)
        return largest.scatter_reduce_(0, owner, self.positions.amax(0), "amax") + 1


def has_images(batch: SampleBatch) -> bool:
    """Whether a batch has any of the image fields."""
    return any(name in batch.schema for name in IMAGE_SCHEMA)


def find_images(batch: SampleBatch, form: ImageFormat) -> ImageTokens:
    """The images of a batch, checked.

    The first runs of image tokens of a sample are its images. Surplus runs count as text, since a model may sample
    image tokens. In the prompt, a surplus run between the tokens that begin and end an image is an error.

    Args:
        batch: samples with the four image fields, or none of them.
        form: how the model takes them.

    Raises:
        DataError: for fields that contradict each other or the tokens; names the sample.
    """
    with_images = has_images(batch)
    if with_images:
        _check_fields(batch, form)
    ids = batch["input_ids"].cpu().long()
    count = len(batch)
    # A video token after the token that begins one is a video; a sampled video token is text.
    is_video = (ids[1:] == form.video_token_id) & (ids[:-1] == form.vision_start_token_id) & ~_sampled(batch)[1:]
    if bool(is_video.any()):
        sample, _ = token_place(batch, int(is_video.nonzero()[0]))
        raise DataError(f"sample {sample} has a video: videos are not supported, images are")
    images_per_sample = batch[IMAGES].cpu().long() if with_images else torch.zeros(count, dtype=torch.int64)
    grids = batch[GRIDS].cpu().long() if with_images else torch.zeros(0, 3, dtype=torch.int64)
    sample_of = torch.repeat_interleave(torch.arange(count), images_per_sample)
    merge = form.spatial_merge_size
    if with_images:
        _check_grids(batch, grids, sample_of, merge)
    runs, sizes = _runs(ids == form.image_token_id, batch)
    is_image = _check_runs(batch, ids, form, images_per_sample, runs, sizes)
    runs, sizes = runs[is_image], sizes[is_image]
    expected_sizes = grids.prod(1) // merge**2
    if bool((wrong := (sizes != expected_sizes).nonzero().flatten()).numel()):
        first = int(wrong[0])
        raise DataError(
            f"{_image_name(batch, sample_of, first)} is {grids[first, 1]} x {grids[first, 2]} patches, which are "
            f"{expected_sizes[first]} image tokens, and its run of token {form.image_token_id} has {sizes[first]}: "
            "expand each image to height * width / spatial_merge_size ** 2 tokens, with another token between two of "
            "them"
        )
    return _locate(batch, grids, sample_of, runs, sizes, merge)


def _locate(
    batch: SampleBatch, grids: Tensor, sample_of: Tensor, runs: Tensor, sizes: Tensor, merge: int
) -> ImageTokens:
    """The image tokens of a batch with their positions; `runs` and `sizes` are first token and tokens of each image."""
    total = batch.num_tokens
    index = torch.arange(total)
    # Behind an image of n tokens positions go on from its longer side: n tokens take that many positions.
    lost = torch.zeros(len(runs) + 1, dtype=torch.int64)
    torch.cumsum(sizes - grids[:, 1:].amax(1) // merge, 0, out=lost[1:])
    ended = torch.searchsorted(runs + sizes, index, right=True)  # images that end before each token, in the batch
    owner = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    before = torch.searchsorted(sample_of, owner)  # images of the samples before
    plain = index - batch.offsets[:-1][owner] - (lost[ended] - lost[before])
    positions = plain.expand(3, -1).clone()
    image = torch.full((total,), -1, dtype=torch.int64)
    tokens = row_indices(runs, sizes)
    image[tokens] = torch.repeat_interleave(torch.arange(len(runs)), sizes)
    inside = tokens - torch.repeat_interleave(runs, sizes)
    width = torch.repeat_interleave(grids[:, 2] // merge, sizes)
    start = torch.repeat_interleave(plain[runs], sizes)
    positions[:, tokens] = torch.stack([start, start + inside // width, start + inside % width])
    return ImageTokens(
        positions=positions, image=image, starts=runs, sizes=sizes, grids=grids, patches=starts_of(grids.prod(1))
    )


def _check_fields(batch: SampleBatch, form: ImageFormat) -> None:
    for name, spec in IMAGE_SCHEMA.items():
        if batch.schema.get(name) != spec:
            problem = "is missing" if name not in batch.schema else f"has {batch.schema[name]}"
            raise DataError(
                f"the field {name} {problem}: samples with images have {', '.join(IMAGE_SCHEMA)}, as {spec}"
            )
    width = 3 * form.patch_size**2
    pixels, grids = batch[PIXELS], batch[GRIDS]
    if pixels.dtype is not torch.uint8 or tuple(pixels.shape[1:]) != (width,):
        raise DataError(
            f"{PIXELS} has {pixels.dtype} {list(pixels.shape)}: give uint8 [patches, {width}], pixels from 0 to 255 of "
            f"patches of {form.patch_size} x {form.patch_size}, without rescaling, normalisation and a second frame"
        )
    if grids.is_floating_point() or grids.dtype is torch.bool or tuple(grids.shape[1:]) != (3,):
        raise DataError(f"{GRIDS} has {grids.dtype} {list(grids.shape)}: give int64 [images, 3]")
    for name in (IMAGES, PATCHES):
        if batch[name].is_floating_point() or batch[name].dim() != 1:
            raise DataError(f"{name} has {batch[name].dtype} {list(batch[name].shape)}: give int64 [samples]")


def _check_grids(batch: SampleBatch, grids: Tensor, sample_of: Tensor, merge: int) -> None:
    bad = (grids[:, 0] != 1) | (grids[:, 1:] < merge).any(1) | (grids[:, 1:] % merge != 0).any(1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise DataError(
            f"{_image_name(batch, sample_of, first)} has the grid {grids[first].tolist()}: give 1 (videos are not "
            f"supported), height and width in patches, multiples of {merge}"
        )
    patches = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, sample_of, grids.prod(1))
    counts = batch[PATCHES].cpu().long()
    if bool((wrong := (patches != counts).nonzero().flatten()).numel()):
        first = int(wrong[0])
        raise DataError(
            f"sample {int(batch.ids[first])} has {int(counts[first])} patches in {PATCHES}, and its rows of {GRIDS} "
            f"have {int(patches[first])}: height * width of each of its images"
        )


def _check_runs(
    batch: SampleBatch, ids: Tensor, form: ImageFormat, images_per_sample: Tensor, runs: Tensor, sizes: Tensor
) -> Tensor:
    """Whether each run of image tokens is an image, [runs] bool: the first ones of a sample are. Raises `DataError`."""
    run_sample = torch.searchsorted(batch.offsets, runs, right=True) - 1
    runs_per_sample = torch.bincount(run_sample, minlength=len(batch))
    run_in_sample = torch.arange(len(runs)) - starts_of(runs_per_sample)[:-1][run_sample]
    is_image = run_in_sample < images_per_sample[run_sample]
    if bool((wrong := (runs_per_sample < images_per_sample).nonzero().flatten()).numel()):
        first = int(wrong[0])
        raise DataError(
            f"sample {int(batch.ids[first])} has {int(images_per_sample[first])} images and "
            f"{int(runs_per_sample[first])} runs of the image token {form.image_token_id}: give each image a "
            "run of its own, with another token between two"
        )
    # These tokens enclose the images of prompts: between them stands an image that was lost, not text.
    before = (runs > batch.offsets[:-1][run_sample]) & (ids[(runs - 1).clamp(min=0)] == form.vision_start_token_id)
    ends = (runs + sizes).clamp(max=max(len(ids) - 1, 0))
    behind = (runs + sizes < batch.offsets[1:][run_sample]) & (ids[ends] == form.vision_end_token_id)
    lost = before & behind & ~is_image & ~_sampled(batch)[runs]
    if bool((lost := lost.nonzero().flatten()).numel()):
        first = int(lost[0])
        sample = int(run_sample[first])
        raise DataError(
            f"sample {int(batch.ids[sample])} has image tokens ({form.image_token_id}) at position "
            f"{int(runs[first] - batch.offsets[sample])} and no image for them: it has "
            f"{int(images_per_sample[sample])} images. Give their {', '.join(IMAGE_SCHEMA)}"
        )
    return is_image


def _sampled(batch: SampleBatch) -> Tensor:
    """[tokens] bool: whether a token was sampled, by `RESPONSE`; all tokens of a sample where that is cleared."""
    spec = batch.schema.get(RESPONSE)
    if spec is None or spec.kind != "token":
        return torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask: Tensor = batch[RESPONSE].cpu().bool()
    owner = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    is_cleared = torch.bincount(owner[mask], minlength=len(batch)) == 0
    return mask | is_cleared[owner]


def _runs(marked: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """(first token, tokens) of each run of `marked` tokens inside a sample, in order."""
    first = torch.zeros_like(marked)
    first[batch.offsets[:-1]] = True
    before = torch.zeros_like(marked)
    before[1:] = marked[:-1]
    starts = (marked & (first | ~before)).nonzero().flatten()
    last = torch.ones_like(marked)
    last[:-1] = first[1:] | ~marked[1:]
    ends = (marked & last).nonzero().flatten() + 1
    return starts, ends - starts


def _image_name(batch: SampleBatch, sample_of: Tensor, image: int) -> str:
    sample = int(sample_of[image])
    number = image - int(torch.searchsorted(sample_of, sample)) + 1
    return f"image {number} of sample {int(batch.ids[sample])}"
