"""Processes of the check: one that imports everything, and the ranks of each layout, which it forks."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import die_with_parent
from roll_batching.loss_check.model import fill_weights, role_settings, whole_gradients
from roll_batching.loss_check.samples import VOCABULARY
from roll_batching.loss_check.scenarios import LayoutRuns, Scenario
from roll_batching.losses.contract import VALUES, loss_spec
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch, distribute, gather_lengths
from roll_batching.strategy import MegatronTrainStrategy

_GRACE_SECONDS = 10
"""What the other ranks have after one has failed, to report the same error."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A loss, its samples and the runs."""

    loss: bytes
    """Pickled: each run has a new copy, so that none sees the state that another left."""
    samples: SampleBatch
    layouts: tuple[LayoutRuns, ...]
    seed: int
    seconds: float
    """Longest time of the runs of one layout."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run."""

    loss: float = 0.0
    metrics: dict[str, float] | None = None
    gradients: dict[str, torch.Tensor] | None = None
    error: str | None = None
    """Instead of a result."""


def run_layouts(pickled: bytes, answers: Connection, parent: int) -> None:
    """Sends the outcomes of each layout's runs of a pickled `Request`, by name; then ends.

    Messages are bytes: multiprocessing would send tensors as handles of shared memory, which end with their process.
    """
    die_with_parent(parent)
    request = pickle.loads(pickled)
    # Before CUDA is asked for anything: the check runs on the CPU, beside a job as well.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    for layout in request.layouts:
        answers.send_bytes(pickle.dumps(_run_layout(request, layout)))
    answers.close()


def _run_layout(request: Request, layout: LayoutRuns) -> dict[str, Outcome]:
    port, context = _free_port(), multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="check-loss-") as folder:
        receiver, sender = context.Pipe(duplex=False)
        ranks = []
        for rank in range(layout.processes):
            output = Path(folder) / str(rank)
            arguments = (request, layout, rank, port, sender if rank == 0 else None, output, os.getpid())
            ranks.append(context.Process(target=_run_rank, args=arguments))
            ranks[-1].start()
        sender.close()
        try:
            outcomes = _receive(receiver, [rank.sentinel for rank in ranks], request.seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if outcomes is None:
            outcomes = {}
        last = (Path(folder) / "0").read_text(errors="replace").strip().splitlines()[-3:]
    ended = f"its process ended early: {' | '.join(last)}" if last else "its process ended early"
    late = f"it did not end within {request.seconds:g} s: a collective call that not every rank makes?"
    return {
        one.name: outcomes.get(one.name) or Outcome(error=late if ranks[0].exitcode == -9 else ended)
        for one in layout.scenarios
    }


def _receive(receiver: Connection, sentinels: list[Any], seconds: float) -> dict[str, Outcome] | None:
    """What rank 0 sends before it ends; None if it does not within `seconds`, or long after another rank has failed."""
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if receiver.poll(min(left, 0.2)):
            try:
                name, outcome = pickle.loads(receiver.recv_bytes())
            except EOFError:  # rank 0 has ended
                break
            outcomes[name] = outcome
        if len(wait(sentinels, 0)) > 0:
            end = min(end, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run_rank(
    request: Request, layout: LayoutRuns, rank: int, port: int, sender: Connection | None, output: Path, parent: int
) -> None:
    die_with_parent(parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb", closefd=False), line_buffering=True) for n in (1, 2))
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.processes, "LOCAL_WORLD_SIZE": layout.processes}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    strategies: dict[str, MegatronTrainStrategy] = {}
    for scenario in layout.scenarios:
        try:
            outcome = _run(request, layout, scenario, strategies)
        except Exception as error:  # of the user's code, or of the library because of it
            text = str(error) if isinstance(error, RollBatchingError) else f"{type(error).__name__}: {error}"
            outcome = Outcome(error=text)
        if sender is not None:
            sender.send_bytes(pickle.dumps((scenario.name, outcome)))
        if outcome.error is not None and layout.processes > 1:
            break  # the ranks may no longer be in step


def _run(
    request: Request, layout: LayoutRuns, scenario: Scenario, strategies: dict[str, MegatronTrainStrategy]
) -> Outcome:
    samples, loss = request.samples, pickle.loads(request.loss)
    vocabulary = max(int(samples["input_ids"].max()) + 1, VOCABULARY)
    if scenario.mode not in strategies:
        settings = role_settings(
            scenario.mode,
            layout.strategy_config,
            vocabulary=vocabulary,
            samples=len(samples),
            tokens=samples.num_tokens,
            value_head=VALUES in loss_spec(loss).needs,
        )
        strategies[scenario.mode] = MegatronTrainStrategy(settings)
        strategies[scenario.mode].initialize()
    strategy = strategies[scenario.mode]
    place = strategy.layout
    fill_weights(strategy.chunks, vocabulary, place.tp_rank, place.tp_size)
    local = samples.select(torch.arange(place.dp_rank, len(samples), place.dp_size))
    if (prepare := loss_spec(loss).prepare) is not None:
        local = prepare(local, place, request.seed)
    table = gather_lengths(local)
    row = {identity: number for number, identity in enumerate(table.ids.tolist())}
    ids = samples.ids.tolist()
    bins = [[[row[ids[sample]] for sample in pack] for pack in packs] for packs in scenario.bins]
    constraints = strategy.plan(table).constraints
    plan = Plan.from_bins(bins, table.lengths, constraints, ids=table.ids, location=table.location)
    torch.manual_seed(request.seed)
    strategy.zero_grad()
    value, metrics = strategy.forward_backward(distribute(local, plan), plan, loss)
    return Outcome(loss=value, metrics=metrics, gradients=whole_gradients(strategy.chunks, vocabulary, place.tp_group))
