"""Log files of ranks, under every launcher and for every kind of end."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from roll_batching.jobs.launch.logs import log_notice, log_path
from tests.jobs.launch.commands import ROOT, trained

pytest.importorskip("torch")

TALK = """
import os, signal, sys
from pathlib import Path
from roll_batching.jobs.launch.rendezvous import rank_info
from roll_batching.jobs.launch.logs import keep_log

keep_log(Path(sys.argv[1]), rank_info(), resumes=sys.argv[2] == "resume")
print("printed")
print("warned", file=sys.stderr)
os.write(2, b"from a library\\n")
os.system("echo from a child")
print("ends", end="", flush=True)
if sys.argv[2] == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def talk(folder, rank, how="ends", **variables):
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **variables}
    done = subprocess.run(
        [sys.executable, "-c", TALK, str(folder), how],
        env={"PYTHONPATH": str(ROOT), **place}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    file = folder / "logs" / f"rank_{rank:04d}.log"
    return done, file.read_text().splitlines() if file.exists() else []


def test_ranks_other_than_0_leave_every_byte_in_their_log(tmp_path):
    done, log = talk(tmp_path, 1)
    assert (done.stdout, done.stderr) == ("printed\nends", "warned\n"), "what Python says is on the terminal as before"
    assert log[1:] == ["printed", "warned", "from a library", "from a child", "ends"]


def test_rank_0_keeps_its_terminal_and_a_copy(tmp_path):
    done, log = talk(tmp_path, 0)
    assert sorted(done.stdout.splitlines()) == ["ends", "from a child", "printed"]
    assert done.stderr.splitlines() == ["warned", "from a library"]
    assert log[1:] == ["printed", "warned", "ends"]


def test_a_log_goes_on_where_it_was_and_says_which_attempt_writes(tmp_path):
    talk(tmp_path, 1)
    talk(tmp_path, 1, TORCHELASTIC_RESTART_COUNT="1")
    _, log = talk(tmp_path, 1, "resume")
    firsts = [line for line in log if line.startswith("==== rank 1 of 2, ")]
    assert [re.search(r"attempt \d[^;]*", line)[0] for line in firsts] == [
        "attempt 1", "attempt 2", "attempt 1, from the last checkpoint where there is one"
    ]  # fmt: skip
    assert log.count("printed") == 3


def test_a_native_crash_leaves_where_python_was(tmp_path):
    done, log = talk(tmp_path, 0, "crash")
    assert done.returncode < 0
    assert "Fatal Python error: Segmentation fault" in "\n".join(log)
    assert any('File "<string>", line ' in line and " in <module>" in line for line in log)


def test_a_log_that_cannot_be_written_is_said_and_done_without(tmp_path):
    (tmp_path / "logs").touch()
    done, log = talk(tmp_path, 1)
    assert done.returncode == 0 and not log
    assert done.stderr.startswith("notice: rank 1 keeps no log in ") and "from a library" in done.stderr


def test_a_log_without_output_of_the_last_attempt_is_not_named(tmp_path):
    file = log_path(tmp_path, 1)
    assert log_notice(tmp_path, 1) == ""
    file.parent.mkdir()
    heading = "==== rank 1 of 2, 2026-11-22 17:01:02, attempt 1; process 4711 on node7\n"
    for text, is_named in (("", False), ("a line\n", True), (f"a line\n\n{heading}", False), (f"a\n{heading}b", True)):
        file.write_text(heading + text)
        assert log_notice(tmp_path, 1) == (f"notice: the log of rank 1 is {file}\n" if is_named else "")


@pytest.mark.cluster
@pytest.mark.slow
def test_a_lost_rank_is_named_with_its_log_which_has_the_stack(tmp_path):
    text = """
import os
class Loss:
    masks = ("response_mask",)
    def token_loss(self, tokens):
        if os.environ["RANK"] == "1":
            os.abort()
"""
    (tmp_path / "broken.py").write_text(text)
    short = {"warmup": None, "eval_samples": 0, "max_steps": 1, "reward_function": "tests.jobs.rl.jobs:length"}
    code, said = trained(tmp_path, loss_function="broken:Loss", **short)
    assert code == 1
    *_, before, last = said.splitlines()
    assert last.startswith("error: rank 1 was ended by signal 6 (SIGABRT) without a message"), said
    found = re.fullmatch(r"notice: the log of rank 1 is (.*/logs/rank_0001\.log)", before)
    assert found, said
    log = (tmp_path / found[1]).read_text()
    assert log.startswith("==== rank 1 of 2, ") and "Fatal Python error: Aborted" in log and "in token_loss" in log
