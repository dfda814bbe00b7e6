"""`roll-batching doctor`: passes on sound ranks, names each planted fault with its rank, and never hangs."""

from __future__ import annotations

import json
import time
from importlib.metadata import version

import pytest
import torch

from roll_batching.tools.doctor.examination import checks_of
from tests.support.commands import run_command
from tests.support.ranks import run_ranks


def examine_planted(tmp_path, fault, *checks, limits=None, seconds=60.0):
    """The records of both ranks, equal, by name."""
    payload = {"home": str(tmp_path), "fault": fault, "checks": checks, "limits": limits or {}, "seconds": seconds}
    run_ranks(2, "tests.tools.doctor.faults:run_checks", payload, timeout=120, check=False, grace=5)
    files = sorted(tmp_path.glob("records-*"))
    records = [json.loads(file.read_text()) for file in files]
    for each in records[1:]:  # both ranks read the same answers
        assert [(r["name"], r["status"], r["finding"]) for r in each] == [
            (r["name"], r["status"], r["finding"]) for r in records[0]
        ]
    assert not list(tmp_path.glob("*/.doctor-*")), "files of the examination stay"
    return {record["name"]: record for record in records[0]}


FAULTS = {
    "wrong_backend": (("one rank", "attention"), "attention", "mine float32 on rank 1 is off by 1.0%"),
    "failing_backend": (
        ("one rank", "attention"),
        "attention",
        "mine float32 on rank 1 fails with RuntimeError: no kernel image",
    ),
    "slow_rank": (("speed",), "speed", "rank 1 takes "),
    "file_in_place_of_folder": (("folder",), "folder", "rank 1: NotADirectoryError"),
    "another_folder": (("folder", "folder shared"), "folder shared", "rank 1 does not see files of ranks [0]"),
    "other_version": (
        ("installed",),
        "installed",
        f"megatron-core: {version('megatron-core')} on rank 0, 0.15.0 on rank 1",
    ),
    "old_versions": (("installed",), "installed", "megatron-core, which is 0.15.0 here"),
    "no_locks": (("folder",), "folder", "rank 1: OSError: this file system has no locks (No locks available)"),
    "local_locks": (("folder", "folder shared"), "folder shared", "rank 1 gets locks held by [0]"),
    "clock_an_hour_off": (("clocks",), "clocks", "clock of rank 1 off by +3600 s"),
    "wrong_broadcast": (("process group", "collectives"), "collectives", "broadcast is wrong on rank 1"),
    "wrong_receive": (("process group", "collectives"), "collectives", "send and receive is wrong on rank 1"),
    "wrong_token_exchange": (
        ("one rank", "process group", "layout EP 2"),
        "layout EP 2",
        " on rank 1",
    ),
    "wrong_alone": (("one rank",), "one rank", "rank 1 has the loss "),
    "wrong_in_groups": (
        ("one rank", "process group", "layout DP 2"),
        "layout DP 2",
        "the gradient of embedding.word_embeddings.weight differs by 1.0% on rank 1",
    ),
    "wrong_checkpoint": (
        ("process group", "folder", "folder shared", "checkpoint"),
        "checkpoint",
        "loaded weights: not equal on rank 1",
    ),
}


WITHOUT_GPU = {} if torch.cuda.is_available() else {"host reads": "not possible here"}


def quiet(examine, home):
    """The statuses of `examine`, by name; repeated where only `speed` fails, as other processes share these cores."""
    for attempt in range(4):
        statuses = examine(home / f"attempt{attempt}")
        if [name for name, status in statuses.items() if status == "failed"] != ["speed"]:
            break
    return statuses


