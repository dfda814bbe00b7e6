"""`scripts/gpu_checks.py`: a check that fails, hangs or breaks a limit is recorded as such, and the others go on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import ROOT
from benchmarks.gpu import checks
from benchmarks.gpu.kernel_times import seconds_by_kind
from benchmarks.gpu.results import page

CASE = {"case": "one", "figures": {"seconds": 1.5}, "limits": {"gap": [0.5, 0.1], "other": [float("nan"), 1.0]}}


def saying(name, code, seconds=20.0):
    return checks.Check(
        name=name, what=name, seconds=seconds, command=lambda out, dry: [sys.executable, "-c", code, out]
    )


WRITES = f"import json, sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps({'cases': [CASE]}))})"


def test_what_checks_come_to_is_recorded_one_by_one(monkeypatch, tmp_path, capsys):
    mine = (
        saying("fails", "raise SystemExit('no such kernel')"),
        saying("hangs", WRITES + "; import time; time.sleep(60)", seconds=2),
        saying("fine", WRITES),
    )
    monkeypatch.setattr(checks, "CHECKS", mine)
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--dry", "--out", str(out)])
    assert checks.main() == 1
    found = json.loads(out.read_text())["checks"]
    assert [found[c.name]["status"] for c in mine] == ["exit code 1", "not done after 2 s", "ok"]
    assert "no such kernel" in found["fails"]["last words"] and "no such kernel" in capsys.readouterr().out
    assert found["hangs"]["result"]["cases"][0]["case"] == "one"  # what it had is not lost
    assert len(checks.exceeded_limits(found["fine"])) == 2  # NaN exceeds every limit
    assert found["fine"]["machine"]["versions"]["torch"]


def test_the_page_says_what_was_tried_and_what_was_not(tmp_path):
    record = {"status": "ok", "seconds": 3.0, "result": {"cases": [CASE]}, "what": "-"}
    machine = {"gpus": ["A GPU"], "versions": {"torch": "2"}, "platform": "Linux", "commit": "abc", "date": "today"}
    failed = {"status": "exit code 1", "seconds": 1.0, "last words": "why", "what": "-", "machine": machine}
    report = {"checks": {"attention": {**record, "machine": machine}, "equality": failed}}
    (tmp_path / "a-gpu.json").write_text(json.dumps(report))
    text = page(tmp_path)
    assert "| 2 limits exceeded |" in text and "| **failed**: exit code 1 |" in text and "\nwhy\n" in text
    assert text.count("| not yet run |") == len(checks.CHECKS) - 2
    assert "gap 0.5 (≤ 0.1)" in text and "commit abc" in text


def test_the_page_in_the_repository_is_that_of_its_results():
    assert page(ROOT / "results") == (ROOT / "docs" / "results.md").read_text()


@pytest.mark.slow
def test_every_check_runs_dry(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "gpu_checks.py"), "--dry", "--out", str(tmp_path / "dry.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_kernels_of_a_step_by_kind():
    kernels = {"pytorch_flash::flash_bwd<cutlass::bfloat16_t>": 0.5, "nvjet_sm90_tst": 1.0, "a_small_one": 0.1}
    figures = {"seconds of the step": 2.0, "share with a kernel running": 0.9}
    found = seconds_by_kind({"figures": figures, "notes": {"kernels, seconds": kernels}})
    assert found == pytest.approx({"attention": 0.5, "matrix products": 1.0, "other kernels": 0.3, "no kernel": 0.2})
    assert seconds_by_kind({"figures": figures, "notes": {"kernels, seconds": {}}}) == {}  # a dry run
