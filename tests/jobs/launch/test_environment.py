"""Ranks in the environment: incomplete or invalid variables are errors of ours, and missing ranks are named."""

from __future__ import annotations

import pytest

from roll_batching.cli import main
from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.launch.rendezvous import check_world_size, rank_info
from roll_batching.jobs.processes.child_process import LAUNCHER
from tests.jobs.launch.commands import ROOT, done
from tests.support.ranks import _free_port

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set in the environment, though RANK is: torchrun sets RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set in the environment, though RANK is"),
        ({"RANK": None}, "RANK is not set in the environment, though WORLD_SIZE is"),
        ({"RANK": ""}, "RANK is not set in the environment, though WORLD_SIZE is"),
        ({"RANK": "one"}, "RANK='one' is no whole number"),
        ({"LOCAL_RANK": "gpu0"}, "LOCAL_RANK='gpu0' is no whole number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is not from 0 to RANK = 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not from 0 to RANK = 1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is no whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({"RANK": "2"}, "RANK=2 is not from 0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "-1"}, "RANK=-1 is not"),
    ],
)
def test_half_an_environment_is_an_error(changes, words, capsys, monkeypatch, report):
    for name, value in {**WHOLE, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(ROOT / "configs" / "demo_grpo.yaml")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said
    report(said.strip())


def test_a_whole_environment_is_a_place():
    assert rank_info({}) is None
    place = rank_info(WHOLE)
    assert (place.rank, place.world_size, place.address) == (1, 2, "127.0.0.1:29500")
    assert place.launcher is None and not place.is_supervised
    assert rank_info({**WHOLE, "TORCHELASTIC_RUN_ID": "x"}).is_supervised
    ours = rank_info({**WHOLE, LAUNCHER: "77"})
    assert ours.launcher == 77 and ours.is_supervised


@pytest.mark.bad_input
def test_devices_and_processes_that_differ_are_an_error_under_torchrun(report):
    config = config_from_dict({"actor_train": {"device_mapping": "0-3"}})
    with pytest.raises(ConfigError, match="names 4 devices and 2 processes were started") as caught:
        check_world_size(config, rank_info(WHOLE))
    report(str(caught.value))
    check_world_size(config, rank_info({**WHOLE, LAUNCHER: "77"}))  # --nproc said so
    check_world_size(config, rank_info({**WHOLE, "WORLD_SIZE": "4"}))
    check_world_size(config_from_dict({}), rank_info(WHOLE))


MEET = """
import sys
from roll_batching.errors import LayoutError
from roll_batching.jobs.launch.rendezvous import rank_info
from roll_batching.jobs.launch.rendezvous import wait_for_ranks
try:
    wait_for_ranks(rank_info(), float(sys.argv[1]), notice_after=0.5)
except LayoutError as error:
    sys.exit(str(error))
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("rank", "minutes", "waiting", "end"),
    [
        (
            "1",
            "0.06",
            "for rank 0, which should answer at 127.0.0.1:",
            "rank 1 of 3 could not meet the others at 127.0.0.1:",
        ),
        pytest.param(
            "0",
            "0.15",
            "for ranks 1, 2 of 3, which did not start",
            "ranks 1, 2 of 3 did not start within 0.15 minutes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_does_not_come_is_named(rank, minutes, waiting, end, tmp_path, report):
    place = {**WHOLE, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "MASTER_PORT": str(_free_port())}
    code, said = done(tmp_path, "-c", MEET, minutes, **place)
    assert code == 1
    notices = [line for line in said.splitlines() if line.startswith("notice: ")]
    begun = [line.split(" s ")[0] for line in notices]
    assert begun[:2] == [f"notice: rank {rank} has waited {seconds}" for seconds in (0.5, 1)], said
    assert waiting in notices[-1]
    assert all(f"for {minutes} minutes at most (in jobs: actor_train.backend_timeout)" in line for line in notices)
    assert said.splitlines()[-1].startswith(end)
    assert len(said.splitlines()) == len(notices) + 1, "torch says nothing of its own"
    report(notices[-1])
    report(said.splitlines()[-1])
