"""Checkpoints of a job: the strategy's, and beside it all that decides how the run goes on.

They lie in the run's folder under `checkpoints`, named by phase and step. A run that was killed and goes on from its
last one draws the same data and the same random numbers, and writes the same rows as one that was never killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.errors import CheckpointError, RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.objectives.from_config import steps_key
from roll_batching.jobs.objectives.stateful import Stateful
from roll_batching.jobs.roles.remote_reference import RemoteReference
from roll_batching.jobs.run.folder import PreviousRun
from roll_batching.jobs.run.job_digests import Digests, changes, check_tokenizer, digests_of
from roll_batching.planning import ParallelDims
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.checkpoint import check_saving, write_state
from roll_batching.strategy.checkpoint_files import check_files, describe_cause, explain_read_errors
from roll_batching.strategy.checkpoint_folder import PARTIAL, AtomicFolder, write_text
from roll_batching.strategy.checkpoint_writer import CheckpointWriter

logger = logging.getLogger(__name__)

PHASES = ("warmup", "sft", "dpo", "rl")
"""Of all jobs, in the order in which one may have them."""
FOLDER = "checkpoints"
_RECORD = "job.json"
_NAME = re.compile(rf"({'|'.join(PHASES)})-(\d{{6,}})")


Frozen = MegatronInferStrategy | RemoteReference
"""A reference, wherever it is."""


@dataclass(frozen=True, kw_only=True)
class SavedPoint:
    """Where a job was when a checkpoint was written."""

    path: Path
    phase: str
    step: int
    """The last step that was done in the phase."""
    position: dict[str, Any]
    """State of the phase's data stream, and of what else goes on from step to step."""
    layout: ParallelDims
    """The parallel layout that wrote it."""
    job: Digests | None = field(default=None, repr=False)
    """Of the job that wrote it; None: an earlier version did."""

    @property
    def order(self) -> tuple[int, int]:
        """Later points of a run compare greater."""
        return PHASES.index(self.phase), self.step


