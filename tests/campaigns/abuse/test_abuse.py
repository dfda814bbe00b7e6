"""`scripts/abuse.py`: correct outcomes pass, and every kind of fault of an abused job is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.campaigns.abuse import campaign, runner

SCRIPT = str(runner.ROOT / "scripts" / "abuse.py")


def test_cheap_abuses_end_as_they_should(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, SCRIPT, "--only", "yaml: n", "--slack", "4", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of " in done.stdout and "1 ok, 0 skipped, 0 wrong" in done.stdout
    (outcome,) = json.loads(out.read_text())
    assert outcome["abuse"] == "YAML: NUL" and outcome["code"] == 2 and outcome["verdict"] == "ok"
    assert outcome["message"].startswith("error: ") and "U+0000" in outcome["message"]


SAYS = "import sys; print('error: no', file=sys.stderr); sys.exit(1)"
LEAVES = "import subprocess; subprocess.Popen(['sleep', '4321567'], start_new_session=True); raise SystemExit(1)"


@contextlib.contextmanager
def losing(home):
    yield lambda: "the metrics are gone"


@pytest.mark.parametrize(
    ("code", "changes", "verdict"),
    [
        (SAYS, {}, "ok"),
        (SAYS, {"code": 2}, "exit code 1 where 2 is right"),
        (SAYS, {"words": ("yes",)}, "does not say 'yes'"),
        (SAYS, {"lines": 0}, "1 lines where 0 are enough"),
        (SAYS, {"scene": losing}, "the metrics are gone"),
        ("import time; time.sleep(100)", {"seconds": 0.5}, "not ended after 0.5 s"),
        ("1 / 0", {"lines": 9}, "a traceback"),
        (LEAVES, {"words": ()}, "something of it outlives it"),
    ],
)
def test_an_abuse_that_ends_otherwise_is_wrong(tmp_path, code, changes, verdict):
    right = runner.Abuse(name="one", code=1, words=() if "words" in changes or code != SAYS else ("no",))
    case = dataclasses.replace(right, arguments=("-c", code), **{"seconds": 30.0, **changes})
    out = tmp_path / "out.json"
    assert campaign.main(["--json", str(out)], [case]) == (0 if verdict == "ok" else 1)
    assert json.loads(out.read_text())[0]["verdict"] == verdict
    until = time.monotonic() + 10  # it was killed, and goes when its parent has heard of it
    while left := [p for p in psutil.process_iter(["cmdline"]) if "4321567" in (p.info["cmdline"] or ())]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_script_that_is_ended_leaves_nothing_behind(tmp_path):
    command = [sys.executable, SCRIPT, "--only", "never returns"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL) as script:
        until, job = time.monotonic() + 60, []
        while not job and time.monotonic() < until:
            time.sleep(0.05)
            job = psutil.Process(script.pid).children(recursive=True)
        script.terminate()
    assert script.returncode == 143 and job
    assert not list(tmp_path.iterdir())
    until = time.monotonic() + 30  # init takes its time to forget a process whose parent has ended
    while any(map(_runs, job)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_runs, job))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_what_a_machine_cannot_do_is_skipped_and_said(capsys):
    @contextlib.contextmanager
    def impossible(home):
        raise runner.SkippedError("no disk")
        yield

    assert campaign.main([], [runner.Abuse(name="one", code=0, scene=impossible)]) == 0
    assert "skipped: no disk" in capsys.readouterr().out


def test_slack_multiplies_the_limits_of_scenes(monkeypatch):
    monkeypatch.setattr(runner, "TRAIN", ("-c", "import time; time.sleep(100)"))
    lost = []

    @contextlib.contextmanager
    def scene(home):
        lost.append(runner.finish(home, log="beside"))
        yield lambda: ""

    campaign.main(["--slack", "0.004"], [runner.Abuse(name="one", code=0, scene=scene, arguments=("-c", ""))])
    assert lost == ["beside did not end within 0.48 s"] and runner.limit(120) == 120


def test_parts_hold_every_abuse_once(tmp_path):
    cases = [runner.Abuse(name=f"{number}", code=0, arguments=("-c", "")) for number in range(5)]
    parts = []
    for number in (1, 2):
        out = tmp_path / f"{number}.json"
        assert campaign.main(["--part", f"{number}/2", "--json", str(out)], cases) == 0
        parts.append([outcome["abuse"] for outcome in json.loads(out.read_text())])
    assert parts == [["0", "2", "4"], ["1", "3"]]
    for wrong in ("0/2", "3/2", "x"):
        with pytest.raises(SystemExit):
            campaign.main(["--part", wrong], cases)


def test_names_of_abuses_are_their_own():
    names = [case.name for case in campaign.CASES]
    assert len(set(names)) == len(names) >= 190
