"""File writes that lose nothing: atomic, and over no file of the user's."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from roll_batching.errors import ConfigError

_MOST_READ = 16 << 20
"""Bytes of a file that are read to tell who wrote it. Files that commands write are smaller."""


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


def check_replaceable(
    path: str | Path, command: str, is_own: Callable[[bytes], bool], cure: str = "Choose another file, or move it away"
) -> None:
    """Raises ConfigError if `path` is a folder, or a file that `roll-batching COMMAND` did not write.

    Neither folders nor targets of links are made. `is_own` tells from a file's content. An empty file may be replaced,
    and devices, `/dev/stdout` among them, may be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. {cure}")
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path} is a link to {os.readlink(path)}, which is not there. {cure}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: the folder {path.parent} is not there. Make it, or name another")
    if path.is_fifo() and path.resolve().parts[1] not in ("dev", "proc"):
        raise ConfigError(f"{path} is a pipe, and writing waits for its reader. {cure}")
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_READ)
    except OSError as error:
        raise ConfigError(f"{path} is there and cannot be read: {cause(error)}. {cure}") from None
    if content and not is_own(content):
        raise ConfigError(f"{path} was not written by `roll-batching {command}`, so it is not overwritten. {cure}")


def open_regular(path: str | Path) -> BinaryIO:
    """`path`, open for reading. Raises OSError, also for what is no regular file: opening a pipe waits for a writer."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # `open` refuses a folder
        raise OSError(errno.EINVAL, "it is no regular file")
    return open(path, "rb")


def cause(error: OSError) -> str:
    """The cause of an OSError as text: `No space left on device (ENOSPC)`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({name})" if name else "")
