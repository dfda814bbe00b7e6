"""Kill processes of small real jobs at random moments, and check what they lose.

    python scripts/kill_campaign.py --check              # twenty kills; exit 1 if a check fails
    python scripts/kill_campaign.py --only engine        # kinds of victims; repeatable
    python scripts/kill_campaign.py --kills 5 --seed 3 --json kills.json
    python scripts/kill_campaign.py --slack 3            # factor on time limits, for a busy machine

Victims are ranks (under our launcher, torchrun and Ray), launchers, agents and drivers, a node of Ray's with all that
runs on it, a server that samples rollouts, processes of rewards and of a data loader; every kind once, the rest as the
seed draws them. Each gets SIGKILL at a random moment: while the job starts, or so long after a random step.

What must hold, per kill: within 30 seconds the job has ended and left no process alive, or goes on, by itself or
restarted; and once it has ended well, started again where it had ended, its rows and its samples are those of the run
that nothing happened to, to the bit, each step and each sample once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.table import Table
from tests.campaigns.kills.jobs import JOBS, Running, command, rows_of, samples_of, servers
from tests.jobs.launch.clusters import cluster
from tests.jobs.launch.commands import started

LIMIT = 30.0
"""Time limit in seconds for a job to end, restart or go on after a kill."""
PATIENCE = 400.0
"""Time limit in seconds for other waits, such as a whole job on a busy machine."""


@dataclass(frozen=True)
class Scene:
    """A job, its launcher, and the kind of process to kill."""

    job: str
    way: str
    victim: str


SCENES = {
    "rank": Scene("grpo", "launcher", "rank"),
    "rank of a stream": Scene("pairs", "torchrun", "rank"),
    "rank of a block": Scene("blocks", "launcher", "rank"),
    "rank with a critic": Scene("critic", "launcher", "rank"),
    "rank of a student": Scene("student", "launcher", "rank"),
    "launcher": Scene("grpo", "launcher", "launcher"),
    "torchrun's agent": Scene("pairs", "torchrun", "launcher"),
    "rank on Ray": Scene("grpo", "ray", "rank"),
    "driver on Ray": Scene("grpo", "ray", "driver"),
    "node of Ray": Scene("grpo", "ray", "node"),
    "engine": Scene("engine", "launcher", "engine"),
    "reward worker": Scene("grpo", "launcher", "reward worker"),
    "loader": Scene("pairs", "launcher", "loader"),
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a kill."""

    kind: str
    moment: str
    became: str
    """State of the job after the kill: ended, went on, or restarted."""
    seconds: float
    """Seconds until that state."""
    left: int
    """Number of processes alive after the time limit."""
    rows: bool
    """Whether its metrics equal those of the undisturbed run, each step once."""
    samples: bool
    """Whether its samples equal those of the undisturbed run."""
    fault: str = ""
    """Another fault; empty if there is none."""

    @property
    def holds(self) -> bool:
        return not self.left and self.rows and self.samples and not self.fault


@dataclass
class Undisturbed:
    """Metrics and samples of a run without kills."""

    rows: list[dict[str, Any]]
    samples: list[str]


