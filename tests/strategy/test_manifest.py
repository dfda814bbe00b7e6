"""Files of a checkpoint that are not those that were written: found before anything is loaded, on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import without_manifest
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_manifest:"
OTHER = r"(was damaged, edited, or belongs to another checkpoint)"


# ---- on ranks


def strategy(*, sharded: bool = True) -> Any:
    from tests.strategy.test_checkpoint import strategy_of

    layout = Layout(dp=2).megatron() if sharded else Layout(tp=2).megatron()
    return strategy_of({"fill": True, "layout": layout | {"use_distributed_optimizer": sharded}})


def save_two(payload: dict[str, Any]) -> None:
    """Two checkpoints of one run, a step apart."""
    from tests.strategy.test_checkpoint import steps

    made = strategy(sharded=payload["sharded"])
    for step, name in enumerate(("earlier", "whole")):
        steps(made, step, step + 1)
        made.save(Path(payload["folder"]) / name)


def load_each(payload: dict[str, Any]) -> dict[str, str]:
    """By path, what loading it ends with. An error leaves the strategy as it was."""
    import torch

    from roll_batching.errors import RankError
    from tests.strategy.test_checkpoint import bits

    made = strategy(sharded=payload["sharded"])
    found = {}
    for path in payload["paths"]:
        before = bits(made)
        found[path] = ""
        try:
            made.load(path, verify="unverified" not in path)
        except RankError as error:
            found[path] = str(error)
            after = bits(made)
            assert all(torch.equal(before[name], after[name]) for name in before), path
    return found


# ---- tests


def flip(file: Path, place: float = 0.5) -> None:
    raw = bytearray(file.read_bytes())
    raw[int(len(raw) * place)] ^= 1
    file.write_bytes(raw)


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(change(content) or content))


def abuses(earlier: Path) -> dict[str, tuple[Callable[[Path], Any], str]]:
    """By name: what is done to a checkpoint, and what is said. `earlier` is another checkpoint of the same run."""
    shard = min(file.name for file in earlier.glob("*.distcp"))
    manifest, no_manifest = "manifest.json", r"manifest\.json is malformed"

    def exchanged(name: str) -> Callable[[Path], Any]:
        return lambda path: shutil.copy(earlier / name, path / name)

    def linked(target: Path) -> Callable[[Path], Any]:
        def act(path: Path) -> None:
            (path / shard).unlink()
            (path / shard).symlink_to(target)

        return act

    def piped(name: str) -> Callable[[Path], Any]:
        def act(path: Path) -> None:
            (path / name).unlink()
            os.mkfifo(path / name)

        return act

    def listed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
        return lambda path: edit(path / manifest, lambda content: change(content["files"]))

    return {
        "a shard of another checkpoint": (
            exchanged(shard),
            rf"{shard} was changed after it was written.*{OTHER[1:-1]}",
        ),
        "the index of another checkpoint": (exchanged(".metadata"), r"\.metadata was changed|has [\d,]+ bytes"),
        "one bit in a shard": (lambda path: flip(path / shard), rf"{shard} was changed after it was written"),
        "one bit in metadata.json": (
            lambda path: edit(path / "metadata.json", lambda kind: kind | {"extra": 1}),
            r"metadata\.json has [\d,]+ bytes and was written with",
        ),
        "more bytes": (
            lambda path: (path / shard).write_bytes((path / shard).read_bytes() + b"\0"),
            rf"{shard} has ([\d,]+) bytes and was written with",
        ),
        "a step count": (
            lambda path: edit(path / "strategy.json", lambda own: own["optimizer"].update(steps=9)),
            r"strategy\.json (was changed after it was written|has [\d,]+ bytes and was written with)",
        ),
        "a link to another shard": (linked(earlier / shard), rf"{shard} was changed after it was written"),
        "a link to nothing": (linked(Path("nowhere")), rf"{shard} is missing"),
        "a link to itself": (linked(Path(shard)), r"cannot be read: Too many levels of symbolic links|ELOOP"),
        "a pipe for a shard": (piped(shard), "it is no regular file"),
        "a pipe for the index": (piped(".metadata"), "it is no regular file"),
        "a pipe for strategy.json": (piped("strategy.json"), "it has no strategy.json"),
        "a pipe for the manifest": (piped(manifest), r"manifest\.json cannot be read: it is no regular file"),
        "no manifest": (lambda path: (path / manifest).unlink(), r"manifest\.json is missing"),
        "another manifest": (exchanged(manifest), r"(was changed after it was written|bytes and was written with)"),
        "a manifest of a list": (lambda path: (path / manifest).write_text("[1]"), no_manifest),
        "a manifest of nothing": (lambda path: (path / manifest).write_text(""), no_manifest),
        "a size that is text": (listed(lambda files: files[shard].update(size="12")), no_manifest),
        "a size that is true": (listed(lambda files: files[shard].update(size=True)), no_manifest),
        "no digests": (listed(lambda files: files[shard].update(digests=[])), no_manifest),
        "a file above": (listed(lambda files: files.update({f"../{earlier.name}/{shard}": files[shard]})), no_manifest),
        "a file elsewhere": (listed(lambda files: files.update({str(earlier / shard): files[shard]})), no_manifest),
    }


def check(folder: Path, *, sharded: bool, only: str | None, report: Any) -> None:
    run_ranks(2, HERE + "save_two", {"folder": str(folder), "sharded": sharded})
    cases = {name: one for name, one in abuses(folder / "earlier").items() if only is None or only in name}
    paths = {name: Path(shutil.copytree(folder / "whole", folder / name)) for name in cases}
    for name, (act, _) in cases.items():
        act(paths[name])
    unverified = Path(shutil.copytree(folder / "whole", folder / "unverified"))
    cases["a shard of another checkpoint"][0](unverified)
    kept = [str(folder / "whole"), str(unverified), f"{folder}/earlier/../whole"]
    payload = {"sharded": sharded, "paths": [*map(str, paths.values()), *kept]}
    first, second = run_ranks(2, HERE + "load_each", payload)
    assert first == second
    wrong = []
    for name, (_, expected) in cases.items():
        words = first[str(paths[name])]
        report(f"{name}: {words}".replace(str(folder), "..."))
        if not re.search(expected, words) or "Traceback" in words or len(words.splitlines()) > 2:
            wrong.append(f"{name}: {words or 'nothing was said'}")
    assert not wrong, "\n".join(wrong)
    assert not any(first[path] for path in kept), first


@pytest.mark.bad_input
def test_files_that_were_not_written_so_are_found_before_anything_is_loaded(tmp_path, report):
    """Shards of another checkpoint, flipped bits, links, pipes, edited manifests: the distributed optimizer."""
    check(tmp_path, sharded=True, only=None, report=report)


@pytest.mark.slow
def test_under_tensor_parallelism_too(tmp_path, report):
    check(tmp_path, sharded=False, only="shard", report=report)


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    run_ranks(1, HERE + "save_alone", str(tmp_path / "state"))
    with contextlib.suppress(StopIteration):
        next((tmp_path / "state").glob("*.distcp")).chmod(0)
    assert "Permission denied" in run_ranks(1, HERE + "load_alone", str(tmp_path / "state"))[0]


def save_alone(path: str) -> None:
    from tests.strategy.test_checkpoint import strategy_of

    strategy_of({"fill": True}).save(path)


def load_alone(path: str) -> str:
    from roll_batching.errors import CheckpointError
    from tests.strategy.test_checkpoint import strategy_of

    try:
        strategy_of({}).load(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_an_earlier_version_loads_with_one_notice(tmp_path):
    state = tmp_path / "state"
    run_ranks(1, HERE + "save_alone", str(state))
    without_manifest(state)
    (outcome,) = run_ranks(1, HERE + "load_alone", str(state), check=False)
    assert outcome.result == "", outcome.output
    assert outcome.output.count("has no manifest.json") == 1, outcome.output


def test_large_files_are_compared_in_pieces_that_ranks_share(tmp_path, monkeypatch):
    """Each rank reads its share, all of them together everything; an empty file has no piece."""
    from roll_batching.errors import CheckpointError
    from roll_batching.strategy import checkpoint_folder as manifest

    monkeypatch.setattr(manifest, "_PIECE", 1000)
    names = ["a", "b", "empty"]
    for name, size in zip(names, (2500, 1000, 0), strict=True):
        (tmp_path / name).write_bytes(os.urandom(size))
    digests = manifest.digest_files(tmp_path, names)
    assert [len(digests[name].pieces) for name in names] == [3, 1, 0]
    (tmp_path / manifest.MANIFEST).write_text(manifest.manifest_text(digests))
    flip(tmp_path / "a", 0.9)
    failed = []
    for rank in range(3):
        try:
            manifest.check_manifest(tmp_path, rank=rank, ranks=3, verify=True)
        except CheckpointError as error:
            failed.append((rank, str(error)))
    assert [rank for rank, _ in failed] == [2] and "a was changed after it was written" in failed[0][1]
    manifest.check_manifest(tmp_path, rank=0, ranks=1, verify=False)
