"""Folders of checkpoints: renamed when complete, with a manifest of their files' sizes and digests.

What a killed process leaves behind is never taken for a checkpoint. The manifest is compared before anything is loaded.
It detects files that were damaged, exchanged or edited after they were written. It is no signature: anyone who can edit
the files can write a manifest that matches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.errors import CheckpointError, CollectiveError, RankError, RollBatchingError, first_of
from roll_batching.files import cause
from roll_batching.strategy.checkpoint_files import check_regular, explain_read_errors

RECORD = "strategy.json"
SAVING = "saving a checkpoint"
PARTIAL, REPLACED = ".partial", ".replaced"
"""Suffixes of a folder that is being written, and of the previous one while the two are renamed."""


def is_checkpoint(path: Path) -> bool:
    """Whether the folder `path` is a strategy's checkpoint."""
    return (path / RECORD).is_file()


class AtomicFolder:
    """A folder that is written under a temporary name, `folder`, until `commit` renames it to `path`.

    Construction and methods are collective over `group`.

    Args:
        path: the final name, on a file system that all ranks share.
        group: the ranks that write.
        what: the operation, for errors.
        replaces: whether an existing folder may be replaced. One that may not is refused unless it is empty.

    Raises:
        RankError: on all ranks, with the errors of any.
    """

    def __init__(
        self, path: str | Path, group: Any, *, what: str = SAVING, replaces: Callable[[Path], bool] = is_checkpoint
    ) -> None:
        self.group, self.what = group, what
        with consensus(group, what) as facts:
            self.path = Path(path)
            self.folder = self.path.with_name(self.path.name + PARTIAL)
            self._replaced = self.path.with_name(self.path.name + REPLACED)
            facts.equal("the path", path)
            if dist.get_rank() == 0:
                _prepare(self.path, self.folder, self._replaced, replaces)
        with consensus(group, what):
            if not self.folder.is_dir():
                raise CheckpointError(
                    f"{self.path.parent} is not the same folder on all machines: save to a shared file system"
                )

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Context to write into `folder`, which is deleted if the block fails on any rank; all raise one error."""
        try:
            failed = None
            try:
                yield self.folder
            except (RankError, CollectiveError):  # raised on all ranks already, or the others cannot be waited for
                raise
            except Exception as error:
                failed = error
            with consensus(self.group, self.what):
                if failed is not None:
                    raise failed
        except CollectiveError:
            raise
        except RollBatchingError:  # from the consensus above: all ranks get here
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # a full disk needs its space back
            dist.barrier(group=self.group)
            raise

    def commit(self) -> None:
        """Renames the complete folder to `path`. If that fails, the previous folder keeps its name."""
        with self.writing(), consensus(self.group, self.what):
            if dist.get_rank() == 0:
                try:
                    self._rename()
                except OSError as error:
                    raise CheckpointError(f"{self.folder} cannot be renamed {self.path}: {cause(error)}") from None

    def _rename(self) -> None:
        if self.path.exists():
            self.path.rename(self._replaced)
        try:
            self.folder.rename(self.path)
        except OSError:
            if self._replaced.exists():
                self._replaced.rename(self.path)
            raise
        shutil.rmtree(self._replaced, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(
    path: str | Path, group: Any, *, what: str = SAVING, replaces: Callable[[Path], bool] = is_checkpoint
) -> Iterator[Path]:
    """Context with an empty folder that becomes `path` if the block succeeds on all ranks; see `AtomicFolder`."""
    target = AtomicFolder(path, group, what=what, replaces=replaces)
    with target.writing() as folder:
        yield folder
    target.commit()


def _prepare(path: Path, partial: Path, replaced: Path, replaces: Callable[[Path], bool]) -> None:
    """Creates the empty folder `partial`; deletes or restores what an interrupted save has left."""
    try:
        if replaced.exists() and not path.exists():  # the process died between the two renames
            replaced.rename(path)
        if path.exists() and not replaces(path) and not (path.is_dir() and not any(path.iterdir())):
            kind = " and is no checkpoint" if replaces is is_checkpoint else ""
            raise CheckpointError(f"{path} exists{kind}: give another path")
        for leftover in (partial, replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be made: {cause(error)}") from None


def write_text(file: Path, text: str) -> None:
    """Writes a text file. Raises `CheckpointError` with file and cause."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {cause(error)}") from None


# ---- manifests


MANIFEST = "manifest.json"
_PIECE = 64 << 20
"""Bytes per digest: ranks and threads share the work on large files."""
_READ = 4 << 20
_MAX_THREADS = 8
_ALGORITHM = "sha256"
"""Twice as fast as BLAKE2b where the processor has instructions for it (1.7 against 0.75 GB/s per core)."""
_SHOWN = 3


