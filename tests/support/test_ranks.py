from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from tests.support.ranks import RanksFailed, run_ranks

HERE = "tests.support.test_ranks:"


def who_am_i(payload):
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), payload["x"]


def summed(payload):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + payload)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value


def one_fails(payload):
    print("hello from", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        raise ValueError("rank one gives up")
    time.sleep(payload)


def sleep(payload):
    os.fork()  # a grandchild, which must end too
    time.sleep(payload)


def surroundings(payload):
    return os.environ.get("SOME_KEY"), "torch" in sys.modules, threading.active_count(), os.getpid()


def test_forked_and_fresh_ranks_see_the_given_environment():
    forked = run_ranks(2, HERE + "surroundings", env={"SOME_KEY": "x"})
    fresh = run_ranks(2, HERE + "surroundings", env={"SOME_KEY": "x"}, fresh=True)
    assert [r[0] for r in forked + fresh] == ["x"] * 4
    assert [r[1] for r in fresh] == [False, False]
    assert all(r[2] == 1 for r in forked), "a thread in the forking process can leave a lock held for ever"
    assert len({r[3] for r in forked + fresh} | {os.getpid()}) == 5


def test_every_rank_gets_its_number_and_the_payload():
    assert run_ranks(3, HERE + "who_am_i", {"x": [1, 2]}) == [(r, 3, {"x": [1, 2]}["x"]) for r in range(3)]


def test_ranks_talk_to_each_other_and_return_tensors():
    assert [float(t) for t in run_ranks(2, HERE + "summed", 10)] == [21.0, 21.0]


def test_a_failing_rank_ends_the_others_and_all_outputs_are_shown():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, HERE + "one_fails", 60, grace=0.5)
    assert time.monotonic() - start < 20
    assert "hello from 0" in str(caught.value) and "rank one gives up" in str(caught.value)


def test_without_check_each_rank_reports_its_own_end():
    first, second = run_ranks(2, HERE + "one_fails", 60, grace=0.5, check=False)
    assert first.returncode < 0 and second.returncode == 1
    assert "rank one gives up" in second.output and second.result is None


def test_time_runs_out():
    with pytest.raises(RanksFailed, match="not done after 1 s"):
        run_ranks(1, HERE + "sleep", 60, timeout=1)
