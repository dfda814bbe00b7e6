"""Tokenizer of a model that reads images, and the image fields of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from roll_batching.errors import DataError
from roll_batching.huggingface.directory import CONFIG, read_json
from roll_batching.jobs.texts.image_processor import ImageProcessor
from roll_batching.jobs.texts.image_references import ImageError, ImageFields
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer, digest_of
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import GRIDS, IMAGES, PATCHES, PIXELS
from roll_batching.samples.image_fields import IMAGE_SCHEMA

_TOKENS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")


class ImageTokenizer(HFTokenizer):
    """A Hugging Face tokenizer with the image processor of a model directory.

    `encode` gives one token per image; `expand` repeats it.

    Args:
        name_or_path: as for `HFTokenizer`, and likewise `eos`, `pad` and `model`.
        folder: the model directory.
        min_pixels: see `ImageProcessor`, and likewise `max_pixels`.

    Raises:
        DataError: all of both, and for a tokenizer without the tokens of images in `config.json`.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        folder: Path,
        eos: str | None = None,
        pad: str | None = None,
        model: str | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        super().__init__(name_or_path, eos=eos, pad=pad, model=model)
        self.processor = ImageProcessor(folder, min_pixels, max_pixels)
        config = read_json(folder / CONFIG)
        if missing := [name for name in _TOKENS if not isinstance(config.get(name), int)]:
            raise DataError(f"{folder / CONFIG} has no {', '.join(missing)}, which images need")
        self.image_token_id: int = config["image_token_id"]
        self._video_token_id = config.get("video_token_id")
        ids = [config[name] for name in _TOKENS]
        self.image_text = "".join(str(self.tokenizer.convert_ids_to_tokens(token)) for token in ids)
        if self.encode(self.image_text) != ids or not {*ids} <= {*self.tokenizer.get_added_vocab().values()}:
            raise DataError(
                f"the tokenizer {self.name!r} does not encode {self.image_text!r} as the special tokens {ids} that "
                f"config.json of {folder} gives to an image: it belongs to another model"
            )

    @property
    def fingerprint(self) -> str:
        """Digest of the tokenizer and of the image processor's settings."""
        return digest_of(super().fingerprint, self.processor.settings)

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """Those of the tokenizer, and the image processor's settings."""
        return {**super().parts, "images": digest_of(self.processor.settings)}

    def expand(self, tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
        """`tokens` with the image token of each image repeated as `counts` says.

        Raises DataError for another number of images, and for the token of videos.
        """
        if self._video_token_id in tokens:
            name = self.tokenizer.convert_ids_to_tokens(self._video_token_id)
            raise DataError(f"it holds {name}, the token of videos, which are not supported")
        found = sum(token == self.image_token_id for token in tokens)
        if found != len(counts):
            raise DataError(
                f"its tokens hold {found} image tokens for {len(counts)} images: a text may not contain them itself, "
                "and the chat template must write one for each image part (that of the model's processor does)"
            )
        following = iter(counts)
        repeats = [next(following) if token == self.image_token_id else 1 for token in tokens]
        return [token for token, repeat in zip(tokens, repeats, strict=True) for _ in range(repeat)]


def image_fields(key: str | None, tokenizer: Tokenizer) -> ImageFields | None:
    """How images of records under `key` are read; None without images."""
    if key is None or not isinstance(tokenizer, ImageTokenizer):
        return None
    return ImageFields(key=key, text=tokenizer.image_text)


def with_images(batch: SampleBatch, items: Sequence[Any], tokenizer: Tokenizer) -> SampleBatch:
    """`batch` with the fields of the images of `items`, one sample each; unchanged for other tokenizers.

    Raises DataError, naming file and line, for an image that cannot be read or has another size than before.
    """
    if not isinstance(tokenizer, ImageTokenizer):
        return batch
    encoded = []
    for item in items:
        try:
            encoded.append(tokenizer.processor.encode(item.images))
        except ImageError as error:
            raise DataError(f"{item.source}: {error.what}. {error.cure}") from None
    none = tokenizer.processor.encode(())  # a rank may have no sample
    pixels, grids = ([torch.from_numpy(part) for part in parts] for parts in zip(*encoded, none, strict=True))
    fields = {
        PATCHES: torch.tensor([len(own) for own, _ in encoded], dtype=torch.int64),
        IMAGES: torch.tensor([len(own) for _, own in encoded], dtype=torch.int64),
        PIXELS: torch.cat(pixels),
        GRIDS: torch.cat(grids),
    }
    return batch.with_fields(fields, IMAGE_SCHEMA)


def with_images_of(responses: SampleBatch, prompts: SampleBatch, group_size: int) -> SampleBatch:
    """`responses`, `group_size` in a row to each of `prompts`, with the images of their prompts."""
    if PIXELS not in prompts:
        return responses
    fields = {name: _repeat(prompts, name, group_size).to(responses.device) for name in IMAGE_SCHEMA}
    return responses.with_fields(fields, IMAGE_SCHEMA)


def _repeat(prompts: SampleBatch, name: str, count: int) -> torch.Tensor:
    """The field `name` with the rows of each prompt `count` times in a row."""
    rows = [row for row in prompts.to_lists(name) for _ in range(count)]
    if not rows:
        return torch.as_tensor(prompts[name])
    return torch.cat(rows) if prompts.schema[name].kind == "rows" else torch.stack(rows)
