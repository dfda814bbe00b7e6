"""A checkpoint that is written while training goes on: what was when it began, and whole or not there."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.rl.jobs import settings, write_data
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_async_save:"


# ---- on ranks


def gated() -> threading.Event:
    """No file of a checkpoint is written before the event is set."""
    from roll_batching.strategy import checkpoint_writer

    gate, write = threading.Event(), checkpoint_writer._write
    checkpoint_writer._write = lambda *given: (gate.wait(), write(*given))[1]
    return gate


def train_on_while_it_is_written(payload: dict[str, Any]) -> Any:
    """Losses of two steps after a checkpoint, made while it is written; then from the checkpoint again."""
    import torch
    import torch.distributed as dist

    from roll_batching.strategy.checkpoint import write_state
    from roll_batching.strategy.checkpoint_folder import AtomicFolder
    from tests.strategy.test_checkpoint import bits, steps, strategy_of

    gate = gated()
    made = strategy_of({"fill": True, **payload["case"]})
    steps(made, 0, 2)
    before = bits(made)
    draft = AtomicFolder(payload["path"], made.layout.host_group)
    with draft.writing() as folder:
        writing = write_state(made.state, folder, background=True)
        aside = steps(made, 2, 4)
        assert writing._thread is None or not writing.done
        assert not draft.path.exists() and not list(folder.glob("*.distcp"))
        dist.barrier()
        gate.set()
        writing.finish()
    draft.commit()
    again = strategy_of({"seed": 99, **payload["case"]})
    again.load(payload["path"])
    found = bits(again)
    assert before.keys() == found.keys() and all(torch.equal(before[name], found[name]) for name in found)
    return aside == steps(again, 2, 4)


def job_that_ends_early(payload: dict[str, Any]) -> None:
    """A job whose checkpoints wait for their files from the second on; how it ends is told after its third row."""
    from roll_batching.strategy import checkpoint_writer
    from tests.jobs.rl.jobs import run

    write, whole = checkpoint_writer._write, Path(payload["whole"])

    def slow(*given: Any) -> Any:
        if whole.is_dir():
            if payload["end"] == "full":
                given[-1].append((Path(given[2][0]), OSError(28, "No space left on device")))
                return []
            threading.Event().wait()
        return write(*given)

    def end(self: Any, step: int, *given: Any, **options: Any) -> None:
        record(self, step, *given, **options)
        if step == 3 and payload["end"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and payload["end"] == "fails":
            raise RuntimeError("a figure is missing")

    from roll_batching.jobs.run.recorder import RunRecorder

    checkpoint_writer._write = slow
    record, RunRecorder.step = RunRecorder.step, end
    run(payload["job"])


# ---- tests


@pytest.mark.parametrize(
    "case",
    [
        {"layout": Layout(dp=2).megatron() | {"use_distributed_optimizer": True}},
        pytest.param({"layout": Layout(tp=2).megatron(), "dtype": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["distributed optimizer", "tp, bf16"],
)
def test_training_goes_on_and_the_checkpoint_is_what_was(tmp_path, case):
    run = {"path": str(tmp_path / "state"), "case": case}
    assert run_ranks(2, HERE + "train_on_while_it_is_written", run) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def supervised(folder: Path, **changes: Any) -> dict[str, Any]:
    job = settings(folder, save_steps=1, async_save=True, max_steps=0, save_total_limit=2, **changes)
    job["warmup"]["training_args"]["max_steps"] = 4
    return job


@pytest.mark.parametrize("end", ["killed", pytest.param("fails", marks=pytest.mark.slow), "full"])
def test_a_run_that_ends_meanwhile_leaves_the_last_whole_checkpoint(tmp_path, end):
    write_data(tmp_path)
    places = tmp_path / "runs" / "tiny" / "checkpoints"
    payload = {"job": supervised(tmp_path), "end": end, "whole": str(places / "warmup-000001")}
    outcomes = run_ranks(2, HERE + "job_that_ends_early", payload, check=False, timeout=120, grace=5)
    assert all(outcome.returncode for outcome in outcomes), outcomes[0].output
    named = sorted(path.name for path in places.iterdir() if path.suffix != ".partial")
    assert named == ["warmup-000001"]
    if end == "full":
        said = outcomes[0].output.strip().splitlines()[-1]
        assert "No space left on device (ENOSPC)" in said and f"{places}/warmup-000001 is complete: resume with" in said
        assert sorted(path.name for path in places.iterdir()) == named, "it is room that is missing"
    run_ranks(2, "tests.jobs.rl.jobs:run", supervised(tmp_path, resume_from_checkpoint=True))
    assert sorted(path.name for path in places.iterdir()) == ["warmup-000003", "warmup-000004"]
    rows = [json.loads(line) for line in (places.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