NAME_BOTH = {"another_folder", "local_locks", "other_version", "wrong_token_exchange"}
"""Faults between two ranks, neither of which is right; a wrong loss is that of all ranks."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_rank(tmp_path, fault):
    checks, name, finding = FAULTS[fault]
    records = examine_planted(tmp_path, fault, *checks)
    assert records[name]["status"] == "failed" and finding in records[name]["finding"], records[name]
    assert records[name]["next"] and records[name]["catches"]
    accuses_rank_0 = records[name]["finding"].startswith("rank 0") or " on rank 0" in records[name]["finding"]
    assert accuses_rank_0 == (fault in NAME_BOTH)
    assert {record["status"] for other, record in records.items() if other != name} <= {"passed"}


def test_without_a_fault_the_same_checks_pass(tmp_path):
    names = dict.fromkeys(name for checks, *_ in FAULTS.values() for name in checks)

    def examine(folder):
        folder.mkdir()
        return {name: record["status"] for name, record in examine_planted(folder, "", *names).items()}

    assert quiet(examine, tmp_path) == dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("limits", "name", "finding"),
    [
        ({"LEAST_SHARED_MEMORY": 1 << 60}, "limits", "MiB free in /dev/shm, needed: "),
        ({"NEEDED": 1 << 40}, "limits", "open files (ulimit -Hn), needed: "),
        ({"LARGEST_LEAK": -(1 << 40)}, "memory", "rank 1 keeps "),
    ],
)
def test_a_machine_beyond_a_limit_is_named(tmp_path, limits, name, finding):
    record = examine_planted(tmp_path, "", "process group", name, limits=limits)[name]
    assert record["status"] == "failed" and finding in record["finding"]


@pytest.mark.parametrize(
    ("fault", "findings"),
    [
        ("never_joins", ["rank 0: not done after 3 s, inside ", "rank 1: not done after 3 s, inside <lambda> (faults"]),
        ("stopped_process", ["rank 0: not done after 3 s", "rank 1: no answer within 8 s"]),
    ],
)
def test_a_collective_that_hangs_is_named_and_ends(tmp_path, fault, findings):
    started = time.monotonic()
    records = examine_planted(tmp_path, fault, "process group", "collectives", "memory", seconds=3.0)
    assert time.monotonic() - started < 60
    assert records["collectives"]["status"] == "failed"
    assert all(finding in records["collectives"]["finding"] for finding in findings), records["collectives"]
    assert records["memory"]["status"] == "not possible here" and "answer" in records["memory"]["finding"]


# ---- the command


def test_the_command_alone(tmp_path):
    result = run_command("doctor", "--folder", tmp_path, "--json", tmp_path / "report.json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert {name for name, value in status.items() if value != "passed"} == {
        "collectives",
        "folder shared",
        "layout DP 1",
        *WITHOUT_GPU,
    }
    assert "10 passed, 0 failed, 4 not possible here" in result.stdout and "torchrun" in result.stdout
    assert report["checks"][0]["ranks"][0]["value"]["versions"]["torch"] and report["date"]
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_the_command_fails_with_a_folder_that_is_a_file_and_keeps_files_of_others(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert run_command("doctor", "--json", file).returncode == 2 and file.read_text() == "mine"
    result = run_command("doctor", "--folder", file)
    assert result.returncode == 1 and "NotADirectoryError" in result.stdout and "2 failed" not in result.stdout


def test_ranks_that_are_ray_actors_are_counted_by_nproc():
    for options in (["--launcher", "ray"], ["--nproc", "2"]):
        result = run_command("doctor", *options)
        assert result.returncode == 2 and "--launcher ray" in result.stderr and "--nproc" in result.stderr


@pytest.mark.cluster
def test_the_command_on_ray(tmp_path):
    def examine(folder):
        folder.mkdir()
        options = ["--launcher", "ray", "--nproc", "2", "--json", folder / "report.json"]
        run_command("doctor", "--folder", folder, *options, timeout=240)
        checks = json.loads((folder / "report.json").read_text())["checks"]
        assert {len(check["ranks"]) for check in checks if check["name"] not in WITHOUT_GPU} == {2}
        return {check["name"]: check["status"] for check in checks}

    names = [check.name for check in checks_of(2, full=False)]
    assert quiet(examine, tmp_path) == dict.fromkeys(names, "passed") | WITHOUT_GPU


def run_main(folder):
    from roll_batching.cli import main

    try:
        main(["doctor", "--folder", folder, "--json", f"{folder}/report.json"])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_command_on_ranks(tmp_path, ranks):
    def examine(folder):
        folder.mkdir()
        codes = run_ranks(ranks, "tests.tools.doctor.test_doctor:run_main", str(folder))
        checks = json.loads((folder / "report.json").read_text())["checks"]
        assert {len(check["ranks"]) for check in checks if check["name"] not in WITHOUT_GPU} == {ranks}
        statuses = {check["name"]: check["status"] for check in checks}
        assert codes == [int("failed" in statuses.values())] * ranks
        return statuses

    names = [check.name for check in checks_of(ranks, full=False)]
    assert quiet(examine, tmp_path) == dict.fromkeys(names, "passed") | WITHOUT_GPU