class JobCheckpoints:
    """Writes the checkpoints of a run, and restores the one that it goes on from.

    Building it is collective and changes nothing in the folder. Raises RankError, the same on all ranks, when the job
    is to save and cannot, or when the checkpoint that `resume_from_checkpoint` names is not there.
    """

    def __init__(self, config: JobConfig, strategy: MegatronTrainStrategy, inputs: JobInputs) -> None:
        self.config = config
        self.folder = config.run_folder / FOLDER
        self.strategy = strategy
        self.verify = config.verify_checkpoint
        self._job: Digests | None = None
        """Of this job, on the rank that writes and compares them."""
        self._changed: list[str] = []
        """What differs from the job that wrote the checkpoint, on that rank."""
        self.every = config.save_steps
        self.kept = config.save_total_limit
        self.background = config.async_save
        self.resumed: SavedPoint | None = None
        """The point that the run goes on from; None where it starts at the beginning."""
        self._group = strategy.layout.host_group
        with consensus(self._group, "the job's checkpoints") as facts:
            self._check()
            if config.resume_from_checkpoint:
                self.resumed = _resumed(config, self.folder)
            if dist.get_rank() == 0 and (self.every or self.resumed is not None):
                self._job = digests_of(config, inputs)
                if self.resumed is not None and self.resumed.job is not None:
                    check_tokenizer(self.resumed.job, inputs.tokenizer, self.resumed.path)
                    self._changed = changes(self.resumed.job, self._job)
            facts.equal("the checkpoint that is found", self.resumed, "Save to a file system that all machines share")
        self.latest = self.resumed.path if self.resumed is not None else None
        self._pending: tuple[AtomicFolder, list[CheckpointWriter]] | None = None

    def _check(self) -> None:
        if self.every:
            check_saving(self.strategy.state)

    @property
    def resume_after(self) -> tuple[str, int] | None:
        """Phase and step of the last row to keep; None where the run starts new or from another run's checkpoint."""
        point = self._resumed_in_folder()
        return None if point is None else (point.phase, point.step)

    def _resumed_in_folder(self) -> SavedPoint | None:
        """The resumed checkpoint, if it lies in this run's folder."""
        point = self.resumed
        return point if point is not None and point.path.resolve().parent == self.folder.resolve() else None

    def move_later_checkpoints(self, previous: PreviousRun) -> None:
        """Move checkpoints after the resumed one to `previous`, and remove partial writes. On one rank."""
        resumed = self._resumed_in_folder()
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            place = _place(path)
            if path.suffix == PARTIAL:
                shutil.rmtree(path)
            elif place is not None and (resumed is None or place > resumed.order):
                previous.move(path)

    def is_past(self, phase: str) -> bool:
        """Whether the resumed point belongs to a later phase, so that `phase` is not run."""
        return self.resumed is not None and PHASES.index(self.resumed.phase) > PHASES.index(phase)

    def restore(self, phase: str, last: int, stream: Stateful, reference: Frozen | None = None) -> int:
        """Puts model, optimizer, data and random numbers where they were; returns the steps done in `phase`.

        Raises CheckpointError when these are more than `last`, those that the phase has.

        Does nothing and returns 0 when the run does not go on from inside this phase. To be called when everything
        that draws random numbers is built and the phase's optimizer is new. Collective.
        """
        point = self.resumed
        if point is None or point.phase != phase:
            return 0
        with self._advised(lambda: self._instead_of(point)):
            if point.step > last:
                raise CheckpointError(
                    f"{point.path} is at step {point.step:,} of {phase}, which has {last:,} steps here: raise "
                    f"{steps_key(self.config, phase)}"
                )
            self.strategy.load(point.path, verify=self.verify)
            if isinstance(reference, RemoteReference):
                reference.load(point.path / "reference")
            elif reference is not None:
                reference.load(point.path / "reference", verify=self.verify)
            with consensus(self._group, "the job's checkpoints"):
                stream.load_state_dict(point.position)
                if point.layout == self.strategy.layout.dims:
                    with explain_read_errors(point.path / _random_file()):
                        _set_random_states(torch.load(point.path / _random_file(), weights_only=True))
        if self._changed:
            logger.warning("%s goes on with what has changed since: %s", point.path, "; ".join(self._changed))
        if point.layout != self.strategy.layout.dims and dist.get_rank() == 0:
            logger.warning(
                "%s was saved with %s and this run has %s: it goes on from the same weights and data, with other "
                "mini-batches and random numbers than the saved run would have had",
                point.path,
                point.layout,
                self.strategy.layout,
            )
        return point.step

    def save_if_due(
        self,
        phase: str,
        step: int,
        last: int,
        stream: Stateful,
        reference: Frozen | None = None,
    ) -> None:
        """Writes a checkpoint after every `save_steps`-th and the `last` step of a phase. Collective.

        With `async_save` the step after next may find it being written; the next one, and the phase's end, wait for it.
        """
        if not self.every:
            return
        due = not step % self.every or step == last
        with self._advised(self._last_whole):
            self._settle(wait=due)
            if not due:
                return
            background = self.background and step != last
            draft = AtomicFolder(self.folder / f"{phase}-{step:06d}", self._group)
            with draft.writing() as folder:
                writings = [write_state(self.strategy.state, folder, background=background)]
                if isinstance(reference, RemoteReference):
                    reference.write(folder / "reference")
                elif reference is not None:
                    with consensus(self._group, "the job's checkpoints"):
                        if dist.get_rank() == 0:
                            (folder / "reference").mkdir()
                    with reference.loaded("parameters"):
                        writings.append(write_state(reference.state, folder / "reference", background=background))
                with consensus(self._group, "the job's checkpoints"):
                    self._write_own(folder, phase, step, stream)
                    writings[0].add_to_manifest(_random_file())
            self._pending = draft, writings
            self._settle(wait=not background)

    def _settle(self, *, wait: bool) -> None:
        """Makes the checkpoint that is being written whole: when all ranks have written, or, with `wait`, now."""
        if self._pending is None:
            return
        draft, writings = self._pending
        if not wait:
            done = torch.tensor([all(writing.done for writing in writings)], dtype=torch.int32)
            dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._group)
            if not done:
                return
        self._pending = None
        with draft.writing():
            for writing in reversed(writings):  # the job's own lists the manifest of its reference
                writing.finish()
        draft.commit()
        self.latest = draft.path
        if self.kept is not None and dist.get_rank() == 0:
            placed = sorted((place, path) for path in self.folder.iterdir() if (place := _place(path)) is not None)
            for _, old in placed[: -self.kept]:
                shutil.rmtree(old, ignore_errors=True)
                if old.exists():
                    logger.warning("%s could not be removed: it stays, and takes room", old)

    def _write_own(self, folder: Path, phase: str, step: int, stream: Stateful) -> None:
        """What the job adds to the strategy's files: random numbers of every rank, and where it is."""
        file = folder / _random_file()
        try:
            with file.open("wb") as output:
                torch.save(_random_states(), output)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file} cannot be written: {describe_cause(error)}") from None
        if dist.get_rank() == 0:
            layout = self.strategy.layout.to_dict()
            record = {"phase": phase, "step": step, "position": stream.state_dict(), "layout": layout}
            record["job"] = self._job
            write_text(folder / _RECORD, json.dumps(record, indent=1) + "\n")

    @contextlib.contextmanager
    def _advised(self, advice: Callable[[], str]) -> Iterator[None]:
        """Adds to what fails, the same on all ranks, how the run can go on."""
        try:
            yield
        except RollBatchingError as error:
            raise type(error)(f"{error}. {advice()}") from None

    def _last_whole(self) -> str:
        if self.latest is None:
            return "No checkpoint of this run is whole yet: it can only start anew"
        own = self.latest.resolve().parent == self.folder.resolve()
        return f"{self.latest} is whole: go on from it with resume_from_checkpoint={'true' if own else self.latest}"

    def _instead_of(self, point: SavedPoint) -> str:
        before = [
            (place, path) for path in point.path.parent.iterdir() if (place := _place(path)) and place < point.order
        ]
        for _, path in sorted(before, reverse=True):
            with contextlib.suppress(CheckpointError):
                check_files(path)
                return f"The checkpoint before it is whole: go on from it with resume_from_checkpoint={path}"
        return "No whole checkpoint lies before it: mend what is named, or start a new run"


