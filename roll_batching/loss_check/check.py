"""`check_loss`: whether a loss depends on anything but its samples and the weights."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping
from typing import Any

from roll_batching.errors import DataError, LossError
from roll_batching.loss_check.process import run_request
from roll_batching.loss_check.report import LossCheck, compare, gradient_norm
from roll_batching.loss_check.scenarios import (
    PACKS,
    PAIR_FIELDS,
    REFERENCE,
    LayoutRuns,
    Outcome,
    Request,
    random_samples,
    scenarios,
)
from roll_batching.losses.contract import loss_spec
from roll_batching.samples import FieldKind, SampleBatch
from roll_batching.samples.token_fields import require_field


def check_loss(
    loss: Any,
    *,
    fields: Mapping[str, FieldKind] | None = None,
    samples: SampleBatch | None = None,
    group_by: str | None = None,
    seed: int = 0,
    seconds: float = 60.0,
) -> LossCheck:
    """Runs one step of `loss` on a tiny model under several layouts and partitions, and compares them.

    The runs are made on the CPU, in processes of their own: tensor, context and data parallelism over two processes,
    padded and packed, other numbers of micro-batches, other orders. Loss, gradient and metrics must be the same in all
    of them. `print(check)` shows a table; `check.ok` is the verdict.

    Args:
        loss: a loss object. Its class must be importable: in a module, or in a script below
            `if __name__ == "__main__"`.
        fields: kinds of fields that the loss reads beside those of jobs and of the package's losses; they hold random
            numbers. A kind given for one of those replaces its kind.
        samples: samples for other values, in place of random ones.
        group_by: a sample field; samples with one value stay in one micro-batch. Default: `pair` where the loss reads
            it.
        seed: of the random samples.
        seconds: longest time of the runs of one layout.

    Raises:
        LossError: for an object that is no loss or cannot be sent to other processes, and for a loss that fails in the
            first run: one process, packed.
    """
    spec = loss_spec(loss)
    try:
        pickled = pickle.dumps(loss)
    except Exception as error:  # an attribute may raise anything
        raise LossError(
            f"{spec.name} cannot be sent to the processes of the check ({error}): define its class, and functions that "
            "it holds, at the top of a module, and keep open files and models out of it"
        ) from error
    field_kinds = dict(fields or {})

    def run(batch: SampleBatch, group: str | None) -> LossCheck:
        layouts = scenarios(_units(batch, group))
        request = Request(loss=pickled, samples=batch, layouts=tuple(layouts), seed=seed, seconds=seconds)
        return _check(spec.name, request, layouts)

    if samples is not None:
        return run(samples, group_by or ("pair" if "pair" in samples else None))
    if not any(name in (*spec.sums, *field_kinds) for name in PAIR_FIELDS):
        try:
            return run(random_samples(spec, field_kinds, seed, pairs=False), group_by)
        except LossError as error:
            if not any(f"'{name}'" in str(error) for name in PAIR_FIELDS):
                raise
    return run(random_samples(spec, field_kinds, seed, pairs=True), group_by or "pair")


def _units(samples: SampleBatch, group_by: str | None) -> list[list[int]]:
    """Indices of the samples of each group, groups in order of first appearance."""
    if group_by is None:
        units = [[index] for index in range(len(samples))]
    else:
        require_field(samples, group_by, "group_by", "sample")
        groups: dict[Any, list[int]] = {}
        for index, value in enumerate(samples[group_by].tolist()):
            groups.setdefault(value, []).append(index)
        units = list(groups.values())
    if len(units) < PACKS + 1:
        raise DataError(
            f"the samples have {len(units)} parts that can stand in different micro-batches: give at least {PACKS + 1}"
        )
    return units


def _check(name: str, request: Request, layouts: list[LayoutRuns]) -> LossCheck:
    outcomes = _outcomes(request)
    first = outcomes[REFERENCE]
    assert first.metrics is not None
    changed_runs = [scenario for layout in layouts for scenario in layout.scenarios if scenario.name != REFERENCE]
    return LossCheck(
        name=name,
        loss=first.loss,
        metrics=first.metrics,
        gradient_norm=gradient_norm(first),
        rows=tuple(compare(scenario.name, scenario.hint, outcomes[scenario.name], first) for scenario in changed_runs),
    )


def _outcomes(request: Request) -> dict[str, Outcome]:
    """Outcomes of all runs, by name. Raises `LossError` if the first has none."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_request, args=(pickle.dumps(request), sender, os.getpid()))
    process.start()
    sender.close()
    outcomes: dict[str, Outcome] = {}
    try:
        for _ in request.layouts:
            outcomes |= pickle.loads(receiver.recv_bytes())
            if (error := outcomes[REFERENCE].error) is not None:
                cure = "; give it by fields= (--field NAME=KIND) or samples=" if "reads the field" in error else ""
                raise LossError(f"the loss fails on one process, with packs: {error}{cure}")
    except EOFError:
        process.join()
        raise LossError(
            f"the process of the check ended with exit code {process.exitcode} before it had a result (its error is "
            "above). The loss must be importable there: define it in a module, or call check_loss below "
            'if __name__ == "__main__"'
        ) from None
    finally:
        process.kill()
        process.join()
    return outcomes
