"""Reads which images a record has: their files or bytes, and their places in its text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from roll_batching.jobs.texts.faults import Fault
from roll_batching.registry import printable

MARKER = "<image>"
"""Place of an image in a text, as in the data files of ROLL and verl."""
_BASE64_PREFIXES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Beginnings of PNG, JPEG, GIF and WebP files as base64."""
_SHORTEST_BASE64 = 64
_LONGEST_PATH = 4096
"""Bytes of a path on Linux."""
_SHOWN = 200
"""Characters of a path in an error."""
_ACCEPTED_FORMS = (
    "An image is a path relative to the data file, an absolute path, a data: URL, base64, or in Parquet a value with "
    "`bytes` or `path`."
)
_IMAGE_KEYS = ("bytes", "url", "path")
"""Keys of an object that stands for an image; the first one present counts: a path with bytes is a mere name."""


class ImageError(Fault):
    """A fault of a record's images."""


@dataclass(frozen=True, slots=True)
class ImageReference:
    """A file of an image, or its bytes."""

    path: Path | None = None
    data: bytes = b""

    @property
    def name(self) -> str:
        """The path, or the number of bytes, for rewards."""
        return f"an image of {len(self.data):,} bytes" if self.path is None else str(self.path)

    def __str__(self) -> str:
        """The name for errors: one line, without control characters."""
        return printable(self.name, characters=_SHOWN)

    def digest(self) -> str:
        """Digest of the bytes; for a file, its name and size instead, so that ranks need not read all files."""
        if self.path is None:
            return hashlib.sha256(self.data).hexdigest()
        try:
            size = os.stat(self.path).st_size
        except (OSError, ValueError):  # ValueError: a null byte in the path
            size = -1  # reported by the check of images
        return f"{self.path.name} {size}"


@dataclass(frozen=True, kw_only=True)
class ImageFields:
    """Where the records of a data file have images, and what stands for an image in a text."""

    key: str
    """Key of a record's images: a list, or one image."""
    text: str
    """Text of an image in a prompt that is not a chat."""

    def take(self, record: dict[str, Any], messages: str | None, folder: Path) -> tuple[ImageReference, ...]:
        """Returns the images of `record`, also of its messages, and replaces them there by data for JSON.

        `messages`: key of the messages. An image in them becomes the part `{"type": "image", "image": index}`, with its
        index in the result; under the images' key their names remain. Raises ImageError.
        """
        column = record.pop(self.key, None)
        values = [] if column is None else column if isinstance(column, list) else [column]
        images = [
            _reference(value, f"image {number} of {self.key!r}", folder) for number, value in enumerate(values, 1)
        ]
        if messages is not None and isinstance(turns := _messages_at(record, messages), list):
            for turn in turns:
                if isinstance(turn, dict) and isinstance(parts := turn.get("content"), list):
                    turn["content"] = [_part(part, images, folder) for part in parts]
        if images:  # those in messages, too
            record[self.key] = [image.name for image in images]
        return tuple(images)

    def place(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[ImageReference]
    ) -> tuple[list[dict[str, Any]], tuple[ImageReference, ...]]:
        """Returns messages with a part `{"type": "image"}` for every image, and the images in this order.

        `<image>` in a text, and a part without an index, stand for the next image of the record. Raises ImageError.
        """
        inline = {part["image"] for message in messages for part in _parts_of(message) if "image" in part}
        following = iter([image for index, image in enumerate(images) if index not in inline])
        used: list[ImageReference] = []
        written = []
        for message in messages:
            content: list[dict[str, Any]] = []
            for part in _parts_of(message):
                if part["type"] == "image":
                    used.append(images[part["image"]] if "image" in part else _next(following, len(images)))
                    content.append({"type": "image"})
                    continue
                for index, text in enumerate(part["text"].split(MARKER)):
                    if index:
                        used.append(_next(following, len(images)))
                        content.append({"type": "image"})
                    if text:
                        content.append({"type": "text", "text": text})
            has_image = any(part["type"] == "image" for part in content)
            plain = "".join(part["text"] for part in content if not has_image)
            written.append({**message, "content": content if has_image else plain})
        _require_all(following, len(images))
        return written, tuple(used)

    def write(self, prompt: str, images: Sequence[ImageReference]) -> str:
        """Replaces every `<image>` in `prompt` by an image's text. Raises ImageError for another number of images."""
        following = iter(images)
        for _ in range(prompt.count(MARKER)):
            _next(following, len(images))
        _require_all(following, len(images))
        return prompt.replace(MARKER, self.text)


