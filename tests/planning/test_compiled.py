"""Compilation: once per machine, with one warning, cached where possible, never the cause of a failed plan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning import compiled as compiling

pytestmark = pytest.mark.planning
ROOT = Path(__file__).resolve().parents[2]
OWN_CACHE = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

FIRST_PLAN = """
import os, sys, time
from roll_batching.planning import PlanConstraints, plan_step
from numba.core import event

class Count(event.Listener):
    compiled = 0
    def on_start(self, event):
        Count.compiled += 1
    def on_end(self, event):
        pass

event.register("numba:compile", Count())
plan = plan_step(list(range(1, 200)), PlanConstraints(dp_size=4, max_tokens=512))
print(Count.compiled, plan.fingerprint)
"""


def first_plans(processes: int, **environment: str) -> tuple[list[tuple[int, str]], str]:
    """(compilations, fingerprint) of each of several concurrent processes, and their stderr."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_PLAN],
            cwd=ROOT,
            env=OWN_CACHE | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    outputs = [process.communicate(timeout=170) for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    found = [(int(out.split()[0]), out.split()[1]) for out, _ in outputs]
    return found, "".join(err for _, err in outputs)


@pytest.mark.slow
def test_one_process_of_a_machine_compiles_and_says_so(tmp_path):
    temporary = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    found, said = first_plans(3, **temporary)
    assert sorted(compiled > 0 for compiled, _ in found) == [False, False, True], found
    assert len({fingerprint for _, fingerprint in found}) == 1
    assert said.count("compiling the planner, once on this machine") == 1
    later, said = first_plans(1, **temporary)
    assert later == [(0, found[0][1])] and said == ""


def first_plan_of(package: Path, cache: Path, **environment: str) -> tuple[int, str]:
    """(compilations, fingerprint) of the first plan by a copy of the package."""
    temporary = cache / "temporary"
    temporary.mkdir(parents=True, exist_ok=True)
    environment |= {"PYTHONPATH": str(package), "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PLAN],
        cwd=package,
        env=OWN_CACHE | environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    compiled, fingerprint = done.stdout.split()
    return int(compiled), fingerprint


@pytest.mark.slow
def test_copies_of_the_package_share_compiled_code_until_a_source_changes(tmp_path):
    """As the workers of two Ray jobs, each of which copies the package into a folder of its own."""
    for name in ("first", "second"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "roll_batching", tmp_path / name / "roll_batching", ignore=ignored)
    compiled, fingerprint = first_plan_of(tmp_path / "first", tmp_path / "cache")
    assert compiled > 0
    assert first_plan_of(tmp_path / "second", tmp_path / "cache") == (0, fingerprint)
    assert not list((tmp_path / "second").rglob("*.nbc"))
    changed = tmp_path / "second" / "roll_batching" / "planning" / "arrays.py"  # compiled code of others contains it
    changed.write_text(changed.read_text() + "\n")
    assert first_plan_of(tmp_path / "second", tmp_path / "cache")[0] > 0
    assert first_plan_of(tmp_path / "first", tmp_path / "cache") == (0, fingerprint)


@pytest.mark.slow
def test_damaged_code_is_compiled_again_and_machines_with_other_cpus_have_their_own(tmp_path):
    shutil.copytree(ROOT / "roll_batching", tmp_path / "roll_batching", ignore=shutil.ignore_patterns("__pycache__"))
    compiled, fingerprint = first_plan_of(tmp_path, tmp_path / "cache")
    (folder,) = (tmp_path / "cache" / "roll-batching").iterdir()
    for ending, kept in (("nbc", 100), ("nbi", 20)):
        for file in folder.glob(f"*.{ending}"):
            file.write_bytes(file.read_bytes()[:kept])
        assert first_plan_of(tmp_path, tmp_path / "cache") == (compiled, fingerprint)
        assert first_plan_of(tmp_path, tmp_path / "cache") == (0, fingerprint)
    assert first_plan_of(tmp_path, tmp_path / "cache", NUMBA_CPU_NAME="generic") == (compiled, fingerprint)
    assert first_plan_of(tmp_path, tmp_path / "cache") == (0, fingerprint)


@pytest.mark.slow
def test_compiled_code_is_kept_where_neither_package_nor_home_can_be_written(tmp_path):
    """Neither the package nor a home folder is writable: the cache is temporary or absent, and plans are made."""
    package = tmp_path / "package"
    shutil.copytree(ROOT / "roll_batching", package / "roll_batching", ignore=shutil.ignore_patterns("__pycache__"))
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    for cache in package.rglob("*"):  # a file where the folder of compiled code would be
        if cache.is_dir():
            (cache / "__pycache__").write_text("")
    (package / "roll_batching" / "__pycache__").write_text("")
    environment = {"HOME": str(blocked), "XDG_CACHE_HOME": str(blocked), "PYTHONPATH": str(package)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    for compiles in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_PLAN],
            cwd=tmp_path,
            env=OWN_CACHE | environment,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, done.stderr
        assert (int(done.stdout.split()[0]) > 0) == compiles


@pytest.mark.parametrize("broken", ["lock", "mark"])
def test_a_disk_that_takes_no_file_costs_no_plan(broken, tmp_path, monkeypatch):
    """The path of the lock is a folder, or the cache folder disappears while the plan is made."""
    folder = tmp_path / "own"
    folder.mkdir()
    if broken == "lock":
        (folder / "compiling.lock").mkdir()
    monkeypatch.setattr(compiling, "_private_folder", lambda: folder)
    monkeypatch.setattr(compiling, "_ready_kinds", set())
    kind = f"a kind of its own, {broken}"
    with compiling.compiled_once(kind):
        if broken == "mark":
            shutil.rmtree(folder)
    assert kind in compiling._ready_kinds
    assert plan_step([3, 4], PlanConstraints(dp_size=2, max_tokens=8)).num_micro_batches == 1


def test_two_kinds_that_are_compiled_one_after_the_other_are_said_once(tmp_path, monkeypatch, caplog):
    """As in two processes that compile one kind each: the second does not warn."""
    monkeypatch.setattr(compiling, "_private_folder", lambda: tmp_path)
    for process in range(2):
        compiling._warn_once()
        assert len(caplog.records) == 1, process
    old = tmp_path.joinpath("last_warning").stat().st_mtime - compiling.WARNING_SECONDS - 1
    os.utime(tmp_path / "last_warning", (old, old))
    compiling._warn_once()
    assert len(caplog.records) == 2
