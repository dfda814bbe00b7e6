"""Run one abuse of a real job and check its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[3]
RUN = Path("runs/own_task")
"""Folder of the run, below the working folder of the job."""
TRAIN = ("-m", "roll_batching.cli", "train", "--config", "job.yaml")
SECONDS_TO_BE_GONE = 5.0
"""Time limit for child processes after the end of the command."""
_SLACK: ContextVar[float] = ContextVar("slack", default=1.0)
"""Factor on the time limits of the current abuse and its scene."""
DONE, FAILED, REFUSED = 0, 1, 2
"""Exit codes: complete job, failed job, wrong command or settings."""
SAVING = {"max_steps": 2, "save_steps": 1}
"""Settings of a job that writes two checkpoints."""
_MARK = "ROLL_BATCHING_ABUSE"
"""Environment variable with the log of an abuse; it identifies its processes in every session."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SECONDS_BETWEEN_LOOKS = 0.05
_ASIDE = ("notice: ", "compiling the planner", "common prefixes of samples are computed once")
"""Prefixes of lines about progress."""

# A correct reward; abuses replace it.
_REWARD = "def reward(completion):\n    return completion.tokens / 10\n"
_SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "eval_samples": 0,
    "reward_function": "scoring:reward",
    "warmup": None,
    "save_total_limit": None,
    "actor_train.model_args.architecture.hidden_size": 32,
    "actor_train.model_args.architecture.ffn_hidden_size": 48,
    "actor_train.training_args.per_device_train_batch_size": 4,
    "actor_train.training_args.gradient_accumulation_steps": 2,
    "actor_train.data_args.file_name": "prompts.jsonl",
    "actor_train.data_args.eval_file_name": None,
}
"""Settings that make the example's job small: two processes, one step, a second of work."""
LAUGHS = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))
"""Short YAML text that expands to 10^11 values."""


def limit(seconds: float) -> float:
    """`seconds` times the slack of the campaign."""
    return seconds * _SLACK.get()


class SkippedError(Exception):
    """This machine does not support the abuse; the text is the reason."""


class NotReachedError(Exception):
    """The job did not reach the state that the abuse needs."""


Lost = Callable[[], str]
"""Returns a description of lost or left-over data; empty if there is none."""
Scene = Callable[[Path], AbstractContextManager[Lost]]
"""Context of an abuse in a folder; yields a check to run after the abuse."""


@contextlib.contextmanager
def nothing_there(home: Path) -> Iterator[Lost]:
    yield lambda: ""


@dataclass(frozen=True, kw_only=True)
class Abuse:
    """An abuse of a job and its expected outcome."""

    name: str
    code: int
    """Expected exit code; for a killed command, the negative signal number."""
    words: tuple[str, ...] = ()
    """Texts that stderr must contain; if the job succeeds, stdout counts too."""
    seconds: float = 120.0
    """Time limit of the command."""
    lines: int = 1
    """Largest number of lines on stderr, without notices."""
    warnings: int = 0
    """Largest number of lines on stderr if the job succeeds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changed settings by dotted path."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files in the working folder of the job, by name; `job.yaml` may be among them."""
    arguments: tuple[str, ...] = TRAIN
    """Arguments of python."""
    variables: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    """Limit of the address space in bytes."""
    foreign: bool = False
    """Whether another program also writes to stderr; lines and tracebacks are not counted then."""
    scene: Scene = nothing_there
    meddle: Callable[[Path, subprocess.Popen[bytes]], None] | None = None
    """Disturbs the running command."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of an abuse."""

    abuse: str
    code: int | None
    """None if the command was killed at its time limit or skipped."""
    seconds: float
    message: str
    """First line of the error."""
    verdict: str
    """"ok", "skipped: <reason>", or the faults."""

    @property
    def fine(self) -> bool:
        return self.verdict == "ok" or self.verdict.startswith("skipped: ")


def carry_out(abuse: Abuse, home: Path, slack: float = 1.0) -> Outcome:
    """Run the abuse in the new folder `home` and check its outcome. `slack`: factor on all time limits."""
    token = _SLACK.set(slack)
    try:
        return _carry_out(abuse, home)
    finally:
        _SLACK.reset(token)


