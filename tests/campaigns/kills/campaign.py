"""Kill processes of small real jobs at random moments, and hold what must be so.

    python scripts/kill_campaign.py --check              # twenty kills; exit 0 exactly when all holds
    python scripts/kill_campaign.py --only engine        # kinds of victims, one or several
    python scripts/kill_campaign.py --kills 5 --seed 3 --json kills.json
    python scripts/kill_campaign.py --slack 3            # three times as much time, on a machine that others use

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
"""Seconds until a job has ended, or goes on."""
PATIENCE = 400.0
"""Seconds for anything that is not measured: a whole small job on a busy machine."""


@dataclass(frozen=True)
class Scene:
    """Which kind of process of which job is killed."""

    job: str
    way: str
    victim: str


SCENES = {
    "rank": Scene("grpo", "launcher", "rank"),
    "rank of a stream": Scene("pairs", "torchrun", "rank"),
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
    """What became of a job that was hit."""

    kind: str
    moment: str
    became: str
    """ended, went on, or restarted."""
    seconds: float
    """Until then."""
    left: int
    """Processes that were alive after the limit."""
    rows: bool
    """Whether its rows are those of the undisturbed run, each step once."""
    samples: bool
    """Whether its samples are."""
    fault: str = ""
    """What else was wrong."""

    @property
    def holds(self) -> bool:
        return not self.left and self.rows and self.samples and not self.fault


@dataclass
class Undisturbed:
    """A run that nothing happened to."""

    rows: list[dict[str, Any]]
    samples: list[str]


class Campaign:
    """Runs and their references, in folders under `base`."""

    def __init__(self, base: Path, slack: float, ray: Callable[[], Any]) -> None:
        self.base, self.slack, self._ray = base, slack, ray
        self._references: dict[str, Undisturbed] = {}
        self._number = 0

    def reference(self, job: str) -> Undisturbed:
        """The run of `job` that nothing happens to, made once."""
        if job not in self._references:
            with self._prepared(Scene(job, "launcher", "")) as (running, _):
                code = running.process.wait(timeout=PATIENCE * self.slack)
                if code:
                    raise SystemExit(f"the undisturbed run of {job} failed:\n{running.said}")
                self._references[job] = Undisturbed(rows_of(running.run), samples_of(running.run))
        return self._references[job]

    @contextlib.contextmanager
    def _prepared(self, scene: Scene) -> Any:
        """The job of `scene` at work, and what starts it again from its last checkpoint."""
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
        """One kill, and what became of it. A moment at which the victim has ended by itself is drawn again."""
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
                seconds = time.monotonic() - hit  # with all that it had started
            if code and not fault:
                with again() as process:
                    code = process.wait(timeout=PATIENCE * self.slack)
                if code:
                    fault = f"it did not go on: {_last(running.said)}"
            if fault:
                print(running.said[-3000:], file=sys.stderr)
            same = not fault and rows_of(running.run) == expected.rows
            once = not fault and samples_of(running.run) == expected.samples
        return Outcome(kind, moment, became or "hung", seconds, left, same, once, fault)

    def _became(self, running: Running, before: int) -> str:
        """ended, restarted or went on; empty where none of it happened in time."""
        until = time.monotonic() + LIMIT * self.slack
        while time.monotonic() < until:
            if running.process.poll() is not None:
                return "ended"
            if "restart 1 of" in running.said:
                return "restarted"
            if running.cluster is None and running.steps() > before + 1:  # the step that was under way may be lost
                return "went on"
            time.sleep(0.02)
        return ""

    def _ended(self, running: Running, became: str) -> tuple[int, int]:
        """The exit code of what went on, and how many processes outlived it."""
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
                raise SystemExit(f"the job never came so far:\n{running.said}")
            time.sleep(0.01)
        return found


def _last(said: str) -> str:
    return said.strip().splitlines()[-1] if said.strip() else "it said nothing"


class Ray:
    """A cluster of three machines of a CPU each, started when it is asked for, made whole after a loss."""

    def __init__(self, until_the_end: contextlib.ExitStack) -> None:
        self._until_the_end, self._made = until_the_end, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._until_the_end.enter_context(cluster(1, 1, 1))
        while len(self._made.worker_nodes) < 2:
            self._made.add_node(num_cpus=1)
        return self._made


def drawn(kills: int, only: list[str], seed: int) -> list[str]:
    """Kinds of victims: each once, then as the seed says."""
    chance = random.Random(seed)
    return [*only, *(chance.choice(only) for _ in range(kills - len(only)))][:kills]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when something does not hold")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SCENES, action="append", help="a kind of victim, instead of all")
    parser.add_argument("--slack", type=float, default=1.0, help="how many times as long anything may take")
    parser.add_argument("--json", type=Path, help="file for what was found")
    arguments = parser.parse_args()
    header = ["kill", "victim", "moment", "the job", "after s", "left alive", "rows", "samples"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the jobs end with this command
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
