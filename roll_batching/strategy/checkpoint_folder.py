"""Atomic folders: written under a temporary name, renamed when complete.

What a killed process leaves behind is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.errors import CheckpointError, CollectiveError, RankError, RollBatchingError
from roll_batching.files import cause

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
        for left in (partial, replaced):
            if left.exists():
                shutil.rmtree(left)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be made: {cause(error)}") from None


def write_text(file: Path, text: str) -> None:
    """Writes a text file. Raises `CheckpointError` with file and cause."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {cause(error)}") from None
