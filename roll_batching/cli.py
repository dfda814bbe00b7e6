"""The command line: `roll-batching train | sft | dpo | generate | eval | plan | simulate | rehearse | report | ...`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from roll_batching import __version__
from roll_batching.commands import COMMANDS
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.secret_names import redact_forms


class _LazyCommand(TyperCommand):
    """A command whose module is imported when it is called: `--help` and completion need none."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself."""
        module_name, _, function = COMMANDS[str(self.name)][0].partition(":")
        module = importlib.import_module(f"roll_batching.commands.{module_name}")
        single = typer.Typer(add_completion=False)
        single.command(self.name, epilog=getattr(module, "EPILOG", None))(getattr(module, function))
        return typer.main.get_command(single).make_context(info_name, args, parent=parent, **extra)


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"roll-batching {__version__}")
        raise typer.Exit


@app.callback()
def _read_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plans, packs and balances every training step on Megatron-Core."""


for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, cls=_LazyCommand, help=_summary)(lambda: None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 success, 1 a failed job, 2 a wrong command or configuration."""
    _open_streams()
    hide_known_warnings()
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="roll-batching")
    except ConfigError as error:
        _report(error)
        sys.exit(2)
    except RollBatchingError as error:
        _report(error)
        sys.exit(1)


def _open_streams() -> None:
    """Open closed standard streams, so that files opened later do not get the numbers 0 to 2."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is `number`
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _report(error: RollBatchingError) -> None:
    """Record the failure for the launcher of this rank, or print it to stderr."""
    from roll_batching.jobs.launch.failures import describe_failure, record_failure
    from roll_batching.jobs.launch.rendezvous import rank_info

    try:
        place = rank_info()
    except ConfigError:
        place = None
    if place is not None and record_failure(describe_failure(place.rank, error)):
        return
    # All ranks read the same file and find the same errors, so one of them reports.
    if place is None or place.rank == 0:
        sys.stdout.flush()
        print(redact_forms(f"error: {error}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
