"""A step whose figures cannot be written ends the job on all ranks, with one error that says what to do."""

from __future__ import annotations

import os

import pytest

from roll_batching.errors import RollBatchingError
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks


def said_by_each(jobs):
    """On a rank: what each of the jobs ends with."""
    from roll_batching.errors import RankError
    from tests.jobs.rl.jobs import run

    said = []
    for job in jobs:
        try:
            run(job)
        except RankError as error:
            said.append(str(error))
    return said


@pytest.mark.bad_input
def test_a_full_disk_under_the_rows_or_rollouts_is_one_error_on_all_ranks(tmp_path, report):
    write_data(tmp_path)
    files, jobs = ("metrics.jsonl", "rollouts.jsonl"), []
    for file in files:
        folder = tmp_path / "runs" / file
        folder.mkdir(parents=True)
        (folder / file).symlink_to("/dev/full")
        jobs.append(settings(tmp_path, exp_name=file, warmup=None, max_steps=1, eval_samples=0))
    one, other = run_ranks(2, "tests.jobs.run.test_recording:said_by_each", jobs)
    assert one == other and len(one) == len(files)
    for file, message in zip(files, one, strict=True):
        assert message.startswith("recording the step: rank 0:") and "No space left on device (ENOSPC)" in message
        assert f"{file} cannot be written" in message and "Free some space" in message
    report(one[0])


@pytest.mark.bad_input
def test_a_tracker_that_takes_no_figures_is_named(tmp_path):
    """wandb itself, without network, after its run was finished."""
    pytest.importorskip("wandb", reason="pip install wandb")
    from roll_batching.errors import RollBatchingError
    from roll_batching.jobs.observe.trackers import TrackedRun

    run = TrackedRun("wandb", tmp_path, "mine", {}, {"mode": "offline"})
    run.add({"phase": "rl", "step": 1, "loss": 1.0})
    run.close()
    with pytest.raises(RollBatchingError, match="wandb refuses the step's metrics.*resume the run"):
        run.add({"phase": "rl", "step": 2, "loss": 1.0})
    run.close()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "config.yaml"])
def test_a_pipe_in_the_runs_folder_is_not_waited_for(tmp_path, name):
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.run.folder import PreviousRun
    from roll_batching.jobs.run.recorder import RunRecorder

    write_data(tmp_path)
    config = config_from_dict(settings(tmp_path))
    config.run_folder.mkdir(parents=True)
    os.mkfifo(config.run_folder / name)
    with pytest.raises(RollBatchingError, match=f"{name} is a pipe, and writing waits for its reader: remove it"):
        RunRecorder(config, enabled=True).open(PreviousRun(config.run_folder), None)
