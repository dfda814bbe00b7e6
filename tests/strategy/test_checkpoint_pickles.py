"""Checkpoints from strangers: what their pickles name is refused by name, on all ranks, before it runs."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import without_manifest
from tests.support.ranks import run_ranks

TROUBLE = "tests.strategy.test_checkpoint_trouble:"


class Trap:
    """Makes the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def trapped_index(path: Path, trap: Trap) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = trap
    (path / ".metadata").write_bytes(pickle.dumps(index))


def trapped_object(path: Path, trap: Trap) -> None:
    """What stands for a tensor, at the end of its file: only an index of plain data leads there."""
    index = pickle.loads((path / ".metadata").read_bytes())
    key, at = next((key, at) for key, at in index.storage_data.items() if "linear_fc1.weight" in key.fqn)
    output = io.BytesIO()
    torch.save([trap], output)
    file = path / at.relative_path
    index.storage_data[key] = replace(at, offset=file.stat().st_size, length=len(output.getvalue()))
    file.write_bytes(file.read_bytes() + output.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))


def trapped_common(path: Path, trap: Trap) -> None:
    torch.save({"common": trap}, path / "common.pt")  # 0.16 writes one, later Megatrons read one


def test_nothing_that_a_checkpoint_names_is_run(tmp_path, report):
    run_ranks(2, TROUBLE + "save_whole", str(tmp_path / "whole"))
    paths, marks = {}, {}
    for spoil in (trapped_index, trapped_object, trapped_common):
        name = spoil.__name__
        copy = without_manifest(Path(shutil.copytree(tmp_path / "whole", tmp_path / name)))
        marks[name] = tmp_path / f"{name}-ran"
        spoil(copy, Trap(marks[name]))
        paths[name] = [str(copy)] * 2
    paths["whole"] = [str(tmp_path / "whole")] * 2
    trusting = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    first, second = run_ranks(2, TROUBLE + "load_each", paths, env=trusting)
    assert first == second
    for name, mark in marks.items():
        words, soon = first[name]
        report(f"{name}: {words}".replace(str(tmp_path), "..."))
        assert soon and "posix.mkdir" in words and "Traceback" not in words and not mark.exists(), f"{name}: {words}"
    assert first["whole"] == ("", False)
