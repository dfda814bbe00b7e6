"""Inputs of a pack beyond its tokens: images for a vision encoder with M-RoPE positions, and shifted tokens as inputs
and labels of multi-token prediction heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.packing.pack_layout import PackLayout
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import PIXELS
from roll_batching.samples.flatten import row_indices, starts_of
from roll_batching.samples.image_fields import ImageFormat, ImageTokens, find_images, has_images
from roll_batching.settings.model_parts import VisionConfig


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Images with tokens on this rank, and the places of these tokens among the rank's embeddings."""

    pixels: torch.Tensor
    """[patches, 3 * patch_size ** 2] uint8, of whole images."""
    grids: torch.Tensor
    """[images, 3] int64: 1, height and width in patches."""
    places: torch.Tensor
    """[n] int64: embeddings to replace, by their index in [tokens of this rank * rows]."""
    features: torch.Tensor
    """[n] int64: index among the encoder's outputs of the replacement of each embedding."""


def image_format(vision: VisionConfig) -> ImageFormat:
    """How a model with this encoder takes images."""
    return ImageFormat(
        patch_size=vision.patch_size,
        spatial_merge_size=vision.spatial_merge_size,
        image_token_id=vision.image_token_id,
        video_token_id=vision.video_token_id,
        vision_start_token_id=vision.vision_start_token_id,
        vision_end_token_id=vision.vision_end_token_id,
    )


class BatchImages:
    """The images of a rank's samples, from which each of its packs takes those that it has.

    Args:
        batch: samples with the image fields, or without any.
        vision: the model's `VisionConfig`.
        part: (number, count): this rank has this part of the tokens of a context-parallel rank, under sequence
            parallelism.
        encodes: whether this rank has the encoder, as the first pipeline stage.

    Raises:
        DataError: for fields that contradict each other or the tokens.
    """

    def __init__(
        self, batch: SampleBatch, vision: VisionConfig, *, part: tuple[int, int] = (0, 1), encodes: bool = True
    ) -> None:
        self.tokens: ImageTokens = find_images(batch, image_format(vision))
        self._inside = torch.arange(batch.num_tokens)  # number of a token in its image
        self._inside -= self.tokens.starts[self.tokens.image.clamp(min=0)] if len(self.tokens.starts) else 0
        self._pixels = batch[PIXELS] if has_images(batch) else None
        self._part, self._encodes = part, encodes

    def check_cuts(self, batch: SampleBatch, plan: Plan, dp_rank: int) -> None:
        """Raises `DataError` for a sample that the plan cuts inside an image."""
        for mb in plan.micro_batches[dp_rank]:
            if mb.is_filler or not len(self.tokens.starts):
                continue
            rows = batch.rows_of(plan.ids[mb.samples])
            ends = batch.offsets[rows] + torch.tensor(mb.lengths)
            is_cut = ends < batch.offsets[rows + 1]
            image = self.tokens.image
            inside = is_cut & (image[ends.clamp(max=len(image) - 1)] >= 0)
            inside &= image[ends - 1] == image[ends.clamp(max=len(image) - 1)]
            if bool(inside.any()):
                sample = int(inside.nonzero()[0])
                raise DataError(
                    f"sample {int(batch.ids[rows[sample]])} is cut after {int(mb.lengths[sample])} tokens, inside an "
                    "image: leave it out (oversize: drop), or raise the cap of tokens"
                )

    def inputs(
        self, source: torch.Tensor, real: torch.Tensor, local_tokens: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor | None, ImageInputs | None]:
        """(positions [3, tokens / cp] of a pack's local tokens, images of this rank); None for packs without images.

        Args:
            source: [tokens] index of each token of the pack in the flat batch.
            real: [tokens] whether it belongs to a sample.
            local_tokens: [tokens / cp] indices in the pack of this context-parallel rank's tokens.
            device: of the results.
        """
        if not len(self.tokens.starts) or not bool(((self.tokens.image[source] >= 0) & real).any()):
            return None, None
        axes = self.tokens.positions[:, source[local_tokens]].to(device)
        if not self._encodes:
            return axes, None
        part, parts = self._part
        router_tokens = local_tokens.chunk(parts)[part]
        image = torch.where(real[router_tokens], self.tokens.image[source[router_tokens]], -1)
        places = (image >= 0).nonzero().flatten()
        if not len(places):
            return axes, None
        return axes, self._of_tokens(source[router_tokens][places], places, device)

    def prompts(self, tokens: torch.Tensor, places: torch.Tensor, device: torch.device) -> ImageInputs | None:
        """Images of the tokens at the flat indices `tokens` [n], whose embeddings are at `places` [n]."""
        chosen = (self.tokens.image[tokens] >= 0).nonzero().flatten()
        return self._of_tokens(tokens[chosen], places[chosen], device) if len(chosen) else None

    def _of_tokens(self, tokens: torch.Tensor, places: torch.Tensor, device: torch.device) -> ImageInputs:
        assert self._pixels is not None  # a batch without images has no image tokens
        images, image_index = self.tokens.image[tokens].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        first, last = self.tokens.patches[images], self.tokens.patches[images + 1]
        patches = row_indices(first, last - first)
        features = starts_of(self.tokens.sizes[images])[:-1][image_index] + self._inside[tokens]
        return ImageInputs(
            pixels=self._pixels.index_select(0, patches.to(self._pixels.device)).to(device),
            grids=self.tokens.grids[images].to(device),
            places=places.to(device),
            features=features.to(device),
        )


# ---- heads of multi-token prediction


@dataclass(frozen=True, kw_only=True)
class MTPInputs:
    """Inputs and labels of all heads at the local positions of a pack; heads are numbered from 1."""

    tokens: torch.Tensor
    """[heads + 1, tokens / cp] int64: entry k holds, for each position, the token k + 1 places later in its sample, or
    0 behind the sample's end. Entry k is the label of head k and the input of head k + 1."""
    rows: tuple[torch.Tensor, ...]
    """Per head, the local positions whose label counts, int64; entry k - 1 is head k's."""
    counts: tuple[int, ...]
    """Per head, the number of such positions in the whole pack, over all context-parallel ranks."""


def shift_tokens(
    layout: PackLayout, heads: int, input_ids: torch.Tensor, counted: torch.Tensor, local_tokens: torch.Tensor
) -> MTPInputs:
    """Shift the tokens of a pack without shared prefixes for its MTP heads.

    Args:
        layout: the pack's layout.
        heads: number of heads.
        input_ids: [tokens] int64, in pack order.
        counted: [tokens] bool; entry i is whether token i + 1 counts as a label.
        local_tokens: [tokens / cp] indices of this context-parallel rank's tokens.
    """
    positions = np.arange(layout.tokens)
    tokens, rows, counts, local = [], [], [], local_tokens.to(input_ids.device)
    for ahead in range(heads + 1):
        before = np.minimum(positions + ahead, layout.tokens - 1)  # predicts the token `ahead` + 1 places later
        exists = (positions + ahead < layout.tokens) & (layout.segment_ids[before] == layout.segment_ids)
        exists &= layout.predicts[before]
        index, valid = (torch.from_numpy(x).to(input_ids.device) for x in (before, exists))
        label = input_ids[(index + 1).clamp(max=layout.tokens - 1)]
        tokens.append(torch.where(valid, label, 0)[local])
        if ahead:
            labelled = counted[index] & valid
            rows.append(labelled[local].nonzero()[:, 0])
            counts.append(int(labelled.sum()))
    return MTPInputs(tokens=torch.stack(tokens), rows=tuple(rows), counts=tuple(counts))