def _next(following: Any, count: int) -> ImageReference:
    image: ImageReference | None = next(following, None)
    if image is None:
        raise ImageError(
            f"there are more places of images ({MARKER} in a text, or image parts) than its {count} images",
            "Give one image for each place, in their order.",
        )
    return image


def _require_all(following: Any, count: int) -> None:
    if left := len(list(following)):
        raise ImageError(
            f"{left} of its {count} images have no place in the text",
            f"Write {MARKER} where an image belongs, or a part of a message such as {json.dumps({'type': 'image'})}.",
        )


def _parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _messages_at(record: dict[str, Any], key: str) -> Any:
    """Returns the list of messages under `key`; if it is JSON text, replaces the text in `record` by the list."""
    holder: Any = record
    *above, last = [key] if key in record else key.split(".")
    for part in above:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if not isinstance(holder, dict):
        return None  # reported by the reader of messages
    if isinstance(holder.get(last), str) and holder[last].lstrip().startswith("["):
        try:
            holder[last] = json.loads(holder[last])
        except ValueError:
            return None
    return holder.get(last)


def _part(part: Any, images: list[ImageReference], folder: Path) -> dict[str, Any]:
    """Converts a part of a message to `{"type": "text", "text": ...}` or `{"type": "image", "image": index}`.

    An image in the part is appended to `images`.
    """
    cure = 'A part is {"type": "text", "text": "..."} or {"type": "image"}, with the image under `image` or not.'
    if not isinstance(part, dict):
        raise ImageError(f"a part of a message is {type(part).__name__}", cure)
    kind = part.get("type", "text" if "text" in part else None)
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url", "input_image"):
        videos = (
            "; videos and audio are not supported" if kind in ("video", "audio", "input_audio", "video_url") else ""
        )
        raise ImageError(f"a part of a message has the type {kind!r}{videos}", cure)
    value = next((part[key] for key in ("image", "image_url") if part.get(key) is not None), None)
    if value is None and any(part.get(key) is not None for key in _IMAGE_KEYS):
        value = part
    if value is None:
        return {"type": "image"}
    images.append(_reference(value, "the image of a message", folder))
    return {"type": "image", "image": len(images) - 1}


def _reference(value: Any, place: str, folder: Path) -> ImageReference:
    """Reads the image in `value`: bytes, `data:` URL, bare base64 or path, tried in this order. Raises ImageError."""
    if isinstance(value, dict):
        if value and not value.keys() & {*_IMAGE_KEYS}:
            keys = printable(", ".join(map(repr, value)), characters=_SHOWN)
            raise ImageError(f"{place} is an object with {keys}, and none of {', '.join(_IMAGE_KEYS)}", _ACCEPTED_FORMS)
        value = next((value[key] for key in _IMAGE_KEYS if value.get(key)), None)
    if isinstance(value, bytes | bytearray) and value:
        return ImageReference(data=bytes(value))
    if not isinstance(value, str) or not value:
        kind = "empty" if value in ("", b"", None) else f"of type {type(value).__name__}"
        raise ImageError(f"{place} is {kind}", _ACCEPTED_FORMS)
    if value[:5].lower() == "data:":
        header, comma, encoded = value.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ImageError(f"{place} is a data: URL without base64", _ACCEPTED_FORMS)
        return ImageReference(data=_decode(encoded, place))
    if len(value) >= _SHORTEST_BASE64 and value.startswith(_BASE64_PREFIXES):
        return ImageReference(data=_decode(value, place))
    if "://" in value and not value.startswith("file://"):
        raise ImageError(
            f"{place} is '{printable(value, characters=_SHOWN)}', and images are not downloaded",
            "Download it, and give its path.",
        )
    if len(value) > _LONGEST_PATH:
        what = f"a text of {len(value):,} characters, which is neither a path nor base64 of PNG, JPEG, GIF or WebP"
        raise ImageError(f"{place} is {what}", f"{_ACCEPTED_FORMS} Other formats as base64 need a data: URL.")
    path = Path(value.removeprefix("file://"))
    if not path.is_absolute() and ".." in PurePath(path).parts:
        raise ImageError(
            f"{place} is '{printable(str(path), characters=_SHOWN)}', which leaves the data file's folder",
            "Write an absolute path.",
        )
    return ImageReference(path=folder / path)


def _decode(encoded: str, place: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{place} is not valid base64 ({error})", _ACCEPTED_FORMS) from None
