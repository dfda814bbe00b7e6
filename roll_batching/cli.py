"""The command line: `roll-batching train | sft | dpo | generate | eval | plan | simulate | rehearse | report | ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from roll_batching.commands.check_loss import check_loss
from roll_batching.commands.convert_config import convert_config
from roll_batching.commands.evaluate import evaluate
from roll_batching.commands.export import export
from roll_batching.commands.generate import generate
from roll_batching.commands.plan import ALGORITHMS_OF_MODES, plan
from roll_batching.commands.rehearse import rehearse
from roll_batching.commands.report import report
from roll_batching.commands.simulate import simulate
from roll_batching.commands.train import dpo, sft, train
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.secret_names import redact_forms

app = typer.Typer(
    help="Plans, packs and balances every training step on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=ALGORITHMS_OF_MODES)(plan)
app.command()(convert_config)
app.command()(simulate)
app.command()(rehearse)
app.command()(train)
app.command()(sft)
app.command()(dpo)
app.command()(export)
app.command()(generate)
app.command()(report)
app.command("eval")(evaluate)
app.command()(check_loss)


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
