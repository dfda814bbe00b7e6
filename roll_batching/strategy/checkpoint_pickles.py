"""Unpickling of a checkpoint without running code that its files name.

Unpickling calls whatever the file names. The index of `torch.distributed.checkpoint` (`.metadata`) is a pickle, and
torch unpickles it without restrictions; so it does with small objects in the data files (`weights_only=False`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_DCP = "torch.distributed.checkpoint"
_INDEX_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""Classes of an index, beside torch's dtypes. They are plain data: constructing them runs no other code."""
_FORCED, _FORCED_OFF = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(
                f"Unsupported GLOBAL {module}.{name}"
            )  # the words of torch's own error, which `foreign_class` reads
        return super().find_class(module, name)


def read_index(file: Path) -> Any:
    """Torch's `Metadata` in the file `.metadata`. Raises `UnpicklingError` for any other class."""
    with file.open("rb") as stream:
        return _IndexReader(stream).load()


@contextlib.contextmanager
def only_weights() -> Iterator[None]:
    """Context in which every `torch.load` has `weights_only=True`, whatever its argument.

    torch then refuses classes outside its own and Megatron's lists of safe globals; see `foreign_class`.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORCED_OFF)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def foreign_class(error: BaseException | None) -> str | None:
    """The class that `error`, or one of its causes, refused to unpickle; None for other errors."""
    while error is not None:
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            return match[1]
        error = error.__cause__ or error.__context__
    return None
