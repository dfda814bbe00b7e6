"""Patches of images for a model's encoder, by the image processor of its directory."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.texts.image_references import ImageError, ImageReference
from roll_batching.registry import printable

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
            kind = _processor_class()
        except ImportError as error:
            raise DataError(
                f"images need transformers and pillow ({error}): pip install 'roll-batching[vision]'"
            ) from None
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        given = {name: value for name, value in limits.items() if value is not None}
        try:
            name = str(kind.get_image_processor_dict(str(folder))[0].get("image_processor_type"))
            self._processor: Any = kind.from_pretrained(str(folder), **given)
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
        """Tokens of an image. Reads its size alone, or with `decode` all that `encode` reads. Raises ImageError.

        They do not depend on the EXIF orientation: height and width are treated alike.
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
        """The tokens of each image, as `num_tokens`; threads read several at once. Raises ImageError."""
        if len(images) < 2:
            return [self.num_tokens(image, decode=decode) for image in images]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            return list(pool.map(partial(self.num_tokens, decode=decode), images))

    def encode(self, images: Sequence[ImageReference]) -> tuple[np.ndarray, np.ndarray]:
        """Patches, uint8 `[patches, 3 * patch_size**2]`, and grids, int64 `[images, 3]`, of all `images`.

        Patches are in the order of transformers' `pixel_values`, without the repeated frame. Raises ImageError.
        """
        width = 3 * self.patch_size**2
        patches, grids = [np.zeros((0, width), dtype=np.uint8)], [np.zeros((0, 3), dtype=np.int64)]
        for image in images:
            with _opened(image) as opened:
                upright = _upright(opened)
                made = self._processor(images=[upright], do_rescale=False, do_normalize=False, return_tensors="np")
            frames = made["pixel_values"].reshape(-1, 3, self.temporal_patch_size, self.patch_size**2)
            patches.append(frames[:, :, 0].reshape(-1, width).astype(np.uint8))
            grids.append(np.asarray(made["image_grid_thw"], dtype=np.int64))
        return np.concatenate(patches), np.concatenate(grids)


def _processor_class() -> Any:
    """The processor that resizes with pillow: torchvision's resizes otherwise."""
    import PIL.Image  # noqa: F401
    import transformers

    own: Any = getattr(transformers, f"{_PROCESSOR}Pil", None)  # before 5.0 the name without Pil
    return own or getattr(transformers, _PROCESSOR)


def _upright(opened: Any) -> Any:
    """The image with its pixels, turned as EXIF says."""
    from PIL import ImageOps

    opened.load()
    return ImageOps.exif_transpose(opened)


@contextmanager
def _opened(image: ImageReference) -> Iterator[Any]:
    """The image, whose pixels are not read yet. Raises ImageError, also for errors in the block."""
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
