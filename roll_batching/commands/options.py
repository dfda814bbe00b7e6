"""Options, limits and tables that several commands share."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from roll_batching.errors import ConfigError, RollBatchingError

MOST_RANKS = 65_536
MOST_SPLITS = 1024

Checkpoint = Annotated[Path, typer.Option(help="Folder of a run, whose last checkpoint is opened; or a checkpoint.")]
Pretrain = Annotated[str | None, typer.Option(help="Model directory that the run started from, if it has moved since.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL file of prompts with the run's keys; repeatable. Default: the held-out file."),
]

Clusters = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        help="h100 (default), a100, a YAML file with rates, or one rate as KEY=VALUE, such as matmul_rate=4e14; may be "
        "repeated. Rates are those of strategy_config.cluster in docs/configuration.md.",
    ),
]


class Launcher(StrEnum):
    """Launcher of the ranks."""

    local = "local"
    ray = "ray"


Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="With --launcher ray: `auto` (the running Ray), `local` (start a new one) or HOST:PORT.",
    ),
]
Slices = Annotated[
    str | None, typer.Option(help="Slices of a pack, each a unit of the pipeline: a number, or auto. Default: 1.")
]


def slices_of(text: str | None) -> int | Literal["auto"]:
    """`PlanConstraints.pipeline_slices` of the option. Raises `ConfigError`."""
    if text == "auto":
        return "auto"
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"--slices {text!r} is neither a number nor auto")
    return 1 if text is None else int(text)


def require_torch(task: str) -> None:
    """Raises RollBatchingError if torch is not installed; `task` is the subject of its message."""
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError(f"{task} needs torch and megatron-core: pip install 'roll-batching[megatron,hf]'")


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str, *, first: str = "right", others: str = "right"
) -> None:
    """Print a table of texts, numbers to the right; `first`: alignment of the first column, "left" for names."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for place, name in enumerate(header):
        table.add_column(name, justify=others if place else first)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 130  # of a file or pipe rich assumes 80 columns, and would cut figures
    console.print(table)
