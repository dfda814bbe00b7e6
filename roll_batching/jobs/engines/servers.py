"""Servers that the job starts itself: their command lines, and programs that end when the job does, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_batching.errors import EngineError
from roll_batching.jobs.processes.child_process import describe_exit, kill_sessions, python_command
from roll_batching.jobs.processes.rank_variables import without_rank_variables

_SUPERVISE = "from roll_batching.lifetime import run_under; run_under(int(sys.argv[1]), sys.argv[2:])"
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_HEALTH = 5.0
_SECONDS_TO_END = 10.0
_LINES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How servers of one engine are started: as its published command line says."""

    program: tuple[str, ...]
    """What comes before the options, in the interpreter's environment."""
    model: tuple[str, ...]
    """What comes before the model directory."""
    options: Mapping[str, Any]
    """What the job asks of a server, where it is not told otherwise."""
    sleeping: str
    """The option of a server that gives its device memory back and takes it again."""
    negates: bool
    """Whether a switch `--x` has a counterpart `--no-x`."""
    variables: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "sglang": Kind(
        program=(sys.executable, "-m", "sglang.launch_server"),
        model=("--model-path",),
        options={},
        sleeping="enable_memory_saver",
        negates=False,
        # Log-probs at the sampling temperature, which `config.engine_rules` relies on. The second is 0.4's name.
        variables={"SGLANG_RETURN_ORIGINAL_LOGPROB": "false", "RETURN_ORIGINAL_LOGPROB": "false"},
    ),
    "vllm": Kind(
        program=("vllm", "serve"),
        model=(),
        options={"logprobs_mode": "processed_logprobs"},
        sleeping="enable_sleep_mode",
        negates=True,
        variables={"VLLM_SERVER_DEV_MODE": "1"},  # the endpoints that pause, sleep and load weights
    ),
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One server."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to this process's."""
    url: str
    log: Path


def command_of(
    kind: Kind,
    model: str,
    options: Mapping[str, Any],
    *,
    program: Sequence[str] | None,
    host: str,
    port: int,
    sleeps: bool,
) -> tuple[str, ...]:
    """The command line of one server; `options` are the user's, in the words of ROLL's `strategy_config`.

    Raises EngineError where there is no such program.
    """
    asked = {**kind.options, **({kind.sleeping: True} if sleeps else {}), **options}
    words = [*kind.model, model, "--host", host, "--port", str(port)]
    return (*_found(program or kind.program), *words, *_arguments(asked, kind.negates))


def _arguments(options: Mapping[str, Any], negates: bool) -> list[str]:
    """Options as the engines' command lines have them: `max_model_len: 8000` is `--max-model-len 8000`."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            # A switch that takes something away is off unless it is given.
            words += [f"--no-{flag[2:]}"] if negates and not name.startswith("disable_") else []
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def _found(program: Sequence[str]) -> list[str]:
    """`program` with its file's whole path: beside this interpreter, or where the shell would find it."""
    beside = Path(sys.executable).parent / program[0]
    file = str(beside) if beside.exists() else shutil.which(program[0])
    if file is None:
        raise EngineError(
            f"there is no program {program[0]!r} to start a server with. Install the engine, name its program in "
            "actor_infer.engine_args.command, or servers that run in engine_args.urls; with "
            "actor_infer.strategy_args.strategy_name=megatron_infer the model in training samples itself"
        )
    return [file, *program[1:]]


def free_ports(host: str, count: int) -> list[int]:
    """Ports of this machine, which has the address `host`, that nobody listens on at the moment."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server((host, 0))).getsockname()[1] for _ in range(count)]


class Servers:
    """Programs that serve for this process. They end with it at the latest, and so does what they have started."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = tuple(programs)
        self._running: list[tuple[Program, subprocess.Popen[bytes], int]] = []

    def start(self, seconds: float) -> None:
        """Starts all of them; returns when all answer. Raises EngineError with what one says that does not."""
        try:
            for program in self.programs:
                self._running.append((program, *_started(program)))
            until = time.monotonic() + seconds
            for program, process, said in self._running:
                _await(program, process, said, until, seconds)
        except BaseException:
            self.close(patience=0)
            raise

    def close(self, patience: float = _SECONDS_TO_END) -> None:
        """Ends them: with SIGTERM, and what is left after `patience` seconds by force. Safe to call twice."""
        running, self._running = self._running, []
        for _, process, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + patience
        for _, process, _ in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        kill_sessions([process for _, process, _ in running])


def _started(program: Program) -> tuple[subprocess.Popen[bytes], int]:
    """The process that keeps the program, and where in its log this start begins."""
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with open(program.log, "ab") as log:
        log.write(f"$ {shlex.join(program.command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            python_command(_SUPERVISE, str(os.getpid()), *program.command),
            env={**without_rank_variables(os.environ), **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return process, log.tell()


def _await(program: Program, process: subprocess.Popen[bytes], said: int, until: float, seconds: float) -> None:
    while not _is_well(program.url):
        if process.poll() is not None:
            raise EngineError(
                f"the server at {program.url} ended {describe_exit(process.returncode)} before it was ready. "
                f"{_last_lines(program, said)}"
            )
        if time.monotonic() > until:
            raise EngineError(
                f"the server at {program.url} was not ready within actor_infer.engine_args.start_timeout = "
                f"{seconds:g} seconds. {_last_lines(program, said)}"
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_well(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=_SECONDS_FOR_HEALTH) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _last_lines(program: Program, said: int) -> str:
    lines = program.log.read_bytes()[said:].decode(errors="replace").splitlines()[-_LINES_SHOWN:]
    text = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return f"It was started as\n    {shlex.join(program.command)}\nand the last lines of {program.log} are\n{text}"
