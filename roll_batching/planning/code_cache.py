"""Cache of compiled code on disk, keyed on the content of the sources instead of their path.

numba keys its cache on the path of a source file. Ray unpacks the working directory of every job under a new path, so
every job would compile again. Here the path does not count:

    ~/.cache/roll-batching/numba-0.68.1-cp311-<digest of the planner's sources>/<function>-<digest of the rest>.nbc

The rest: the function's own file, its types of arguments and the CPU, so that machines with different CPUs can share a
home. Each file is replaced as a whole, and there is no index that two processes could overwrite. `NUMBA_CACHE_DIR`
replaces `~/.cache`. Where neither can be written, code is kept in the user's private folder among the temporary files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.caching

logger = logging.getLogger(__name__)
_core: Any = numba.core

KEPT_FOLDERS = 8
"""Versions of the sources whose code is kept, for users who change between them."""

WARNING_SECONDS = 60.0
"""Within this time one process logs a warning for all processes of the user."""


@functools.cache
def cache_folder() -> Path | None:
    """Folder of this process's compiled code, which can be written; None: code is not kept."""
    if not Path(__file__).is_file():  # imported from an archive
        return None
    name = f"numba-{numba.__version__}-{sys.implementation.cache_tag}-{_sources_digest()}"
    caches = _core.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder, private = Path(caches) / "roll-batching", private_folder()
    try:
        return _make_writable(folder / name)
    except OSError as error:
        if private is None:
            return None
        warn_once(
            "cache",
            f"{folder} cannot be written ({error.strerror}): the planner's compiled code is kept in {private}. Set "
            "NUMBA_CACHE_DIR to a folder that outlives the machine",
        )
    with contextlib.suppress(OSError):
        return _make_writable(private / name)
    return None


def _make_writable(folder: Path) -> Path:
    """`folder`, which exists and takes files, else OSError. Removes the oldest folders beside a new one."""
    is_new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if is_new:
        with contextlib.suppress(OSError):  # another process removes them
            for old in sorted(folder.parent.glob("numba-*"), key=os.path.getmtime)[:-KEPT_FOLDERS]:
                shutil.rmtree(old, ignore_errors=True)
    return folder


def _sources_digest() -> str:
    """Digest of all planning sources: the code of a function contains the functions that it calls."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def private_folder() -> Path | None:
    """Folder of this user among the temporary files; None if other users may write to it."""
    folder = Path(tempfile.gettempdir()) / f"roll-batching-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o077 and os.access(folder, os.W_OK)
    return folder if private and folder.is_dir() and not folder.is_symlink() else None


def warn_once(topic: str, message: str) -> None:
    """Logs a warning, unless a process of this user has warned of the topic within `WARNING_SECONDS`."""
    folder = private_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            last_warning = folder / f"warned_of_{topic}"
            is_recent = last_warning.exists() and time.time() - last_warning.stat().st_mtime < WARNING_SECONDS
            last_warning.touch()
            if is_recent:
                return
    logger.warning(message)


class CodeCache(_core.caching.NullCache):  # type: ignore[misc]
    """numba's cache of one function: a file for each types of arguments and CPU, in `folder`."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        code = function.__code__
        source = Path(code.co_filename)
        self._start = folder / f"{source.stem}.{function.__qualname__}-{code.co_firstlineno}"
        self._source = hashlib.sha256(source.read_bytes()).hexdigest()

    def _file(self, signature: Any, codegen: Any) -> Path:
        key = repr((self._source, signature, codegen.magic_tuple()))
        return self._start.with_name(f"{self._start.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.nbc")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function; None where its file is missing or damaged."""
        target_context.refresh()
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            reduced = pickle.loads(self._file(sig, target_context.codegen()).read_bytes())
            return _core.compiler.CompileResult._rebuild(target_context, *reduced)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Writes the file, if the disk takes it."""
        file = self._file(sig, data.codegen)
        partial = file.with_suffix(f".{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            partial.write_bytes(_core.serialize.dumps(data._reduce()))
            partial.replace(file)
