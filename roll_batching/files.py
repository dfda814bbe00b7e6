"""Atomic file writes: a killed process or a full disk never leaves a half-written file under the final name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Context with a temporary path, renamed to `path` if the block succeeds and removed if it fails.

    An existing file stays until then. Devices and pipes are written directly.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")  # the suffix stays: it can name the format
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def cause(error: OSError) -> str:
    """The cause of an OSError as text: `No space left on device (ENOSPC)`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({name})" if name else "")
