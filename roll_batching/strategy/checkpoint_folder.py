"""The folder of a checkpoint: written under another name, and renamed when it is whole.

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
from roll_batching.errors import CheckpointError, RankError, RollBatchingError
from roll_batching.files import cause

RECORD = "strategy.json"
SAVING = "saving a checkpoint"
PARTIAL, REPLACED = ".partial", ".replaced"
"""End the name of a checkpoint that is being written, and of the one before it while both are renamed."""


def is_checkpoint(path: Path) -> bool:
    """Whether the folder `path` is a checkpoint of a strategy's."""
    return (path / RECORD).is_file()


class Draft:
    """A folder that is written under another name, `folder`, until `keep` makes it `path`.

    All ranks of `group` make it, and call its methods. What lies at `path` is replaced where `replaces` says so; any
    other folder with something in it is refused. Raises `RankError` on all ranks with what went wrong on any, naming
    the work `what`.
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
                _make_empty(self.path, self.folder, self._replaced, replaces)
        with consensus(group, what):
            if not self.folder.is_dir():
                raise CheckpointError(
                    f"{self.path.parent} is not the same folder on all machines: save to a shared file system"
                )

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to write into. It goes when the block fails on any rank; all raise the same error then."""
        try:
            failed = None
            try:
                yield self.folder
            except RankError:  # heard by all
                raise
            except Exception as error:
                failed = error
            with consensus(self.group, self.what):
                if failed is not None:
                    raise failed
        except RollBatchingError:  # agreed on: all ranks are here
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # what it takes may be what is missing
            dist.barrier(group=self.group)
            raise

    def keep(self) -> None:
        """Gives the folder, which is whole, its name. Where that fails, what was there before has it still."""
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
def whole_or_nothing(
    path: str | Path, group: Any, *, what: str = SAVING, replaces: Callable[[Path], bool] = is_checkpoint
) -> Iterator[Path]:
    """An empty folder that becomes `path` when the block has ended well on all ranks of `group`; see `Draft`."""
    draft = Draft(path, group, what=what, replaces=replaces)
    with draft.writing() as folder:
        yield folder
    draft.keep()


def _make_empty(path: Path, partial: Path, replaced: Path, replaces: Callable[[Path], bool]) -> None:
    """Makes the folder `partial`. What an interrupted save left is taken away, or back where it was."""
    try:
        if replaced.exists() and not path.exists():
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
    """Writes one of a checkpoint's own files. Raises `CheckpointError` with file and cause."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {cause(error)}") from None