# ---- finding


def _place(path: Path) -> tuple[int, int] | None:
    """Phase and step of a checkpoint by its name; None for anything else, half-written ones included."""
    match = _NAME.fullmatch(path.name)
    return (PHASES.index(match[1]), int(match[2])) if match and (path / _RECORD).is_file() else None


def _resumed(config: JobConfig, folder: Path) -> SavedPoint | None:
    """The point that `resume_from_checkpoint` names; None when the run that is to go on has saved none yet."""
    given = config.resume_from_checkpoint
    point = _find(folder if given is True else Path(str(given)), given)
    rl = config.task == "grpo"
    phases = {
        "warmup": (config.warmup is not None, "no warmup section"),
        "rl": (rl and config.max_steps > 0, "max_steps: 0" if rl else f"task: {config.task}"),
    }
    there, missing = (
        phases.get(point.phase, (config.task == point.phase, f"task: {config.task}")) if point else (True, "")
    )
    if point is not None and not there:
        raise CheckpointError(f"{point.path} is of the phase {point.phase}, and this configuration has {missing}")
    return point


def saved_point(path: Path) -> SavedPoint | None:
    """The checkpoint at `path`, or the latest of the run or of the folder of checkpoints there; None: there is none."""
    if (path / _RECORD).is_file():
        return _read(path)
    found = [(place, inside) for inside in _candidates(path) if (place := _place(inside)) is not None]
    return _read(max(found)[1]) if found else None


def _find(path: Path, given: bool | str) -> SavedPoint | None:
    point = saved_point(path)
    if point is not None:
        return point
    if given is True:
        if dist.get_rank() == 0:
            logger.warning("there is no checkpoint in %s: the run starts at the beginning", path)
        return None
    raise CheckpointError(
        f"resume_from_checkpoint: {path} is neither a checkpoint of a job nor a folder that holds some: name one, or "
        "use true for the run's own last one"
    )


def _candidates(path: Path) -> Iterator[Path]:
    for folder in (path, path / FOLDER):
        if folder.is_dir():
            yield from folder.iterdir()


def _read(path: Path) -> SavedPoint:
    file = path / _RECORD
    with explain_read_errors(file):
        record = json.loads(file.read_text(encoding="utf-8"))
        point = SavedPoint(path=path, **(record | {"layout": ParallelDims(**record["layout"])}))
        named = _NAME.fullmatch(path.name)
        if point.phase not in PHASES or type(point.step) is not int or point.step < 1:
            raise CheckpointError(f"{file} is not what was written: it has step {point.step!r} of {point.phase!r}")
        if named and (named[1], int(named[2])) != (point.phase, point.step):
            raise CheckpointError(
                f"{file} says step {point.step:,} of {point.phase}, and its folder is {path.name}: one of them is "
                "another checkpoint's"
            )
        return point


# ---- random numbers


def _random_file() -> str:
    return f"random-{dist.get_rank():05d}.pt"


def _random_states() -> dict[str, Any]:
    """This rank's generators as plain values: torch's, Megatron's, Python's and numpy's (a loss may draw from them)."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numbers = np.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": numbers,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    numbers = states["numpy"]
    numbers["state"]["key"] = np.array(numbers["state"]["key"], dtype=np.uint32)
    np.random.set_state(numbers)
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["megatron"])
