"""`roll-batching train | sft | dpo --config FILE`: start the processes of a job, or be one of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.config import JobConfig, Notice, load_config
from roll_batching.config.job_keys import Task
from roll_batching.errors import RollBatchingError

ConfigOption = Annotated[Path, typer.Option(help="YAML or TOML file of the job.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, such as actor_train.use_sequence_packing=false."),
]
Processes = Annotated[int | None, typer.Option(min=1, help="Processes to start, whatever device_mapping names.")]


def train(
    config: ConfigOption,
    overrides: Overrides = None,
    nproc: Processes = None,
) -> None:
    """Train: start one process per device, or be one of them under torchrun."""
    run_command("train", config, overrides, nproc)


def sft(config: ConfigOption, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Supervised fine-tuning on texts or conversations: `train` for a file whose task is sft, or that names none."""
    run_command("sft", config, overrides, nproc, task="sft")


def dpo(config: ConfigOption, overrides: Overrides = None, nproc: Processes = None) -> None:
    """Preference training on pairs of answers: `train` for a file whose task is dpo, or that names none."""
    run_command("dpo", config, overrides, nproc, task="dpo")


def run_command(
    command: str, config: Path, overrides: Sequence[str] | None, nproc: int | None, task: Task | None = None
) -> None:
    """Starts the processes of the job that `config` describes with `command`, or is one of them."""
    from roll_batching.launch.environment import check_world, rank_place

    changes = list(overrides or ())
    job = load_config(config, changes, task=task)
    job.check_runnable()
    place = rank_place()
    if place is None:
        _start(job, [command, "--config", str(config), *changes], nproc)
        return
    check_world(job, place)
    from roll_batching.launch.worker import run_worker

    if place.rank == 0 and place.launcher is None:
        _show_notices(job.notices)
    # Nothing that reads them is imported yet. Our own launcher has set them before this process began.
    os.environ.update(job.environment())
    run_worker(job)


def _start(job: JobConfig, arguments: Sequence[str], nproc: int | None) -> None:
    from roll_batching.launch.devices import choose_devices, process_count, visible_devices

    count = process_count(job, nproc)
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError("training needs torch and megatron-core: pip install 'roll-batching[megatron]'")
    import torch

    from roll_batching.launch.local import launch
    from roll_batching.observe.wandb_run import require_wandb
    from roll_batching.rl.folder import folder_of, held
    from roll_batching.rl.inputs import check_inputs

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if job.track_with == "wandb":
        require_wandb()
    devices = choose_devices(job.actor_train.device_mapping, count, gpus, forced=nproc is not None)
    _show_notices(job.notices)
    _try_reward(job)
    with held(folder_of(job)) as hold:
        variables = {**job.environment(), **visible_devices(devices), **hold, **check_inputs(job)}
        failure = launch("roll_batching.cli", arguments, count, variables)
    if failure is not None:
        raise RollBatchingError(failure)


def _try_reward(job: JobConfig) -> None:
    """Raises ConfigError when the reward function cannot be imported: said here, once, and before anything is built."""
    from roll_batching.rl.reward_pool import reward_of

    reward = reward_of(job)
    if reward is not None:
        with reward:
            reward.start()


def _show_notices(notices: Sequence[Notice]) -> None:
    for notice in notices:
        typer.echo(f"notice: {notice}", err=True)
