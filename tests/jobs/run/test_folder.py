"""A run's folder: one run at a time writes into it, and no rerun or resume loses anything in it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.run.folder import LOCKED_FOLDER, PreviousRun, lock_folder
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

RUN = "tests.jobs.rl.jobs:run"


def hold_for_ever(folder: str) -> None:
    """In a process of its own: locks the folder and forks a child that lives on, which reports that it runs."""
    with lock_folder(Path(folder)):
        if os.fork() == 0:
            (Path(folder) / "taken").touch()  # not the parent: its kill could come before the child's first instruction
            os.execvp("sleep", ["sleep", "30"]) if folder.endswith("exec") else time.sleep(30)
            os._exit(0)
        time.sleep(60)


@contextlib.contextmanager
def held_elsewhere(folder: Path) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=hold_for_ever, args=(str(folder),))
    process.start()
    try:
        while not (folder / "taken").exists():
            assert process.is_alive()
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.join()


# ---- the lock


@pytest.mark.bad_input
def test_a_second_run_is_told_who_is_there_and_what_to_do(tmp_path, report):
    with held_elsewhere(tmp_path / "one") as process:
        with pytest.raises(RollBatchingError) as caught, lock_folder(tmp_path / "one"):
            pass
        said = str(caught.value)
        assert f"process {process.pid} on {os.uname().nodename} since 20" in said
        assert "give this run another exp_name or output_dir" in said
        report(said.replace(str(tmp_path), "..."))
        with lock_folder(tmp_path / "two"):
            pass


@pytest.mark.parametrize("name", ["forked", "exec"])
def test_a_killed_run_blocks_nobody_though_its_children_live(tmp_path, name):
    with held_elsewhere(tmp_path / name) as process:
        process.kill()
        process.join()
        with lock_folder(tmp_path / name):
            pass


def test_launcher_and_rank_0_hold_it_together_and_either_keeps_others_out(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    launcher = lock_folder(folder)
    variables = launcher.__enter__()
    monkeypatch.setenv(LOCKED_FOLDER, variables[LOCKED_FOLDER])
    with lock_folder(folder):
        launcher.__exit__(None, None, None)  # as if it were killed
        monkeypatch.delenv(LOCKED_FOLDER)
        with pytest.raises(RollBatchingError, match="is in use by another run"), lock_folder(folder):
            pass
    with lock_folder(folder):
        pass


def test_a_temporary_folder_goes_unless_something_is_left_in_it(tmp_path, monkeypatch):
    with lock_folder(tmp_path / "weights", temporary=True):
        with pytest.raises(RollBatchingError, match="in use"), lock_folder(tmp_path / "weights", temporary=True):
            pass
        assert (tmp_path / "weights" / ".lock").exists(), "who is refused removes nothing"
    assert not (tmp_path / "weights").exists()
    with lock_folder(tmp_path / "weights", temporary=True):
        (tmp_path / "weights" / "other").touch()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["other"]

    def removes(lock: int, folder: Path, *, shared: bool) -> None:
        """Who held it before has removed it, after it was opened here."""
        monkeypatch.undo()
        (folder / ".lock").unlink()

    monkeypatch.setattr("roll_batching.jobs.run.folder._acquire", removes)
    with lock_folder(tmp_path / "weights"):
        with pytest.raises(RollBatchingError, match="in use"), lock_folder(tmp_path / "weights"):
            pass


@pytest.mark.bad_input
def test_a_folder_that_cannot_be_written_is_named(tmp_path, report):
    (tmp_path / "file").touch()
    with pytest.raises(RollBatchingError, match=r"Not a directory \(ENOTDIR\). Set another output_dir") as caught:
        lock_folder(tmp_path / "file" / "run").__enter__()
    report(str(caught.value).replace(str(tmp_path), "..."))


@pytest.mark.bad_input
def test_under_another_launcher_all_ranks_hear_of_it(tmp_path):
    write_data(tmp_path)
    with held_elsewhere(tmp_path / "runs" / "tiny"):
        outcomes = run_ranks(2, RUN, settings(tmp_path), check=False, timeout=60)
    assert all(o.returncode and "is in use by another run (process" in o.output for o in outcomes), outcomes[1].output


@pytest.mark.bad_input
def test_the_command_ends_at_once(tmp_path):
    write_data(tmp_path)
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path)))
    command = [sys.executable, "-m", "roll_batching.cli", "train", "--config", str(config), "--nproc", "2"]
    with held_elsewhere(tmp_path / "runs" / "tiny"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "is in use by another run (process" in done.stderr


# ---- reruns and resumes


def supervised(folder: Path, **changes: Any) -> dict[str, Any]:
    return settings(folder, **{"save_steps": 2, "max_steps": 0, **changes})


def tree(folder: Path) -> dict[str, bytes]:
    """All files of a run that are a user's, with their content."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_reruns_lose_nothing(tmp_path):
    write_data(tmp_path)
    run = tmp_path / "runs" / "tiny"
    left = []
    for seed in (1, 2, 3):
        outcomes = run_ranks(1, RUN, supervised(tmp_path, seed=seed), check=False)
        assert outcomes[0].returncode == 0, outcomes[0].output
        told = re.findall(r"files of an earlier run of this name are now in (\S+)", outcomes[0].output)
        assert len(told) == (seed > 1)
        left.append({name: data for name, data in tree(run).items() if not name.startswith("previous/")})
        assert {"config.yaml", "metrics.jsonl", "learning_curve.png"} <= left[-1].keys()
    first, second = sorted((run / "previous").iterdir())
    assert tree(first) == left[0] and tree(second) == left[1]
    assert left[0]["metrics.jsonl"] != left[1]["metrics.jsonl"]
    assert told == [str(second)]