def _carry_out(abuse: Abuse, home: Path) -> Outcome:
    home.mkdir(parents=True)
    code, seconds, wrong = None, 0.0, []
    write_job(home, abuse.settings, abuse.files)
    try:
        with abuse.scene(home) as lost:
            begun = time.monotonic()
            with started(home, *abuse.arguments, memory=abuse.memory, **abuse.variables) as process:
                try:
                    if abuse.meddle is not None:
                        abuse.meddle(home, process)
                    code = process.wait(max(0.1, limit(abuse.seconds) - (time.monotonic() - begun)))
                except subprocess.TimeoutExpired:
                    wrong.append(f"not ended after {limit(abuse.seconds):g} s")
                except NotReachedError as error:
                    wrong.append(str(error))
                seconds = time.monotonic() - begun
                if code is not None and not gone(home, process.pid):
                    wrong.append("something of it outlives it")
            if code is not None and (what := lost()):
                wrong.append(what)
    except SkippedError as reason:
        return Outcome(abuse=abuse.name, code=None, seconds=0, message="", verdict=f"skipped: {reason}")
    lines = [line for line in (home / "stderr").read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(_ASIDE)]
    message = _first(own)
    told = lines if abuse.code else [*lines, (home / "stderr.out").read_text(errors="replace")]
    wrong = [*_wrong(abuse, code, told, own), *wrong] if code is not None else wrong
    return Outcome(
        abuse=abuse.name, code=code, seconds=seconds, message=message, verdict="; ".join(wrong) if wrong else "ok"
    )


def _first(own: list[str]) -> str:
    """First line of an error; with the next line if it ends in a colon."""
    at = next((number for number, line in enumerate(own) if "error: " in line), 0)
    first, *more = own[at:] or [""]
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def _wrong(abuse: Abuse, code: int, told: list[str], own: list[str]) -> list[str]:
    text = "\n".join(told)
    wrong = [f"exit code {code} where {abuse.code} is right"] if code != abuse.code else []
    wrong += [f"does not say {words!r}" for words in abuse.words if words not in text]
    if abuse.foreign:
        return wrong
    if len(own) > (most := abuse.lines if code else abuse.warnings):
        wrong.append(f"{len(own)} lines where {most} are enough")
    if "Traceback (most recent call last)" in text or "Where rank" in text:
        wrong.append("a traceback")
    return wrong


def write_job(home: Path, settings: Mapping[str, Any], files: Mapping[str, str | bytes]) -> None:
    """Write the small, changed job of the example and its data."""
    words = ["".join("abcdef"[(i * j + i // 6) % 6] for j in range(1, 5)) for i in range(24)]
    rows = [{"prompt": f"{word}=", "answer": "".join(sorted(word))} for word in words]
    documents = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]
    job = yaml.safe_load((ROOT / "examples/own_task/config.yaml").read_text())
    for path, value in {**_SETTINGS, **settings}.items():
        *above, last = path.split(".")
        section = job
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    contents: dict[str, str | bytes] = {
        "job.yaml": yaml.safe_dump(job),
        "scoring.py": _REWARD,
        "prompts.jsonl": lines_of(rows),
        "corpus.jsonl": lines_of(documents),
        **files,
    }
    for name, content in contents.items():
        (home / name).write_bytes(content.encode() if isinstance(content, str) else content)


def lines_of(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@contextlib.contextmanager
def started(
    home: Path, *arguments: str, log: str = "stderr", memory: int | None = None, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python ARGUMENTS` in `home` with stderr in the file `log`; kill all its processes at the end."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", _MARK: str(home / log), **variables}
    with open(home / log, "wb") as errors, open(home / f"{log}.out", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))) if memory else None,
        )
    try:
        yield process
    finally:
        for one in processes(home / log):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def finish(home: Path, *overrides: str, log: str) -> str:
    """Train the job in `home` without abuse; returns a fault, or an empty text."""
    with started(home, *TRAIN, *overrides, log=log) as process:
        try:
            code = process.wait(limit(120))
        except subprocess.TimeoutExpired:
            return f"{log} did not end within {limit(120):g} s"
    return "" if code == 0 else f"{log} ended with {code}: {(home / log).read_text()[-300:]}"


def free_port() -> int:
    """Free TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def processes(mark: Path) -> list[psutil.Process]:
    """Live processes of the command whose log is `mark`."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == str(mark):
                alive.append(process)
    return alive


def gone(home: Path, pid: int) -> bool:
    """Whether all processes of the ended command exit in time."""
    until = time.monotonic() + limit(SECONDS_TO_BE_GONE)
    while processes(home / "stderr"):
        if time.monotonic() > until:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def reached(happened: Callable[[], Any], process: subprocess.Popen[bytes], what: str, seconds: float = 120) -> None:
    """Wait for `happened()`. Raises NotReachedError if `process` ends first, or after `seconds`."""
    until = time.monotonic() + limit(seconds)
    while not happened():
        if process.poll() is not None or time.monotonic() > until:
            raise NotReachedError(f"{what} did not come to pass")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def ranks_of(process: subprocess.Popen[bytes], home: Path) -> list[psutil.Process]:
    """Processes of the ranks that the launcher `process` started, by rank."""
    own = [one for one in processes(home / "stderr") if one.ppid() == process.pid and "RANK" in one.environ()]
    return sorted(own, key=lambda one: int(one.environ()["RANK"]))


def send(process: subprocess.Popen[bytes], number: signal.Signals, *, group: bool = False) -> None:
    """Send a signal to the command or, as a terminal does, to its process group."""
    os.killpg(process.pid, number) if group else process.send_signal(number)
