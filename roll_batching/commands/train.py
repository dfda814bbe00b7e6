"""`roll-batching train | sft | dpo --config FILE`: start the ranks of a job, or run as one of them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roll_batching.commands.options import Address, Launcher
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import JobConfig, Notice, load_config
from roll_batching.jobs.config.auto_caps import auto_caps, with_open_caps
from roll_batching.jobs.config.engine_rules import starts_servers
from roll_batching.jobs.config.job_keys import Task

if TYPE_CHECKING:
    from roll_batching.jobs.launch.worker import Prepare

ConfigOption = Annotated[Path, typer.Option(help="YAML or TOML file of the job.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, such as actor_train.use_sequence_packing=false."),
]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to start, instead of those of device_mapping.")]
LauncherOption = Annotated[
    Launcher, typer.Option(help="local: this command starts the ranks on this machine. ray: ranks are Ray actors.")
]
Restarts = Annotated[
    int, typer.Option(min=0, help="With --launcher ray: number of restarts from the last checkpoint after lost ranks.")
]


@dataclass(frozen=True, kw_only=True)
class _LaunchOptions:
    """Options of the launcher."""

    nproc: int | None
    launcher: Launcher
    address: str
    max_restarts: int


def _command(name: str, task: Task | None, summary: str) -> Callable[..., None]:
    """The command `name`, for files of `task`; None: of any task."""

    def command(
        config: ConfigOption,
        overrides: Overrides = None,
        nproc: Processes = None,
        launcher: LauncherOption = Launcher.local,
        address: Address = "local",
        max_restarts: Restarts = 0,
    ) -> None:
        options = _LaunchOptions(nproc=nproc, launcher=launcher, address=address, max_restarts=max_restarts)
        run_command(name, config, overrides, options, task)

    command.__name__, command.__doc__ = name, summary
    return command


train = _command("train", None, "Train: start one process per device, or run as one rank under torchrun.")
sft = _command(
    "sft",
    "sft",
    "Supervised fine-tuning on texts or conversations: `train` for a file with task sft or without a task.",
)
dpo = _command(
    "dpo", "dpo", "Preference training on pairs of responses: `train` for a file with task dpo or without a task."
)


def run_command(
    command: str, config: Path, overrides: Sequence[str] | None, options: _LaunchOptions, task: Task | None = None
) -> None:
    """Start the ranks of the job in the file `config`, or run as one of them."""
    from roll_batching.huggingface.hub import download_models
    from roll_batching.jobs.launch.devices import devices_under_torchrun, raise_open_files_limit, role_device_variables
    from roll_batching.jobs.launch.rendezvous import check_world_size, rank_info

    changes = list(overrides or ())
    job = load_config(config, changes, task=task)
    if download_models(role.model_args.model_name_or_path for role in job.roles.values()):
        job = load_config(config, changes, task=task)
    job.check_runnable()
    raise_open_files_limit()
    place = rank_info()
    prepare: Prepare | None = None
    if auto_caps(job.roles):
        from roll_batching.tools.rehearsal.caps import resolve_caps as prepare
    if options.launcher is Launcher.ray:
        if place is not None:
            raise ConfigError("--launcher ray starts the ranks itself, but RANK is set in the environment. Unset it")
        _run_on_ray(job, options, prepare)
        return
    if options.max_restarts:
        raise ConfigError("--max-restarts needs --launcher ray. Under torchrun, set its own --max-restarts")
    os.environ.update(role_device_variables(job))
    if place is None:
        _run_here(with_open_caps(job), [command, "--config", str(config), *changes], options.nproc)
        return
    check_world_size(job, place)
    from roll_batching.jobs.launch.worker import run_worker

    if place.rank == 0 and place.launcher is None:
        _show_notices(job.notices)
    # Set before the import of any module that reads them. The local launcher sets them in the ranks' environment.
    os.environ.update(job.environment())
    if place.launcher is None:
        os.environ.update(devices_under_torchrun(job))
    run_worker(job, prepare=prepare)


def _run_here(job: JobConfig, arguments: Sequence[str], nproc: int | None) -> None:
    from roll_batching.jobs.launch.devices import oversubscription_warning, process_count
    from roll_batching.jobs.launch.local import launch

    count = process_count(job, nproc)
    visible = _devices_here(job, count, nproc)
    if not visible and (text := oversubscription_warning(count, os.cpu_count() or 1)):
        typer.echo(f"notice: {text}", err=True)
    with _prepared(job) as variables:
        failure = launch("roll_batching.cli", arguments, count, {**variables, **visible}, job.run_folder)
    if failure is not None:
        raise RollBatchingError(failure)


def _run_on_ray(job: JobConfig, options: _LaunchOptions, prepare: Prepare | None) -> None:
    from roll_batching.jobs.launch.devices import process_count
    from roll_batching.jobs.launch.on_ray.cluster import LOCAL, check_address, check_folder, connected

    count = process_count(job, options.nproc)
    if starts_servers(job) and job.actor_infer.device_mapping != job.actor_train.device_mapping:
        raise ConfigError(
            "actor_infer.device_mapping differs from actor_train's, which --launcher ray does not support for servers "
            "that the job starts. Leave it out to share the devices of actor_train, or list running servers in "
            "actor_infer.engine_args.urls"
        )
    if options.max_restarts and not job.save_steps:
        raise ConfigError("--max-restarts resumes from checkpoints, and the job writes none. Set save_steps")
    check_folder(job.output_dir)
    check_address(options.address)
    if options.address == LOCAL:
        os.environ.update(_devices_here(with_open_caps(job), count, options.nproc, of_roles=True))
    with _prepared(with_open_caps(job)) as variables:
        from roll_batching.jobs.launch.on_ray.restarts import run_on_ray

        processes = count + sum(len(job.own_devices(name) or ()) for name in job.roles)
        with connected(options.address, max(processes, os.cpu_count() or 1)):
            failure = run_on_ray(job, count, variables, max_restarts=options.max_restarts, prepare=prepare)
    if failure is not None:
        raise RollBatchingError(failure)


def _devices_here(job: JobConfig, count: int, nproc: int | None, *, of_roles: bool = False) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the ranks on this machine; empty without GPUs, where models are checked instead.

    `of_roles`: include the devices of roles that have their own.
    """
    from roll_batching.jobs.launch.devices import choose_devices, role_gpus, visible_devices

    _require_torch()
    import torch

    from roll_batching.jobs.run.capabilities import check_capabilities

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:  # on a GPU the ranks ask: this process would keep memory of the device
        check_capabilities(job, torch.device("cpu"))
    chosen = choose_devices(job.actor_train.device_mapping, count, gpus, forced=nproc is not None)
    others = role_gpus(job, chosen, gpus)
    return visible_devices([*chosen, *(device for device in others if of_roles)])


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError("training needs torch and megatron-core: pip install 'roll-batching[megatron]'")


@contextlib.contextmanager
def _prepared(job: JobConfig) -> Iterator[Mapping[str, str]]:
    """Check the inputs and lock the run's folder; yields environment variables for the ranks."""
    _require_torch()
    from roll_batching.jobs.inputs import check_inputs
    from roll_batching.jobs.observe.trackers import tracker_of
    from roll_batching.jobs.run.folder import lock_folder

    tracker_of(job.track_with)
    _show_notices(job.notices)
    _try_reward(job)
    with lock_folder(job.run_folder) as hold:
        yield {**job.environment(), **hold, **check_inputs(job)}


def _try_reward(job: JobConfig) -> None:
    """Import the reward function before any rank starts, so that its ConfigError is reported once."""
    from roll_batching.jobs.rewards.pool import reward_of

    reward = reward_of(job)
    if reward is not None:
        with reward:
            for notice in reward.start():
                typer.echo(f"notice: {notice}", err=True)


def _show_notices(notices: Sequence[Notice]) -> None:
    for notice in notices:
        typer.echo(f"notice: {notice}", err=True)
