"""Files that are whole or not there: nobody ever reads what a killed process or a full disk left half written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A path to write to that becomes `path` when the block has ended well, and is removed when it has not.

    What lay at `path` stays until then. A device or pipe is written to directly.
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
    """`No space left on device (ENOSPC)`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({name})" if name else "")
