"""Engine servers of a job: rank 0 starts them on its machine and ends them after the job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
from roll_batching.jobs.config.engines import ENGINES
from roll_batching.jobs.engines.servers import SERVER_KINDS, ServerProcesses, ServerProgram, free_ports, server_command
from roll_batching.jobs.processes.rank_variables import ROLE_DEVICES

LOGS = "engine_logs"
"""Folder of the servers' logs in the run's folder. Logs are appended to, which keeps those of earlier attempts."""
_MARGIN = 300.0
"""Seconds added to start_timeout for the time between ranks."""


@contextmanager
def engine_servers(config: JobConfig) -> Iterator[JobConfig]:
    """`config` with the URLs of its engine's servers, which the job starts, if needed, for the block. Collective.

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
        yield _with_urls(config, urls)
    except BaseException:
        for one in servers:
            one.close(patience=0)  # the error must not wait for servers to end
        raise
    for one in servers:
        one.close()


def _with_urls(config: JobConfig, urls: list[str]) -> JobConfig:
    role = config.actor_infer
    args = role.engine_args.model_copy(update={"urls": urls})
    return config.model_copy(update={"actor_infer": role.model_copy(update={"engine_args": args})})


def _make_servers(config: JobConfig) -> ServerProcesses:
    """The job's servers, not yet started."""
    role, model = config.actor_infer, config.actor_train.model_args.model_name_or_path
    assert model is not None, "engines read model directories"
    name = role.strategy_args.strategy_name
    kind, devices, names = SERVER_KINDS[name], server_devices(config), _device_names(config)
    options, sleeps = server_options(config), engine_sleeps(config)
    host = _host()
    programs, first = [], 0
    for number, (own, port) in enumerate(zip(devices, free_ports(host, len(devices)), strict=True)):
        visible = {} if names is None else {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + len(own)])}
        first += len(own)
        programs.append(
            ServerProgram(
                command=server_command(
                    kind, model, options, program=role.engine_args.command, host=host, port=port, sleeps=sleeps
                ),
                environment={**kind.variables, **visible},
                url=f"http://{host}:{port}",
                log=config.run_folder / LOGS / f"{name}-{number}.log",
            )
        )
    count = "a server" if len(programs) == 1 else f"{len(programs)} servers"
    print(
        f"notice: starting {count} of {name}, the first one as `{shlex.join(programs[0].command)}`; what they say is "
        f"in {programs[0].log.parent}",
        file=sys.stderr,
        flush=True,
    )
    return ServerProcesses(programs)


def _host() -> str:
    """Address at which all ranks reach servers on this machine; loopback when all ranks are on it."""
    is_single_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if is_single_machine else os.environ["MASTER_ADDR"]


def _device_names(config: JobConfig) -> list[str] | None:
    """The servers' devices, in the format of CUDA_VISIBLE_DEVICES; None without a device_mapping, and on a CPU."""
    own, given = config.actor_infer.device_mapping, os.environ.get(ROLE_DEVICES["actor_infer"])
    if own is None or (given is None and not torch.cuda.is_available()):
        return None
    visible = given or os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, own))
    names = visible.split(",")
    if len(names) < len(own) or (given is None and own != config.actor_train.device_mapping):
        raise EngineError(
            f"actor_infer.device_mapping names {len(own)} devices, and the machine of rank 0, which starts the "
            f"engine's servers, gives the job {len(names)} ({visible}): on several machines, and on devices of their "
            "own under --launcher ray, start them yourself and name them in actor_infer.engine_args.urls"
        )
    return names
