"""Full disks, files that are cut off, one rank that cannot write: one error on all ranks, soon, with the cause."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import without_manifest
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_checkpoint_trouble:"


# ---- on ranks


def strategy() -> Any:
    from tests.strategy.test_checkpoint import steps, strategy_of

    made = strategy_of({"fill": True, "layout": Layout(tp=2).megatron()})
    steps(made, 0, 1)
    return made


def said(act: Any) -> tuple[str, bool]:
    """What `act` ends with, and whether within seconds."""
    from roll_batching.errors import RankError

    started = time.monotonic()
    try:
        act()
    except RankError as error:
        return str(error), time.monotonic() - started < 60
    return "", False


def save_into(path: str) -> tuple[str, bool]:
    made = strategy()
    return said(lambda: made.save(path))


def save_with_small_files(folder: str) -> dict[str, tuple[str, bool]]:
    """Saves while some ranks may not write files beyond some bytes; then one that works."""
    import torch.distributed as dist

    made = strategy()
    found = {}
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, ranks, limit in (
        ("all", (0, 1), 4096),
        ("rank 1 alone", (1,), 4096),
        ("rank 0 alone", (0,), 4096),
        ("rank 0, from the first byte", (0,), 1),
    ):
        if dist.get_rank() in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
        try:
            found[name] = said(lambda: made.save(folder + "/state"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        dist.barrier()
        left = list(Path(folder).glob("state*"))
        dist.barrier()  # before another rank begins with the next
        assert not left, "what was half written is gone"
    made.save(folder + "/state")
    made.load(folder + "/state")
    return found


def load_each(paths: dict[str, list[str]]) -> dict[str, tuple[str, bool]]:
    import torch
    import torch.distributed as dist

    from tests.strategy.test_checkpoint import bits

    made = strategy()
    before = bits(made)
    found = {name: said(lambda at=at: made.load(at[dist.get_rank()])) for name, at in paths.items()}
    unchanged = {name for name, tensor in bits(made).items() if torch.equal(before[name], tensor)}
    assert unchanged == before.keys() or "damaged" in paths
    return found


# ---- tests


@pytest.mark.bad_input
def test_a_rank_that_cannot_write_leaves_nobody_waiting_and_nothing_behind(tmp_path, report):
    first, second = run_ranks(2, HERE + "save_with_small_files", str(tmp_path), timeout=170)
    assert first == second
    for name, (words, soon) in first.items():
        report(f"{name}: {words}".replace(str(tmp_path), "..."))
        assert soon and "File too large (EFBIG). The checkpoint takes" in words, f"{name}: {words}"
        assert "Traceback" not in words and len(words.splitlines()) <= 2
        assert ("rank 1" in words) == (name == "rank 1 alone") or name == "all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Mounts a file system of so many kB, where that is allowed."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(kilobytes: int) -> Path:
        subprocess.run(["umount", place], capture_output=True, check=False)
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place]
        try:
            done = subprocess.run(["mount", *options], capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount here")
        if done.returncode:
            pytest.skip("file systems cannot be mounted here")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)


@pytest.mark.bad_input
def test_a_full_disk_is_said_before_and_while_it_is_written(small_disk, report):
    place = small_disk(32)
    first, second = run_ranks(2, HERE + "save_into", str(place / "state"))
    found = re.search(r"the checkpoint takes ([\d.]+) kB and ([\d.]+) kB is free there", first[0])
    assert first == second and first[1] and found, first
    assert not list(place.iterdir())
    report(first[0])
    small_disk(int(float(found[1]) / 1.024) + 12)  # room for the tensors, not for what lies between them
    first, second = run_ranks(2, HERE + "save_into", str(place / "state"))
    assert first == second and first[1] and "No space left on device (ENOSPC). The checkpoint takes" in first[0], first
    assert str(place / "state.partial") in first[0] and len(first[0].splitlines()) <= 2
    assert not list(place.iterdir())
    report(first[0])


def spoilt(whole: Path, home: Path) -> dict[str, tuple[list[str], str]]:
    """By name: the path that each rank loads, and what is to be said."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, home / name))

    data = sorted(file.name for file in whole.glob("*.distcp"))
    cases = {}

    def case(name: str, words: str, *, alone: bool = False) -> Path:
        path = copy(name)
        cases[name] = ([str(whole if alone else path), str(path)], words)
        return path

    for name, alone in (("cut", False), ("cut alone", True)):
        file = case(name, rf"{data[0]} is cut off: it has 1,000 of \d+,\d+ bytes", alone=alone) / data[0]
        file.write_bytes(file.read_bytes()[:1000])
    (case("gone", f"{data[-1]} is missing") / data[-1]).unlink()
    (case("index cut", r"\.metadata cannot be read") / ".metadata").write_bytes(b"\x80\x04")
    (case("index gone", r"\.metadata is missing") / ".metadata").unlink()
    (case("kind garbled", r"metadata.json cannot be read") / "metadata.json").write_text("{")
    (case("own garbled", "strategy.json is malformed") / "strategy.json").write_text("[1]")
    (case("own binary", "strategy.json cannot be read") / "strategy.json").write_bytes(b"\xff\xfe")
    folder = case("a folder", "cannot be read: Is a directory") / "strategy.json"
    folder.unlink()
    folder.mkdir()
    return cases