class Campaign:
    """Runs kills on jobs in folders under `base`, and compares them with undisturbed runs."""

    def __init__(self, base: Path, slack: float, ray: Callable[[], Any]) -> None:
        self.base, self.slack, self._ray = base, slack, ray
        self._references: dict[str, Undisturbed] = {}
        self._number = 0

    def reference(self, job: str) -> Undisturbed:
        """Undisturbed run of `job`, made once."""
        if job not in self._references:
            with self._prepared(Scene(job, "launcher", "")) as (running, _):
                code = running.process.wait(timeout=PATIENCE * self.slack)
                if code:
                    raise SystemExit(f"the undisturbed run of {job} failed:\n{running.output}")
                self._references[job] = Undisturbed(rows_of(running.run), samples_of(running.run))
        return self._references[job]

    @contextlib.contextmanager
    def _prepared(self, scene: Scene) -> Any:
        """Start the job of `scene`; yields it and a function that resumes it from its last checkpoint."""
        self._number += 1
        folder = self.base / f"{self._number:02d}"
        folder.mkdir()
        with contextlib.ExitStack() as until_the_end:
            engines = until_the_end.enter_context(servers(folder)) if scene.job == "engine" else []
            job = folder / "job.yaml"
            job.write_text(json.dumps(JOBS[scene.job](folder)))
            ray = self._ray() if scene.way == "ray" else None
            words = command(scene.way, job, "" if ray is None else ray.address)
            process = until_the_end.enter_context(started(folder, *words))

            def again() -> Any:
                return started(folder, *words, "resume_from_checkpoint=true")

            yield Running(folder, process, ray, engines), again

    def hit(self, kind: str, chance: random.Random) -> Outcome:
        """Kill once and return the outcome. If the victim ended by itself before, another moment is drawn."""
        while (outcome := self._hit(kind, chance)) is None:
            print(f"{kind}: had ended before it was hit; another moment", file=sys.stderr, flush=True)
        return outcome

    def _hit(self, kind: str, chance: random.Random) -> Outcome | None:
        scene = SCENES[kind]
        expected = self.reference(scene.job)
        after, pause, which = chance.randrange(len(expected.rows) - 1), chance.uniform(0, 1.5), chance.random()
        starting = chance.random() < 0.15
        with self._prepared(scene) as (running, again):
            moment = f"{pause:.1f} s after " + ("its start" if starting else f"step {after + 1}" if after else "step 1")
            self._wait(lambda: running.victims(scene.victim), PATIENCE, running)
            if not starting:
                self._wait(lambda: running.steps() > after, PATIENCE, running)
            time.sleep(pause)
            alive = running.victims(scene.victim)
            hit = time.monotonic()
            before = running.steps()
            try:
                running.kill(scene.victim, alive[int(which * len(alive))])
            except (IndexError, psutil.NoSuchProcess):
                return None
            became = self._became(running, before)
            seconds = time.monotonic() - hit
            fault = "" if became else f"nothing happened within {LIMIT * self.slack:g} s"
            code, left = self._ended(running, became)
            if became == "ended":
                seconds = time.monotonic() - hit  # includes the end of its child processes
            if code and not fault:
                with again() as process:
                    code = process.wait(timeout=PATIENCE * self.slack)
                if code:
                    fault = f"it did not go on: {_last(running.output)}"
            if fault:
                print(running.output[-3000:], file=sys.stderr)
            same = not fault and rows_of(running.run) == expected.rows
            once = not fault and samples_of(running.run) == expected.samples
        return Outcome(kind, moment, became or "hung", seconds, left, same, once, fault)

    def _became(self, running: Running, before: int) -> str:
        """State of the job after a kill: ended, restarted or went on; empty after the time limit."""
        until = time.monotonic() + LIMIT * self.slack
        while time.monotonic() < until:
            if running.process.poll() is not None:
                return "ended"
            if "restart 1 of" in running.output:
                return "restarted"
            if running.cluster is None and running.steps() > before + 1:  # the current step may be lost
                return "went on"
            time.sleep(0.02)
        return ""

    def _ended(self, running: Running, became: str) -> tuple[int, int]:
        """Exit code of the job, and the number of processes that outlive it."""
        if not became:
            return 1, 0
        code = running.process.wait(timeout=PATIENCE * self.slack)
        until = time.monotonic() + LIMIT * self.slack
        while running.left() and time.monotonic() < until:
            time.sleep(0.05)
        return code, len(running.left())

    def _wait(self, happened: Callable[[], Any], seconds: float, running: Running) -> Any:
        until = time.monotonic() + seconds * self.slack
        while not (found := happened()):
            if time.monotonic() > until or running.process.poll() is not None:
                raise SystemExit(f"the job never came so far:\n{running.output}")
            time.sleep(0.01)
        return found


def _last(said: str) -> str:
    return said.strip().splitlines()[-1] if said.strip() else "no output"


class Ray:
    """Ray cluster of three machines with one CPU each; starts at first use and replaces lost machines."""

    def __init__(self, until_the_end: contextlib.ExitStack) -> None:
        self._until_the_end, self._made = until_the_end, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._until_the_end.enter_context(cluster(1, 1, 1))
        while len(self._made.worker_nodes) < 2:
            self._made.add_node(num_cpus=1)
        return self._made


def drawn(kills: int, only: list[str], seed: int) -> list[str]:
    """Kinds of victims: each once, then random ones by seed."""
    chance = random.Random(seed)
    return [*only, *(chance.choice(only) for _ in range(kills - len(only)))][:kills]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a check fails")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SCENES, action="append", help="kind of victim; repeatable. Default: all")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on time limits, for a busy machine")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    header = ["kill", "victim", "moment", "the job", "after s", "left alive", "rows", "samples"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the context managers, which end the jobs
    table = Table(f"{arguments.kills} kills, seed {arguments.seed}", header)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as base, contextlib.ExitStack() as until_the_end:
        campaign = Campaign(Path(base), arguments.slack, Ray(until_the_end))
        for number, kind in enumerate(drawn(arguments.kills, arguments.only or list(SCENES), arguments.seed), 1):
            outcome = campaign.hit(kind, random.Random(f"{arguments.seed}/{number}"))
            outcomes.append(outcome)
            same, once = ("the same" if one else "OTHERS" for one in (outcome.rows, outcome.samples))
            cells = (number, kind, outcome.moment, outcome.became, f"{outcome.seconds:.1f}", outcome.left, same, once)
            table.add(*cells)
            print(f"kill {number}: " + ", ".join(map(str, cells[1:])) + f" {outcome.fault}", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    slowest = max(outcome.seconds for outcome in outcomes)
    table.require(all(not one.fault for one in outcomes), f"none hung; the slowest ended or went on in {slowest:.1f} s")
    table.require(all(not one.left for one in outcomes), "no process was left alive")
    table.require(all(one.rows for one in outcomes), "rows of the undisturbed run to the bit, each step once")
    table.require(all(one.samples for one in outcomes), "samples of the undisturbed run, each trained once")
    table.show()
    sys.exit(1 if table.missed and arguments.check else 0)
