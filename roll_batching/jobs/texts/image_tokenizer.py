"""Tokenizer and image processor of a model that reads images, and the image fields of batches."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.huggingface.directory import CONFIG, read_json
from roll_batching.jobs.texts.image_references import ImageError, ImageFields, ImageReference
from roll_batching.jobs.texts.tokenizers import HFTokenizer, Tokenizer, digest_of
from roll_batching.registry import printable
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import GRIDS, IMAGES, PATCHES, PIXELS
from roll_batching.samples.image_fields import IMAGE_SCHEMA

_PROCESSOR = "Qwen2VLImageProcessor"
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes of 8 bits per channel, which become RGB without clipping."""
_BROKEN = "Write the image again, for example as PNG or JPEG, or remove the record."
_THREADS = 8


class ImageProcessor:
    """The image processor of a model directory, without rescaling and normalisation.

    Args:
        folder: the directory, with `preprocessor_config.json`.
        min_pixels: fewest pixels of a resized image; None: as in the directory.
        max_pixels: most pixels of a resized image; None: as in the directory.

    Raises:
        DataError: without transformers or pillow, for another processor, or limits that exclude each other.
    """

    def __init__(self, folder: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        try:
            # The processor that resizes with pillow: torchvision's resizes otherwise.
            import PIL.Image  # noqa: F401
            import transformers

            kind: Any = getattr(transformers, f"{_PROCESSOR}Pil", None)  # before 5.0 the name without Pil
            kind = kind or getattr(transformers, _PROCESSOR)
        except ImportError as error:
            raise DataError(
                f"images need transformers and pillow ({error}): pip install 'roll-batching[vision]'"
            ) from None
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        set_limits = {name: value for name, value in limits.items() if value is not None}
        try:
            name = str(kind.get_image_processor_dict(str(folder))[0].get("image_processor_type"))
            self._processor: Any = kind.from_pretrained(str(folder), **set_limits)
        except (OSError, ValueError) as error:
            raise DataError(f"no image processor could be loaded from {folder}: {error}") from None
        if not name.startswith(_PROCESSOR):
            raise DataError(f"the image processor of {folder} is {name}; images are read for {_PROCESSOR}")
        if not self._processor.do_resize or not self._processor.do_convert_rgb:
            raise DataError(
                f"preprocessor_config.json of {folder} turns do_resize or do_convert_rgb off: leave them on"
            )
        self.patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size
        self.temporal_patch_size: int = self._processor.temporal_patch_size
        shortest, longest = self.limits
        if not 0 < shortest <= longest:
            raise DataError(
                f"images have at least {shortest:,} and at most {longest:,} pixels, which is impossible: correct "
                "image_min_pixels and image_max_pixels"
            )

    @property
    def limits(self) -> tuple[int, int]:
        """Fewest and most pixels of a resized image."""
        size = self._processor.size
        return int(size["shortest_edge"]), int(size["longest_edge"])

    @property
    def settings(self) -> str:
        """Everything that decides patches and their number, as JSON."""
        names = ("patch_size", "merge_size", "temporal_patch_size", "resample", "image_mean", "image_std")
        values = {name: getattr(self._processor, name) for name in names}
        return json.dumps(values | {"limits": self.limits}, sort_keys=True, default=str)

    def num_tokens(self, image: ImageReference, *, decode: bool = False) -> int:
        """Counts the tokens of an image. Reads its size alone, or with `decode` the whole image. Raises ImageError.

        The number does not depend on the EXIF orientation: height and width are treated alike.
        """
        with _opened(image) as opened:
            width, height = opened.size
            if decode:
                _upright(opened)
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:  # more than 200 times as long as wide
            raise ImageError(f"{image} has {width:,} x {height:,} pixels: {error}", _BROKEN) from None
        return int(patches) // self.merge_size**2

    def count_tokens(self, images: Sequence[ImageReference], *, decode: bool = False) -> list[int]:
        """Counts the tokens of each image, as `num_tokens`; threads read several images at once. Raises ImageError."""
        if len(images) < 2:
            return [self.num_tokens(image, decode=decode) for image in images]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            return list(pool.map(partial(self.num_tokens, decode=decode), images))

    def encode(self, images: Sequence[ImageReference]) -> tuple[np.ndarray, np.ndarray]:
        """Returns patches, uint8 `[patches, 3 * patch_size**2]`, and grids, int64 `[images, 3]`, of all `images`.

        Patches are in the order of transformers' `pixel_values`, without the repeated frame. Raises ImageError.
        """
        width = 3 * self.patch_size**2
        patches, grids = [np.zeros((0, width), dtype=np.uint8)], [np.zeros((0, 3), dtype=np.int64)]
        for image in images:
            with _opened(image) as opened:
                upright = _upright(opened)
                processed = self._processor(images=[upright], do_rescale=False, do_normalize=False, return_tensors="np")
            frames = processed["pixel_values"].reshape(-1, 3, self.temporal_patch_size, self.patch_size**2)
            patches.append(frames[:, :, 0].reshape(-1, width).astype(np.uint8))
            grids.append(np.asarray(processed["image_grid_thw"], dtype=np.int64))
        return np.concatenate(patches), np.concatenate(grids)


def _upright(opened: Any) -> Any:
    """Reads the image's pixels, and turns it as EXIF says."""
    from PIL import ImageOps

    opened.load()
    return ImageOps.exif_transpose(opened)


@contextmanager
def _opened(image: ImageReference) -> Iterator[Any]:
    """Opens the image without reading its pixels. Raises ImageError, also for errors in the block."""
    import PIL.Image

    source: Any = image.path if image.path is not None else io.BytesIO(image.data)
    try:
        if image.path is not None and not image.path.is_file():
            what = "is not a regular file" if image.path.exists() else "does not exist"
            raise ImageError(f"the image {image} {what}", "Give the path of an image file.")
        with PIL.Image.open(source) as opened:
            _check(image, opened)
            yield opened
    except ImageError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise ImageError(f"{image} has too many pixels ({error})", "Make it smaller.") from None
    except PIL.UnidentifiedImageError:
        raise ImageError(f"{image} is not an image that pillow reads", _BROKEN) from None
    except Exception as error:  # pillow's readers raise ValueError, TypeError, NotImplementedError and others
        reason = printable(str(error) or type(error).__name__, characters=200)
        raise ImageError(f"{image} cannot be read ({reason})", _BROKEN) from None


def _check(image: ImageReference, opened: Any) -> None:
    import PIL.Image

    width, height = opened.size
    # Pillow only warns up to twice this. Filters of warnings belong to the process, and threads read images.
    if (most := PIL.Image.MAX_IMAGE_PIXELS) is not None and width * height > most:
        raise ImageError(f"{image} has too many pixels ({width:,} x {height:,}, above {most:,})", "Make it smaller.")
    if not width or not height:
        raise ImageError(f"{image} has {width} x {height} pixels", _BROKEN)
    if opened.mode not in _MODES:
        text = "Save it with 8 bits per channel: other pixels would be clipped."
        raise ImageError(f"{image} has pixels of mode {opened.mode!r}", text)
    if getattr(opened, "is_animated", False) and opened.format != "MPO":
        text = "Save one frame: videos and animations are not supported."
        raise ImageError(f"{image} has {opened.n_frames} frames", text)


# ---- image tokenizer


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
            raise DataError(
                f"{folder / CONFIG} has no {', '.join(missing)}, which images need: copy "
                f"{CONFIG} from the directory of the original model"
            )
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
        """Digested parts of the tokenizer, and the image processor's settings."""
        return {**super().parts, "images": digest_of(self.processor.settings)}

    def expand(self, tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Repeats the image token of each image in `tokens` as often as `counts` says.

        Raises DataError for another number of images, and for the token of videos.
        """
        if self._video_token_id in tokens:
            name = self.tokenizer.convert_ids_to_tokens(self._video_token_id)
            raise DataError(f"it holds {name}, the token of videos, which are not supported: remove it")
        count = sum(token == self.image_token_id for token in tokens)
        if count != len(counts):
            raise DataError(
                f"its tokens hold {count} image tokens for {len(counts)} images: a text may not contain them itself, "
                "and the chat template must write one for each image part (that of the model's processor does)"
            )
        following = iter(counts)
        repeats = [next(following) if token == self.image_token_id else 1 for token in tokens]
        return [token for token, repeat in zip(tokens, repeats, strict=True) for _ in range(repeat)]


def image_fields(key: str | None, tokenizer: Tokenizer) -> ImageFields | None:
    """Makes the reader of images under `key` of records; None without images."""
    if key is None or not isinstance(tokenizer, ImageTokenizer):
        return None
    return ImageFields(key=key, text=tokenizer.image_text)


def with_images(batch: SampleBatch, items: Sequence[Any], tokenizer: Tokenizer) -> SampleBatch:
    """Adds the fields of the images of `items`, one item per sample, to `batch`; for an `ImageTokenizer` only.

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
    none = tokenizer.processor.encode(())  # empty arrays, as a rank may have no sample to concatenate
    pixels, grids = ([torch.from_numpy(part) for part in parts] for parts in zip(*encoded, none, strict=True))
    fields = {
        PATCHES: torch.tensor([len(rows) for rows, _ in encoded], dtype=torch.int64),
        IMAGES: torch.tensor([len(rows) for _, rows in encoded], dtype=torch.int64),
        PIXELS: torch.cat(pixels),
        GRIDS: torch.cat(grids),
    }
    return batch.with_fields(fields, IMAGE_SCHEMA)


def with_images_of(responses: SampleBatch, prompts: SampleBatch, group_size: int) -> SampleBatch:
    """Adds the images of `prompts` to their `responses`, of which each prompt has `group_size` consecutive ones."""
    if PIXELS not in prompts:
        return responses
    fields = {name: _repeat(prompts, name, group_size).to(responses.device) for name in IMAGE_SCHEMA}
    return responses.with_fields(fields, IMAGE_SCHEMA)


def _repeat(prompts: SampleBatch, name: str, count: int) -> torch.Tensor:
    """Returns the field `name` with the rows of each prompt repeated `count` times."""
    rows = [row for row in prompts.to_lists(name) for _ in range(count)]
    if not rows:
        return torch.as_tensor(prompts[name])
    return torch.cat(rows) if prompts.schema[name].kind == "rows" else torch.stack(rows)
