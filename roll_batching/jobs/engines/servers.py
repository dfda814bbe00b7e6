"""Engine servers that the job starts: command lines, start-up, and an end no later than the job's."""

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
_POLL_SECONDS = 0.5
_HEALTH_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0
_LINES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """Command line of an engine's servers, as its publisher documents it."""

    program: tuple[str, ...]
    """Program and arguments before the options; looked up beside the interpreter first."""
    model: tuple[str, ...]
    """Arguments before the model directory."""
    options: Mapping[str, Any]
    """Default options, which the user's override."""
    sleep_option: str
    """The option that allows a server to free its device memory and allocate it again."""
    has_negations: bool
    """Whether a switch `--x` has a counterpart `--no-x`."""
    variables: Mapping[str, str] = field(default_factory=dict)


SERVER_KINDS = {
    "sglang": ServerKind(
        program=(sys.executable, "-m", "sglang.launch_server"),
        model=("--model-path",),
        options={},
        sleep_option="enable_memory_saver",
        has_negations=False,
        # Log-probs at the sampling temperature, which `config.engine_rules` relies on. The second is 0.4's name.
        variables={"SGLANG_RETURN_ORIGINAL_LOGPROB": "false", "RETURN_ORIGINAL_LOGPROB": "false"},
    ),
    "vllm": ServerKind(
        program=("vllm", "serve"),
        model=(),
        options={"logprobs_mode": "processed_logprobs"},
        sleep_option="enable_sleep_mode",
        has_negations=True,
        variables={"VLLM_SERVER_DEV_MODE": "1"},  # the endpoints that pause, sleep and load weights
    ),
}


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """Command, environment, URL and log of one server."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables added to this process's environment."""
    url: str
    log: Path


def server_command(
    kind: ServerKind,
    model: str,
    options: Mapping[str, Any],
    *,
    program: Sequence[str] | None,
    host: str,
    port: int,
    sleeps: bool,
) -> tuple[str, ...]:
    """The command line of one server.

    `options` are the user's, as in ROLL's `strategy_config`. Raises EngineError when the program is not installed.
    """
    merged = {**kind.options, **({kind.sleep_option: True} if sleeps else {}), **options}
    required = [*kind.model, model, "--host", host, "--port", str(port)]
    return (*_resolve_program(program or kind.program), *required, *_arguments(merged, kind.has_negations))


def _arguments(options: Mapping[str, Any], has_negations: bool) -> list[str]:
    """Command line arguments of `options`: `max_model_len: 8000` is `--max-model-len 8000`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is False:
            # A `--disable-x` switch is off by default.
            arguments += [f"--no-{flag[2:]}"] if has_negations and not name.startswith("disable_") else []
        elif isinstance(value, Mapping):
            arguments += [flag, json.dumps(value)]
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        elif value is not None:
            arguments += [flag, str(value)]
    return arguments


def _resolve_program(program: Sequence[str]) -> list[str]:
    """`program` with the full path of its file: beside this interpreter, or on PATH. Raises EngineError."""
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
    """`count` free ports of the address `host`, at this moment."""
    with contextlib.ExitStack() as sockets:
        return [sockets.enter_context(socket.create_server((host, 0))).getsockname()[1] for _ in range(count)]


class ServerProcesses:
    """Starts and ends server programs. They and their child processes end no later than this process."""

    def __init__(self, programs: Sequence[ServerProgram]) -> None:
        self.programs = tuple(programs)
        self._running: list[tuple[ServerProgram, subprocess.Popen[bytes], int]] = []

    def start(self, seconds: float) -> None:
        """Starts all servers and waits until they are healthy. Raises EngineError with the log of one that fails."""
        try:
            for program in self.programs:
                self._running.append((program, *_start(program)))
            deadline = time.monotonic() + seconds
            for program, process, log_start in self._running:
                _wait_until_healthy(program, process, log_start, deadline, seconds)
        except BaseException:
            self.close(patience=0)
            raise

    def close(self, patience: float = _TERMINATE_SECONDS) -> None:
        """Ends all servers: with SIGTERM, and after `patience` seconds with SIGKILL. Safe to call twice."""
        running, self._running = self._running, []
        for _, process, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        for _, process, _ in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        kill_sessions([process for _, process, _ in running])


def _start(program: ServerProgram) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the program under a supervisor, which leads a session; returns it and the log's size before."""
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


def _wait_until_healthy(
    program: ServerProgram, process: subprocess.Popen[bytes], log_start: int, deadline: float, seconds: float
) -> None:
    while not _is_healthy(program.url):
        if process.poll() is not None:
            raise EngineError(
                f"the server at {program.url} ended {describe_exit(process.returncode)} before it was ready. "
                f"{_log_tail(program, log_start)}"
            )
        if time.monotonic() > deadline:
            raise EngineError(
                f"the server at {program.url} was not ready within actor_infer.engine_args.start_timeout = "
                f"{seconds:g} seconds. {_log_tail(program, log_start)}"
            )
        time.sleep(_POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with without_proxy.open(f"{url}/health", timeout=_HEALTH_SECONDS) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _log_tail(program: ServerProgram, log_start: int) -> str:
    """Command line and last lines of the log since `log_start`, for errors."""
    lines = program.log.read_bytes()[log_start:].decode(errors="replace").splitlines()[-_LINES_SHOWN:]
    text = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return f"It was started as\n    {shlex.join(program.command)}\nand the last lines of {program.log} are\n{text}"
