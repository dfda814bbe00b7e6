"""Compilation: once per machine, with one warning, never the cause of a failed plan; its cache is keyed on content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.planning import PlanConstraints, code_cache, plan_step
from roll_batching.planning import compiled as compiling

pytestmark = pytest.mark.planning
ROOT = Path(__file__).resolve().parents[2]

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
            env={**os.environ, **environment},
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


SHUFFLE = """
from numba.core import event
from roll_batching.planning.packers.bin_packing import _shuffled

class Count(event.Listener):
    compiled = 0
    def on_start(self, event):
        Count.compiled += 1
    def on_end(self, event):
        pass

event.register("numba:compile", Count())
order = _shuffled(12, 3).tolist()
print(Count.compiled, order)
"""


def copy_package(folder: Path) -> Path:
    """The package under another path, as Ray's workers have it."""
    shutil.copytree(ROOT / "roll_batching", folder / "roll_batching", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def start_shuffle(package: Path, temporary: Path, **environment: str) -> subprocess.Popen[str]:
    (temporary / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "XDG_CACHE_HOME": str(temporary / "cache"),
        "TMPDIR": str(temporary / "tmp"),
        **environment,
    }
    command = [sys.executable, "-c", SHUFFLE]
    return subprocess.Popen(command, cwd=temporary, env=environment, stdout=-1, stderr=-1, text=True)


def shuffle(package: Path, temporary: Path, **environment: str) -> tuple[bool, str, str]:
    """(whether the process compiled, a shuffled order, stderr) of a process that imports `package`."""
    process = start_shuffle(package, temporary, **environment)
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    compiled, _, order = out.strip().partition(" ")
    return int(compiled) > 0, order, err


def test_a_copy_of_the_package_does_not_compile_again_and_a_changed_source_does(tmp_path: Path) -> None:
    first, second = (copy_package(tmp_path / name) for name in ("job_1", "job_2"))
    compiled, order, said = shuffle(first, tmp_path)
    assert compiled and said == ""
    assert shuffle(second, tmp_path) == (False, order, "")
    generator = second / "roll_batching" / "planning" / "compiled.py"  # whose code _shuffled contains
    generator.write_text(generator.read_text().replace("48271 %", "16807 %"))
    compiled, other, _ = shuffle(second, tmp_path)
    assert compiled and other != order
    assert shuffle(first, tmp_path) == (False, order, "")


@pytest.mark.slow
def test_processes_without_a_lock_share_a_cache_also_with_other_cpus(tmp_path: Path) -> None:
    """As on nodes with one home folder: both write, and each finds its own code."""
    started = [start_shuffle(ROOT, tmp_path, **cpu) for cpu in ({}, {}, {"NUMBA_CPU_NAME": "generic"})]
    orders = {process.communicate(timeout=170)[0].partition(" ")[2] for process in started}
    assert len(orders) == 1 and all(process.returncode == 0 for process in started)
    for cpu in ({}, {"NUMBA_CPU_NAME": "generic"}):
        assert not shuffle(ROOT, tmp_path, **cpu)[0]
    (found,) = (tmp_path / "cache" / "roll-batching").iterdir()
    assert len(list(found.glob("bin_packing._shuffled-*.nbc"))) == 2
    assert {path.suffix for path in found.iterdir()} == {".nbc"}


@pytest.mark.slow
def test_code_that_cannot_be_read_is_compiled_again(tmp_path: Path) -> None:
    _, order, _ = shuffle(ROOT, tmp_path)
    for code in tmp_path.glob("cache/roll-batching/*/*.nbc"):
        code.write_bytes(code.read_bytes()[:100])
    assert shuffle(ROOT, tmp_path)[:2] == (True, order)
    assert shuffle(ROOT, tmp_path)[:2] == (False, order)


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_said_once_and_the_code_is_kept_elsewhere(tmp_path: Path) -> None:
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    package = copy_package(tmp_path / "package")
    homes = {"HOME": str(blocked), "XDG_CACHE_HOME": str(blocked)}
    compiled, order, said = shuffle(package, tmp_path, **homes)
    assert compiled and said.count(f"{blocked}/roll-batching cannot be written (Not a directory)") == 1
    assert "NUMBA_CACHE_DIR" in said
    assert shuffle(ROOT, tmp_path, **homes) == (False, order, "")
    (tmp_path / "other").mkdir()
    compiled, _, said = shuffle(ROOT, tmp_path, **homes, NUMBA_CACHE_DIR=str(tmp_path / "other"))
    assert compiled and said == "" and list(tmp_path.glob("other/roll-batching/*/*.nbc"))
    (tmp_path / f"roll-batching-{os.getuid()}").write_text("")  # no private folder either: each process compiles
    assert [shuffle(ROOT, tmp_path, **homes, TMPDIR=str(tmp_path)) for _ in range(2)] == [(True, order, "")] * 2


def test_code_of_old_sources_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache._core.config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "roll-batching" / "kept").mkdir(parents=True)
    for version in range(12):
        monkeypatch.setattr(code_cache, "_sources_digest", lambda version=version: f"{version:02}")
        folder = code_cache.cache_folder.__wrapped__()
        os.utime(folder, (version, version))
    left = sorted(path.name[-2:] for path in tmp_path.glob("roll-batching/numba-*"))
    assert left == [f"{version:02}" for version in range(4, 12)]
    assert (tmp_path / "roll-batching" / "kept").is_dir()


@pytest.mark.parametrize("broken", ["lock", "mark"])
def test_a_disk_that_takes_no_file_costs_no_plan(broken, tmp_path, monkeypatch):
    """The path of the lock is a folder, or the cache folder disappears while the plan is made."""
    folder = tmp_path / "own"
    folder.mkdir()
    if broken == "lock":
        (folder / "compiling.lock").mkdir()
    monkeypatch.setattr(compiling, "private_folder", lambda: folder)
    monkeypatch.setattr(compiling, "cache_folder", lambda: folder)
    monkeypatch.setattr(compiling, "_ready_kinds", set())
    kind = f"a kind of its own, {broken}"
    with compiling.compiled_once(kind):
        if broken == "mark":
            shutil.rmtree(folder)
    assert kind in compiling._ready_kinds
    assert plan_step([3, 4], PlanConstraints(dp_size=2, max_tokens=8)).num_micro_batches == 1


def test_two_kinds_that_are_compiled_one_after_the_other_are_said_once(tmp_path, monkeypatch, caplog):
    """As in two processes that compile one kind each: the second does not warn."""
    monkeypatch.setattr(code_cache, "private_folder", lambda: tmp_path)
    for process in range(2):
        code_cache.warn_once("compilation", "compiling")
        assert len(caplog.records) == 1, process
    warned = tmp_path / "warned_of_compilation"
    old = warned.stat().st_mtime - code_cache.WARNING_SECONDS - 1
    os.utime(warned, (old, old))
    code_cache.warn_once("compilation", "compiling")
    assert len(caplog.records) == 2
