"""Starts the engine's servers on rank 0, and ends them no later than the job."""

from __future__ import annotations

import asyncio
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import exchange, host_group
from roll_batching.errors import EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import (
    SERVED,
    engine_sleeps,
    server_devices,
    server_options,
    starts_servers,
    uses_engine,
)
from roll_batching.jobs.config.worker import ENGINES
from roll_batching.jobs.processes.child_process import (
    ROLE_DEVICES,
    describe_exit,
    kill_sessions,
    notify,
    python_command,
    without_rank_variables,
)
from roll_batching.jobs.processes.requests import HEALTH_SECONDS, is_healthy, open_session

# Program of the supervisor, the parent of each server: it ends the server when this process ends.
_SUPERVISE = "from roll_batching.lifetime import run_under; run_under(int(sys.argv[1]), sys.argv[2:])"
_POLL_SECONDS = 0.5
_TERMINATE_SECONDS = 10.0
_LINES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """Command line of an engine's servers, as its publisher documents it."""

    program: tuple[str, ...]
    """Program, and arguments before the options. The program is looked up in the interpreter's folder first."""
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
    """`program` with its full path: in this interpreter's folder, or on PATH. Raises EngineError if it is nowhere."""
    in_environment = Path(sys.executable).parent / program[0]
    file = str(in_environment) if in_environment.exists() else shutil.which(program[0])
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
    """Starts the program under a supervisor, which leads a session; returns it and the log's size at its start."""
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
    while not asyncio.run(_is_healthy(program.url)):
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


async def _is_healthy(url: str) -> bool:
    async with open_session(HEALTH_SECONDS) as session:
        return await is_healthy(session, f"{url}/health")


def _log_tail(program: ServerProgram, log_start: int) -> str:
    """Command line and last lines of the log since `log_start`, for errors."""
    lines = program.log.read_bytes()[log_start:].decode(errors="replace").splitlines()[-_LINES_SHOWN:]
    text = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return f"It was started as\n    {shlex.join(program.command)}\nand the last lines of {program.log} are\n{text}"


# ---- started servers


LOGS = "engine_logs"
"""Folder of the servers' logs in the run's folder. Logs are appended to, which keeps those of earlier attempts."""
_MARGIN = 300.0
"""Seconds added to start_timeout for the time between ranks."""


@contextmanager
def engine_servers(config: JobConfig) -> Iterator[JobConfig]:
    """Yields `config` with the URLs of its engine's servers, and starts these for the block if needed. Collective.

    Servers that share devices with the model in training are put to sleep, so that it fits. Raises RankError, the same
    on all ranks, when a server does not start or sleep.
    """
    role = config.actor_infer
    if not uses_engine(config) or role.strategy_args.strategy_name not in SERVED:
        yield config
        return
    patience = role.engine_args.start_timeout
    servers: list[ServerProcesses] = []

    def start() -> list[str]:
        urls = role.engine_args.urls
        if dist.get_rank() != 0:
            return []
        if starts_servers(config):
            servers.append(_make_servers(config))
            servers[0].start(patience)
            urls = [program.url for program in servers[0].programs]
        if engine_sleeps(config):
            make = ENGINES.load(role.strategy_args.strategy_name)
            make(role.engine_args.model_copy(update={"urls": urls}), torch.device("cpu")).sleep()
        return urls

    try:
        urls = exchange(host_group(), "starting the engine's servers", start, patience=patience + _MARGIN)[0]
        args = role.engine_args.model_copy(update={"urls": urls})
        yield config.model_copy(update={"actor_infer": role.model_copy(update={"engine_args": args})})
    except BaseException:
        for server in servers:
            server.close(patience=0)  # the error must not wait for servers to end
        raise
    for server in servers:
        server.close()


def _make_servers(config: JobConfig) -> ServerProcesses:
    """The job's servers, not yet started."""
    role, model = config.actor_infer, config.actor_train.model_args.model_name_or_path
    assert model is not None, "engines read model directories"
    name = role.strategy_args.strategy_name
    kind, devices, names = SERVER_KINDS[name], server_devices(config), _device_names(config)
    options, sleeps = server_options(config), engine_sleeps(config)
    host = _host()
    programs, first = [], 0
    ports = free_ports(host, len(devices))
    for index, (server_mapping, port) in enumerate(zip(devices, ports, strict=True)):
        end = first + len(server_mapping)
        visible = {} if names is None else {"CUDA_VISIBLE_DEVICES": ",".join(names[first:end])}
        first = end
        programs.append(
            ServerProgram(
                command=server_command(
                    kind, model, options, program=role.engine_args.command, host=host, port=port, sleeps=sleeps
                ),
                environment={**kind.variables, **visible},
                url=f"http://{host}:{port}",
                log=config.run_folder / LOGS / f"{name}-{index}.log",
            )
        )
    count = "a server" if len(programs) == 1 else f"{len(programs)} servers"
    notify(
        f"starting {count} of {name}, the first one as `{shlex.join(programs[0].command)}`; what they say is in "
        f"{programs[0].log.parent}"
    )
    return ServerProcesses(programs)


def _host() -> str:
    """Address at which all ranks reach servers on this machine; loopback when all ranks are on it."""
    is_single_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if is_single_machine else os.environ["MASTER_ADDR"]


def _device_names(config: JobConfig) -> list[str] | None:
    """Names of the servers' devices for CUDA_VISIBLE_DEVICES; None without a device_mapping, and on a CPU.

    Raises EngineError if rank 0's machine does not have them.
    """
    mapped, assigned = config.actor_infer.device_mapping, os.environ.get(ROLE_DEVICES["actor_infer"])
    if mapped is None or (assigned is None and not torch.cuda.is_available()):
        return None
    visible = assigned or os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, mapped))
    names = visible.split(",")
    if len(names) < len(mapped) or (assigned is None and mapped != config.actor_train.device_mapping):
        raise EngineError(
            f"actor_infer.device_mapping names {len(mapped)} devices, and the machine of rank 0, which starts the "
            f"engine's servers, gives the job {len(names)} ({visible}): on several machines, and on devices of their "
            "own under --launcher ray, start them yourself and name them in actor_infer.engine_args.urls"
        )
    return names