class FileDigest(NamedTuple):
    """Size of a file in bytes, and a digest of each of its pieces."""

    size: int
    pieces: tuple[str, ...]


def digest_files(folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Sizes and digests of files in `folder`, by name. Raises `CheckpointError` with file and cause."""
    sizes = {name: _size(folder / name) for name in names}
    digests = digests_of_pieces(folder, pieces_of(sizes))
    return {
        name: FileDigest(size, tuple(digests[name, piece] for piece in range(_count(size))))
        for name, size in sizes.items()
    }


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """The content of the file `MANIFEST`."""
    entries = {name: {"size": digest.size, "digests": digest.pieces} for name, digest in sorted(files.items())}
    return json.dumps({"algorithm": _ALGORITHM, "piece_bytes": _PIECE, "files": entries}, indent=1) + "\n"


def listed_files(folder: Path) -> Iterator[str]:
    """Names of the files that a manifest of `folder` lists, with the manifests of checkpoints inside it."""
    for path in folder.iterdir():
        if path.is_file() and path.name != MANIFEST:
            yield path.name
        elif (path / MANIFEST).is_file():
            yield f"{path.name}/{MANIFEST}"


def check_manifest(folder: Path, *, rank: int, ranks: int, verify: bool) -> None:
    """Compares the files of the checkpoint `folder` with its manifest.

    Every rank compares all sizes. With `verify` the `ranks` share the digests: each reads its part of the files.

    Raises `CheckpointError` with the names of files that differ.
    """
    manifest = _read(folder)
    problems = []
    for name, entry in manifest.items():
        size = _size(folder / name)
        if size != entry.size:
            problems.append(f"{folder / name} has {size:,} bytes and was written with {entry.size:,}")
    if verify and not problems:
        tasks = [(name, piece) for name, entry in manifest.items() for piece in range(len(entry.pieces))]
        digests = digests_of_pieces(folder, tasks[rank::ranks])
        damaged = {name: None for (name, piece), digest in digests.items() if digest != manifest[name].pieces[piece]}
        problems = [f"{folder / name} was changed after it was written" for name in damaged]
    if problems:
        raise CheckpointError(
            f"{first_of(problems, _SHOWN)} (sizes and digests: {MANIFEST}). Such a file was damaged, edited, "
            "or belongs to another checkpoint: copy the checkpoint again, or load another one"
        )


def _read(folder: Path) -> dict[str, FileDigest]:
    """The manifest's entries. Raises `CheckpointError` if it is missing or malformed."""
    file = folder / MANIFEST
    with explain_read_errors(file):
        check_regular(file)
        text = file.read_text(encoding="utf-8")
    try:
        manifest = json.loads(text)
        if (manifest["algorithm"], manifest["piece_bytes"]) != (_ALGORITHM, _PIECE):
            raise ValueError
        return {name: _entry(name, entry) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{file} is malformed: it lists no sizes and digests of files; copy the checkpoint again"
        ) from None


def _entry(name: str, entry: Any) -> FileDigest:
    size, pieces = entry["size"], entry["digests"]
    parts = PurePosixPath(name).parts
    is_inside = parts and ".." not in parts and not PurePosixPath(name).is_absolute()
    if not is_inside or type(size) is not int or size < 0 or len(pieces) != _count(size):
        raise ValueError(name)
    return FileDigest(size, tuple(pieces))


def _count(size: int) -> int:
    return -(-size // _PIECE)


def _size(file: Path) -> int:
    with explain_read_errors(file):
        return check_regular(file)


def pieces_of(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """(file, number of the piece) of all pieces of files with these sizes in bytes."""
    return [(name, piece) for name, size in sizes.items() for piece in range(_count(size))]


def digests_of_pieces(folder: Path, tasks: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Digests of pieces of files, computed in threads: hashlib releases the GIL."""
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks_here))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(tasks, pool.map(lambda task: _digest(folder / task[0], task[1]), tasks), strict=True))


def _digest(file: Path, piece: int) -> str:
    hasher, bytes_left = hashlib.new(_ALGORITHM), _PIECE
    with explain_read_errors(file), file.open("rb") as stream:
        stream.seek(piece * _PIECE)
        while bytes_left and (block := stream.read(min(_READ, bytes_left))):
            hasher.update(block)
            bytes_left -= len(block)
    return hasher.hexdigest()[:32]  # 128 bits: enough against damage, and half the manifest
