"""What of a checkpoint is pickled, read without running anybody's code.

Unpickling calls whatever the file names. The index of `torch.distributed.checkpoint` (`.metadata`) is a pickle, and
torch reads it as such; so are the small objects in the data files, which it reads with `weights_only=False`.
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
"""What an index consists of, beside torch's dtypes: plain data, which runs nothing."""
_FORCED, _FORCED_OFF = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"Unsupported GLOBAL {module}.{name}")  # as torch's own says it
        return super().find_class(module, name)


def read_index(file: Path) -> Any:
    """The `Metadata` of torch in the file `.metadata`. Raises `UnpicklingError` where it names anything else."""
    with file.open("rb") as stream:
        return _IndexReader(stream).load()


@contextlib.contextmanager
def only_weights() -> Iterator[None]:
    """Inside, every `torch.load` reads tensors and plain values only, whatever it was told.

    torch then refuses by name what is neither of its own list nor of Megatron's; see `foreign_class`.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORCED_OFF)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def foreign_class(error: BaseException | None) -> str | None:
    """What a pickle named that it must not, where `error` or what is below it is the refusal; else None."""
    while error is not None:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            return found[1]
        error = error.__cause__ or error.__context__
    return None
