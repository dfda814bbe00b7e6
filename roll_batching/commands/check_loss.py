"""`roll-batching check-loss MODULE:CLASS`: whether a loss depends on layout or micro-batches."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any

import typer
import yaml

from roll_batching.errors import ConfigError, LossError, RollBatchingError
from roll_batching.jobs.config.arguments import Arguments
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.registry import describe_error


def check_loss(
    loss: Annotated[str, typer.Argument(help="The loss: my_module:MyLoss, or a name that loss_function takes.")],
    loss_args: Annotated[list[str] | None, typer.Argument(help="Its settings, such as beta=0.2.")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=KIND of a field that it reads, with random values; KIND is token, next_token or sample. The "
            "fields of jobs and of the package's losses are there already."
        ),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="Sample field; samples with one value stay in one micro-batch. Default: pair, where read."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Run a loss on a tiny model under several layouts and partitions, and print each difference.

    Exit code 0: nothing changes; 1: something does, the loss fails, or its runs cannot be compared.
    """
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError("the check needs torch and megatron-core: pip install 'roll-batching[megatron]'")
    kinds: Any = _pairs(field, "--field", "NAME=KIND")
    made = _made(loss, {name: _value(text) for name, text in _pairs(loss_args, loss, "NAME=VALUE").items()})
    from roll_batching.loss_check import check_loss as check

    result = check(made, fields=kinds, group_by=group_by, seed=seed)
    typer.echo(str(result))
    if result.problems:
        raise LossError(f"{result.name} cannot be compared: {'; '.join(result.problems)}")
    if not result.ok:
        raise LossError(f"{result.name} changes with {'; '.join(result.changes)}")


def _pairs(texts: list[str] | None, owner: str, form: str) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"{owner} {text!r}: write {form}")
        if name in pairs:
            raise ConfigError(f"{owner}: {name} is given twice")
        pairs[name] = value
    return pairs


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is no value of YAML: {error}") from None


def _made(name: str, settings: dict[str, Any]) -> Any:
    """The loss object of a name and its settings. Raises `ConfigError` for either."""
    make = LOSSES.load(name)
    if not callable(make):
        raise ConfigError(f"{name!r} is a {type(make).__name__}: name a class of losses")
    arguments, problems = Arguments.of(f"the loss {name!r}", make).read(settings, ())
    if problems:
        raise ConfigError("; ".join(f"{'.'.join(map(str, problem.path))}: {problem.message}" for problem in problems))
    try:
        return make(**arguments)
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything, and call sys.exit
        raise ConfigError(f"{name!r} refuses its settings: {describe_error(error)}") from error
