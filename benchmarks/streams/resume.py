"""Resume a killed stream from its saved states, and compare it with the uninterrupted stream.

A process draws batches through a DataLoader, records their samples, and saves its state every 50 batches. It is killed
(SIGKILL) at random batches, and a new process resumes from the last saved state.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.streams.balance import trl_lengths
from benchmarks.table import Table
from roll_batching.files import atomic_file
from roll_batching.jobs.streams import LoadBalancedDataset

BATCHES, KILLS, EVERY, WORKERS = 10_000, 20, 50, (0, 2, 4)
SAMPLES = 20_000
SECONDS = 600.0


class _Numbers:
    """Samples that repeat their own number, once per token."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> range:
        return range(index, index + int(self.lengths[index]))


def resume(peers: dict[str, Path]) -> Table:
    """Table of killed and resumed streams, by number of loader processes."""
    table = Table(
        f"{BATCHES:,} batches, saved every {EVERY}, killed {KILLS} times",
        ["loader processes", "batches drawn again", "batches that differ", "epochs", "samples not once per epoch"],
    )
    for workers in WORKERS:
        again, differing, epochs, wrong = killed_and_resumed(workers, BATCHES, KILLS)
        table.add(workers, again, differing, epochs, wrong)
        text = f"{workers} loader processes: {differing} batches differ, {wrong} samples not once per epoch"
        table.require(not differing and not wrong and again > 0, text)
    return table


def killed_and_resumed(workers: int, batches: int, kills: int, *, seed: int = 0) -> tuple[int, int, int, int]:
    """(repeated batches, batches that differ from the uninterrupted stream, complete epochs, miscounted samples)."""
    unbroken = [step for _, step in zip(range(batches), _dataset(), strict=False)]
    expected, end = [step.indices[0] for step in unbroken], unbroken[-1].state
    points = sorted(random.Random(f"{seed}/{workers}").sample(range(1, batches), kills))
    drawn: dict[int, list[int]] = {}
    again = differing = 0
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        for number, point in enumerate([*points, batches]):
            notes = Path(folder) / f"notes-{number}"
            notes.touch()
            child = os.fork()
            if not child:
                _end_as(lambda notes=notes: _draw(Path(folder) / "state", notes, workers, batches))
            _watch(child, notes, point, batches)
            lines = notes.read_text().split("\n")[:-1]  # a line cut off by the kill has no newline
            for place, indices in (json.loads(line) for line in lines):
                again += place in drawn
                differing += indices != expected[place]
                drawn[place] = indices
    differing += len(set(range(batches)) - drawn.keys())
    wrong = _miscounted([drawn.get(place, []) for place in range(batches)], end)
    return again, differing, end["epoch"], wrong


def _dataset() -> LoadBalancedDataset:
    lengths = np.array(trl_lengths(SAMPLES), dtype=np.int64)
    return LoadBalancedDataset(
        _Numbers(lengths), pool_size=64, max_tokens_for_batch=16_384, seq_packing_enabled=True, lengths=lengths, seed=5
    )


def _as_it_is(step: Any) -> Any:
    return step


def _draw(state: Path, notes: Path, workers: int, batches: int) -> None:
    """Draw batches from the saved state on, record them and save states."""
    warnings.simplefilter("ignore")
    dataset, place = _dataset(), 0
    if state.exists():
        saved = json.loads(state.read_text())
        dataset.load_state_dict(saved["stream"])
        place = saved["place"]
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_as_it_is)
    with notes.open("w") as file:
        for step in loader:
            file.write(json.dumps([place, step.indices[0]]) + "\n")
            file.flush()
            place += 1
            if place % EVERY == 0:
                with atomic_file(state) as partial:
                    partial.write_text(json.dumps({"place": place, "stream": step.state}))
            if place == batches:
                return


def _end_as(work: Any) -> None:
    """Run `work` in a forked process, which exits also after an error."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _watch(child: int, notes: Path, point: int, batches: int) -> None:
    """Kill the process at batch `point` or later; after the last batch it exits by itself."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status or point != batches:
                raise SystemExit(f"the drawing process ended with {os.waitstatus_to_exitcode(status)} before {point}")
            return
        if point != batches and _last(notes) >= point:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    raise SystemExit(f"the drawing process did not reach batch {point} within {SECONDS:g} s")


def _last(notes: Path) -> int:
    with notes.open("rb") as file:
        file.seek(max(0, notes.stat().st_size - 4096))
        lines = file.read().split(b"\n")
    return int(lines[-2].split(b",")[0][1:]) if len(lines) > 1 and lines[-2].startswith(b"[") else -1


def _miscounted(batches: list[list[int]], end: dict[str, Any]) -> int:
    """Number of samples not drawn once per complete epoch, or more than once in the incomplete one.

    Samples in the pool at the end were read, but are in no batch yet.
    """
    counts = Counter(index for batch in [*batches, end["pool"]] for index in batch)
    wrong = sum(counts[index] - end["epoch"] not in (0, 1) for index in range(SAMPLES))
    return wrong + abs(sum(counts.values()) - end["epoch"] * SAMPLES - end["cursor"])