def test_a_resume_that_fails_changes_nothing_and_one_that_works_keeps_what_it_cuts(tmp_path):
    write_data(tmp_path)
    run = tmp_path / "runs" / "tiny"
    job = supervised(tmp_path, warmup__training_args__max_steps=4)
    run_ranks(1, RUN, job)
    before = tree(run)
    assert len(read_metrics(run / "metrics.jsonl")) == 4
    point = str(run / "checkpoints" / "warmup-000002")
    torn = tmp_path / "torn"
    shutil.copytree(point, run / "checkpoints" / "warmup-000003")
    shutil.copy(run / "checkpoints" / "warmup-000003" / ".metadata", torn)
    (run / "checkpoints" / "warmup-000003" / ".metadata").write_bytes(torn.read_bytes()[:100])
    for bad in (str(run / "checkpoints" / "warmup-000003"), point):
        changes = {"resume_from_checkpoint": bad, "seed": job["seed"] + (bad == point)}
        (outcome,) = run_ranks(1, RUN, job | changes, check=False)
        assert outcome.returncode != 0
        now = tree(run)
        assert {name: data for name, data in now.items() if "warmup-000003" not in name} == before
    shutil.rmtree(run / "checkpoints" / "warmup-000003")

    run_ranks(1, RUN, job | {"resume_from_checkpoint": os.path.relpath(point)})  # its own, otherwise spelt
    (earlier,) = (run / "previous").iterdir()
    kept = tree(earlier)
    assert kept["metrics.jsonl"] == before["metrics.jsonl"]
    assert {name.split("/")[1] for name in kept if name.startswith("checkpoints")} == {"warmup-000004"}
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["warmup-000002", "warmup-000004"]


def test_what_is_taken_away_is_numbered_and_dated(tmp_path):
    (tmp_path / "previous" / "007-20200101-000000").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("rows")
    os.utime(tmp_path / "metrics.jsonl", (0, 10**9))
    earlier = PreviousRun(tmp_path)
    assert earlier.notice() is None
    earlier.move(tmp_path / "tensorboard")
    earlier.move(tmp_path / "metrics.jsonl")
    assert earlier.target is not None and re.fullmatch(r"008-2001090[89]-\d{6}", earlier.target.name)
    assert (earlier.target / "metrics.jsonl").read_text() == "rows" and not (tmp_path / "metrics.jsonl").exists()
