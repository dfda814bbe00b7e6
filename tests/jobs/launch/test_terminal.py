"""Closed or full terminals, too few open files, and a loss that waits in a collective alone."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.launch.logs import log_path
from roll_batching.losses import LossOutput, TokenView
from tests.jobs.launch.commands import ROOT, done, environment, processes, train, trained, wait_for, write_job

pytest.importorskip("torch")
TALK = """
import sys
from pathlib import Path
from roll_batching.jobs.launch.rendezvous import rank_info
from roll_batching.jobs.launch.logs import keep_log

keep_log(Path(sys.argv[1]), rank_info())
for number in range(2000):
    print(f"line {number}")
print("warned", file=sys.stderr)
"""


def talk(folder: Path, stdout: Any, *flags: str) -> subprocess.CompletedProcess[str]:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return subprocess.run(
        [sys.executable, *flags, "-c", TALK, str(folder)],
        env={"PYTHONPATH": str(ROOT), **place}, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(("kind", "words"), [("closed", "Broken pipe (EPIPE)"), ("full", "No space left on device")])
def test_an_output_that_fails_is_said_once_and_done_without(tmp_path, kind, words, flags):
    if kind == "closed":
        reading, stdout = os.pipe()
        os.close(reading)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    told = talk(tmp_path, stdout, *flags)
    os.close(stdout)
    assert told.returncode == 0, told.stderr
    notice, warned = told.stderr.splitlines()
    assert (
        notice.startswith("notice: standard output cannot be written to: ") and words in notice and warned == "warned"
    )
    log = log_path(tmp_path, 0).read_text().replace(f"{notice}\n", "").splitlines()
    assert [line for line in log if line.startswith("line ")] == [f"line {number}" for number in range(2000)]


@pytest.mark.slow
def test_a_job_without_a_terminal_is_done(tmp_path):
    """Standard output closed from the start: `>&-`."""
    arguments = train(write_job(tmp_path, warmup=None, max_steps=1, eval_samples=0), ranks=1)
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    status, said = done(tmp_path, "-c", code, *arguments)
    assert status == 0, said
    rows = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1] and "Traceback" not in said


def limited(folder: Path, soft: int, hard: int, *overrides: str) -> tuple[int, str]:
    arguments = train(write_job(folder, warmup=None, max_steps=1, eval_samples=0), *overrides)
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(folder), text=True, timeout=150,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )  # fmt: skip
    wait_for(lambda: not processes(folder), 5)
    return process.returncode, process.stdout


@pytest.mark.bad_input
def test_too_few_open_files_are_told_by_their_name_before_anything_starts(tmp_path, report):
    code, said = limited(tmp_path, 64, 64)
    report(said)
    assert code == 1 and "error: ulimit -n is 64: a process here may open 64 files" in said and "Traceback" not in said
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_low_limit_is_raised_where_that_is_allowed(tmp_path):
    code, said = limited(tmp_path, 64, 4096)
    assert code == 0, said


class Waits:
    """A loss in which one rank alone enters a barrier."""

    masks = ("response_mask",)

    def __init__(self, *, rank: int = 0) -> None:
        self.rank = rank

    def token_loss(self, tokens: TokenView) -> LossOutput:
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            dist.barrier()
        return LossOutput(-tokens.mean(tokens.log_probs))


@pytest.mark.slow
@pytest.mark.bad_input
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_waits_alone_is_named_with_its_line(tmp_path, report, rank):
    code, said = trained(
        tmp_path,
        warmup=None,
        eval_samples=0,
        reward_function="tests.jobs.rl.jobs:length",
        loss_function="tests.jobs.launch.test_terminal:Waits",
        loss_args={"rank": rank},
        actor_train__backend_timeout=0.25,
    )
    report(said)
    assert code == 1
    assert (
        f"rank {rank} failed: Waits timed out in a collective that not every rank entered" in said.splitlines()[-1]
    ), said
    assert "tests/jobs/launch/test_terminal.py, line " in said and "gloo" not in said.splitlines()[-1]
