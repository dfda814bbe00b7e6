"""The data of the demo: right answers, a long tail, and held-out problems that nothing else contains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


def make(folder, *arguments):
    script = ROOT / "examples" / "ledger" / "make_data.py"
    sizes = ["--documents", "600", "--prompts", "300", "--heldout", "64"]
    command = [sys.executable, str(script), "--out", str(folder), *sizes, *arguments]
    subprocess.run(command, check=True, capture_output=True)
    files = ("corpus", "prompts", "heldout")
    return {f: [json.loads(x) for x in (folder / f"{f}.jsonl").read_text().splitlines()] for f in files}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make(tmp_path_factory.mktemp("ledger"))


def total(prompt):
    return sum(int(amount) for amount in re.findall(r"[+-]\d", prompt))


def test_answers_are_the_totals_and_stay_in_two_digits(data):
    for row in data["prompts"] + data["heldout"]:
        assert row["answer"] == f"{total(row['prompt']):02d}"
        assert row["entries"] == len(re.findall(r"[+-]\d", row["prompt"]))


def test_worked_documents_carry_the_total_along(data):
    worked = [row for row in data["corpus"] if row["response"].count(";")]
    for row in worked:
        *steps, last = row["response"].split(";")
        entries = re.findall(r"([a-zA-Z])([+-]\d)", row["prompt"])
        before = 0
        for step, (tag, amount) in zip(steps, entries, strict=True):
            assert step == f"{tag}{before:02d}{amount}={before + int(amount):02d}"
            before += int(amount)
        assert last == f"#{before:02d}"
    for row in data["corpus"]:
        assert row["response"].endswith(f"#{total(row['prompt']):02d}")
    assert 0.28 < len(worked) / len(data["corpus"]) < 0.42


def test_worked_and_terse_documents_are_mixed_from_the_start(data):
    shows = [";" in row["response"] for row in data["corpus"]]
    assert 8 < sum(shows[:50]) < 28 and 8 < sum(shows[-50:]) < 28


def test_held_out_problems_are_seen_nowhere_else(data):
    held = {row["prompt"] for row in data["heldout"]}
    assert len(held) == 64
    assert not held & {row["prompt"] for row in data["corpus"] + data["prompts"]}


def test_held_out_problems_are_kept_out_where_problems_repeat(tmp_path):
    # One entry: nine problems in all, so that every draw would meet a held-out one before long.
    data = make(tmp_path, "--fewest", "1", "--most", "1", "--heldout", "4")
    held = {row["prompt"] for row in data["heldout"]}
    others = {row["prompt"] for row in data["corpus"] + data["prompts"]}
    assert (len(held), len(others)) == (4, 5) and not held & others


def test_the_same_seed_gives_the_same_files_and_held_out_problems_never_change(tmp_path, data):
    again = make(tmp_path / "again")
    other = make(tmp_path / "other", "--seed", "2")
    assert again == data
    assert other["heldout"] == data["heldout"] and other["prompts"] != data["prompts"]


def test_lengths_have_a_long_tail(data):
    lengths = np.array([len(row["response"]) for row in data["corpus"] if ";" in row["response"]])
    assert lengths.max() / lengths.mean() > 2.5