@pytest.mark.bad_input
def test_files_that_cannot_be_read_are_named_in_a_line_on_all_ranks(tmp_path, report):
    whole = tmp_path / "whole"
    run_ranks(2, HERE + "save_whole", str(whole))
    cases = spoilt(whole, tmp_path)
    damaged = tmp_path / "damaged"
    without_manifest(Path(shutil.copytree(whole, damaged)))
    for file in damaged.glob("*.distcp"):
        raw = bytearray(file.read_bytes())
        raw[: len(raw) // 2] = b"\0" * (len(raw) // 2)
        file.write_bytes(raw)
    cases["damaged"] = ([str(damaged)] * 2, "damaged cannot be read")
    first, second = run_ranks(2, HERE + "load_each", {name: paths for name, (paths, _) in cases.items()})
    assert first == second
    for name, (_, expected) in cases.items():
        words, soon = first[name]
        report(f"{name}: {words}".replace(str(tmp_path), "..."))
        known = re.search(expected, words) or (name == "a folder" and "it has no strategy.json" in words)
        assert soon and known and "Traceback" not in words and len(words.splitlines()) <= 2, f"{name}: {words}"


def save_whole(path: str) -> None:
    strategy().save(path)


def test_what_an_interrupted_exchange_left_is_found_again(tmp_path):
    """Killed between the two renames: the checkpoint before is there under another name, and not lost by the next."""
    run_ranks(2, HERE + "save_whole", str(tmp_path / "state"))
    (tmp_path / "state").rename(tmp_path / "state.replaced")
    found = run_ranks(2, HERE + "load_each", {"interrupted": [str(tmp_path / "state")] * 2})
    assert (
        f"a save was interrupted, and {tmp_path}/state.replaced holds the one before it" in found[0]["interrupted"][0]
    )
    run_ranks(2, HERE + "fail_to_save", str(tmp_path / "state"))
    run_ranks(2, HERE + "load_whole", str(tmp_path / "state"))


def fail_to_save(path: str) -> None:
    made = strategy()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert "EFBIG" in said(lambda: made.save(path))[0]


def load_whole(path: str) -> None:
    strategy().load(path)


def lose_what_was_written(path: str) -> tuple[str, bool]:
    """What is said when somebody removes a folder that is about to get its name, where another one is."""
    import torch.distributed as dist

    from roll_batching.distributed import host_group
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.strategy.checkpoint_folder import RECORD, AtomicFolder

    start_processes()
    for text in ("before", "after"):
        draft = AtomicFolder(path, host_group())
        with draft.writing() as folder:
            if dist.get_rank() == 0:
                (folder / RECORD).write_text(text)
        if text == "before":
            draft.commit()
    if dist.get_rank() == 0:
        shutil.rmtree(draft.folder)
    return said(draft.commit)


@pytest.mark.bad_input
def test_what_was_there_stays_where_the_new_one_cannot_get_its_name(tmp_path):
    one, other = run_ranks(2, HERE + "lose_what_was_written", str(tmp_path / "state"))
    assert one == other and one[1]
    assert f"state.partial cannot be renamed {tmp_path}/state: No such file" in one[0]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "strategy.json").read_text() == "before"
