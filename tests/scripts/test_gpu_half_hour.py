"""`scripts/gpu_half_hour.sh`: loads arrive in any order, broken ones are refused, and calls end in time."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from benchmarks import ROOT
from benchmarks.gpu import checks, half_hour

NAME = "half_hour_probe-1.0-py3-none-any.whl"


@pytest.fixture
def loads(monkeypatch, tmp_path):
    """Two loads with the halves of a wheel, laid out by `prepare` from an index of one file."""
    index, home = tmp_path / "index", tmp_path / "home"
    index.mkdir()
    with zipfile.ZipFile(index / NAME, "w") as wheel:
        info, metadata = (
            "half_hour_probe-1.0.dist-info/",
            "Metadata-Version: 2.1\nName: half-hour-probe\nVersion: 1.0\n",
        )
        wheel.writestr("half_hour_probe.py", f"__version__ = '1.0'\nfiller = '{'x' * 20_000}'")
        wheel.writestr(info + "METADATA", metadata)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    monkeypatch.setattr(half_hour, "wanted", lambda: [("half-hour-probe==1.0", 0.02, False)])
    monkeypatch.setattr(half_hour, "HOME", home)
    monkeypatch.setattr(half_hour, "STORE", home / "wheels")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    half_hour.prepare(tmp_path / "loads", 0.012, None)
    return tmp_path / "loads"


def test_loads_in_any_order_become_an_environment_over_this_python(loads, capsys):
    half_hour.collect(loads / "2")
    assert not (half_hour.STORE / NAME).exists()
    half_hour.make_environment(with_engine=False)
    assert f"{NAME}.part00 is not here" in capsys.readouterr().out
    half_hour.collect(loads / "1")
    python = half_hour.make_environment(with_engine=False)
    code = "import half_hour_probe, torch; print(half_hour_probe.__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert str(half_hour.HOME) in done.stdout, done.stderr


def test_a_load_that_changed_on_its_way_and_a_wheel_of_another_size_are_refused(loads, monkeypatch):
    (piece,) = (loads / "1").glob("*.part00")
    piece.write_bytes(b"cut")
    with pytest.raises(SystemExit, match="send this load again"):
        half_hour.collect(loads)
    monkeypatch.setattr(half_hour, "wanted", lambda: [("half-hour-probe==1.0", 0.5, False)])
    with pytest.raises(SystemExit, match=r"wheels.txt says 0.5"):
        half_hour.prepare(loads.parent / "again", 1, None)


def test_every_check_has_a_call():
    named = [name for names in half_hour.CALLS.values() for name in names]
    assert sorted(named) == sorted(check.name for check in checks.CHECKS)
    pins = (ROOT / "constraints.txt").read_text().replace("_", "-")
    assert all(name in pins for name, _, _ in half_hour.wanted() if name.startswith(("megatron", "pydantic")))


def test_checks_share_their_seconds(monkeypatch, tmp_path):
    def record(check, dry):
        limits.append(check.seconds)
        return {"what": check.what, "status": "ok", "seconds": 0.0}

    limits, mine = [], [replace(checks.CHECKS[0], name=name, seconds=100) for name in ("a", "b")]
    monkeypatch.setattr(checks, "CHECKS", mine)
    monkeypatch.setattr(checks, "run_check", record)
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--dry", "--within", "60", "--out", str(out)])
    assert checks.main() == 0 and set(json.loads(out.read_text())["checks"]) == {"a", "b"}
    assert limits == pytest.approx([30, 60], abs=1)  # what the first left is for the second
