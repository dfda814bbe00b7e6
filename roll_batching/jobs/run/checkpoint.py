"""Checkpoints of a job: model and optimizer, data position, random numbers, and digests of the settings.

They lie in `checkpoints` of the run's folder, named by phase and step. A run that is killed and resumed from its last
checkpoint draws the same data and random numbers, and writes the same rows, as one that was never killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from roll_batching.jobs.run.checkpoint_names import FOLDER, NAME, PHASES, RECORD, checkpoint_order
from roll_batching.jobs.run.folder import PreviousRun
from roll_batching.jobs.run.job_digests import Digests, changes, check_tokenizer, digests_of, teacher_digests
from roll_batching.jobs.steps.passes import prefix_errors
from roll_batching.planning import ParallelDims
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
from roll_batching.strategy.checkpoint import check_saving, write_state
from roll_batching.strategy.checkpoint_files import check_files, describe_cause, explain_read_errors
from roll_batching.strategy.checkpoint_folder import PARTIAL, AtomicFolder, write_text
from roll_batching.strategy.checkpoint_writer import CheckpointWriter

logger = logging.getLogger(__name__)

CRITIC = "critic"
"""Folder of the critic's state in a checkpoint."""

Reference = MegatronInferStrategy | RemoteReference
"""A reference model, on this job's ranks or in its own processes."""


@dataclass(frozen=True, kw_only=True)
class SavedPoint:
    """Phase, step and data position of a checkpoint."""

    path: Path
    phase: str
    step: int
    """Last completed step of the phase."""
    position: dict[str, Any]
    """State of the phase's data stream and objective."""
    layout: ParallelDims
    """Parallel layout of the run that wrote it."""
    caps: Mapping[str, int] = field(default_factory=dict)
    """Caps of micro-batches that are `auto` in the run's settings, in tokens by dotted path."""
    job: Digests | None = field(default=None, repr=False)
    """Digests of the job that wrote it; None for a checkpoint of an earlier version."""

    @property
    def order(self) -> tuple[int, int]:
        """Later points of a run compare greater."""
        return PHASES.index(self.phase), self.step


class JobCheckpoints:
    """Writes the checkpoints of a run, and restores the one that it resumes from.

    Building it is collective and changes nothing in the folder. Raises RankError, the same on all ranks, when the job
    has `save_steps` and its model cannot be saved, or when `resume_from_checkpoint` names no checkpoint.
    """

    def __init__(self, config: JobConfig, strategy: MegatronTrainStrategy, inputs: JobInputs) -> None:
        self.config = config
        self.folder = config.run_folder / FOLDER
        self.strategy = strategy
        self.verify = config.verify_checkpoint
        self._job: Digests | None = None
        """On rank 0: digests of this job."""
        self._changed: list[str] = []
        """On rank 0: differences from the job that wrote the checkpoint, as clauses of a sentence."""
        self.save_steps = config.save_steps
        self.save_total_limit = config.save_total_limit
        self.async_save = config.async_save
        self.caps = config.resolved_caps
        """Resolved auto caps of the micro-batches that are formed now, for the checkpoints."""
        self.resumed: SavedPoint | None = None
        """The checkpoint that the run resumes from; None where it starts at the beginning."""
        self._group = strategy.layout.host_group
        is_compared = self.save_steps or config.resume_from_checkpoint
        teacher = teacher_digests(config, self._group) if is_compared else {}
        with consensus(self._group, "the job's checkpoints") as facts:
            if self.save_steps:
                check_saving(strategy.state)
            if config.resume_from_checkpoint:
                self.resumed = _resumed(config, self.folder)
            if dist.get_rank() == 0 and (self.save_steps or self.resumed is not None):
                self._job = digests_of(config, inputs, teacher)
                if self.resumed is not None and self.resumed.job is not None:
                    check_tokenizer(self.resumed.job, inputs.tokenizer, self.resumed.path)
                    self._changed = changes(self.resumed.job, self._job)
            facts.equal("the checkpoint to resume from", self.resumed, "Save to a file system that all machines share")
        self.latest = self.resumed.path if self.resumed is not None else None
        self._pending: tuple[AtomicFolder, list[CheckpointWriter]] | None = None

    @property
    def resume_after(self) -> tuple[str, int] | None:
        """Phase and step of the last row to keep; None if the run starts anew, or from another run's checkpoint."""
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
            place = checkpoint_order(path)
            if path.suffix == PARTIAL:
                shutil.rmtree(path)
            elif place is not None and (resumed is None or place > resumed.order):
                previous.move(path)

    def is_past(self, phase: str) -> bool:
        """Whether the resumed checkpoint is of a later phase, so that `phase` is skipped."""
        return self.resumed is not None and PHASES.index(self.resumed.phase) > PHASES.index(phase)

    def restore(
        self,
        phase: str,
        last: int,
        stream: Stateful,
        reference: Reference | None = None,
        critic: MegatronTrainStrategy | None = None,
    ) -> int:
        """Restores models, optimizers, data position and random numbers; returns the completed steps of `phase`.

        Does nothing and returns 0 when the run does not resume inside this phase. Call it when everything that draws
        random numbers is built and the phase's optimizer is new. Collective. Raises CheckpointError when the checkpoint
        is beyond `last`, the phase's number of steps.
        """
        point = self.resumed
        if point is None or point.phase != phase:
            return 0
        if point.step > last:
            raise CheckpointError(
                f"{point.path} is at step {point.step:,} of {phase}, which has {last:,} steps here: raise "
                f"{steps_key(self.config, phase)}"
            )
        with consensus(self._group, "the job's checkpoints"):
            stream.load_state_dict(point.position)
        with self._with_advice(lambda: self._advise_earlier(point)):
            self.strategy.load(point.path, verify=self.verify)
            if isinstance(reference, RemoteReference):
                reference.load(point.path / "reference")
            elif reference is not None and reference.has_own_weights:
                with prefix_errors("reference"):
                    reference.load(point.path / "reference", verify=self.verify)
            if critic is not None:
                with prefix_errors(CRITIC):
                    critic.load(point.path / CRITIC, verify=self.verify)
            with consensus(self._group, "the job's checkpoints"):
                if point.layout == self.strategy.layout.dims:
                    with explain_read_errors(point.path / _random_file()):
                        _set_random_states(torch.load(point.path / _random_file(), weights_only=True))
        if self._changed:
            logger.warning(
                "%s: the run continues with changes since it was saved: %s", point.path, "; ".join(self._changed)
            )
        if point.layout != self.strategy.layout.dims and dist.get_rank() == 0:
            logger.warning(
                "%s was saved with %s and this run has %s: it continues from the same weights and data, with other "
                "mini-batches and random numbers than the saved run",
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
        reference: Reference | None = None,
        critic: MegatronTrainStrategy | None = None,
    ) -> None:
        """Write a checkpoint after every `save_steps`-th and the `last` step of a phase. Collective.

        With `async_save` it is written while training continues; the next checkpoint, and the phase's end, wait for it.
        """
        if not self.save_steps:
            return
        due = not step % self.save_steps or step == last
        with self._with_advice(self._advise_latest):
            self._finish_pending(wait=due)
            if not due:
                return
            async_save = self.async_save and step != last
            draft = AtomicFolder(self.folder / f"{phase}-{step:06d}", self._group)
            with draft.writing() as folder:
                writings = [write_state(self.strategy.state, folder, background=async_save)]
                if critic is not None:
                    writings.append(write_state(critic.state, self._subfolder(folder, CRITIC), background=async_save))
                if isinstance(reference, RemoteReference):
                    reference.write(folder / "reference")
                elif reference is not None and reference.has_own_weights:
                    below = self._subfolder(folder, "reference")
                    with reference.loaded("parameters"):
                        writings.append(write_state(reference.state, below, background=async_save))
                with consensus(self._group, "the job's checkpoints"):
                    self._write_job_files(folder, phase, step, stream)
                    writings[0].add_to_manifest(_random_file())
            self._pending = draft, writings
            self._finish_pending(wait=not async_save)

    def _subfolder(self, folder: Path, name: str) -> Path:
        """Make the folder of another model's state in that of a checkpoint. Collective."""
        with consensus(self._group, "the job's checkpoints"):
            if dist.get_rank() == 0:
                (folder / name).mkdir()
        return folder / name

    def _finish_pending(self, *, wait: bool) -> None:
        """Complete the pending checkpoint once all ranks have written; with `wait`, wait for them."""
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
            for writing in reversed(writings):  # the job's manifest lists those of its reference and critic
                writing.finish()
        draft.commit()
        self.latest = draft.path
        if self.save_total_limit is not None and dist.get_rank() == 0:
            by_age = sorted(
                (place, path) for path in self.folder.iterdir() if (place := checkpoint_order(path)) is not None
            )
            for _, old in by_age[: -self.save_total_limit]:
                shutil.rmtree(old, ignore_errors=True)
                if old.exists():
                    logger.warning("%s could not be removed (save_total_limit): remove it to free its disk space", old)

    def _write_job_files(self, folder: Path, phase: str, step: int, stream: Stateful) -> None:
        """Write the job's own files: random states of every rank, and the record of phase, step and position."""
        file = folder / _random_file()
        try:
            with file.open("wb") as output:
                torch.save(_random_states(), output)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file} cannot be written: {describe_cause(error)}") from None
        if dist.get_rank() == 0:
            layout = self.strategy.layout.to_dict()
            record = {"phase": phase, "step": step, "position": stream.state_dict(), "layout": layout}
            record |= {"caps": dict(self.caps), "job": self._job}
            write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")

    @contextlib.contextmanager
    def _with_advice(self, advice: Callable[[], str]) -> Iterator[None]:
        """Append to an error, which is the same on all ranks, how the run can continue."""
        try:
            yield
        except RollBatchingError as error:
            raise type(error)(f"{error}. {advice()}") from None

    def _advise_latest(self) -> str:
        if self.latest is None:
            return "This run has no complete checkpoint yet: start it again from the beginning"
        is_own = self.latest.resolve().parent == self.folder.resolve()
        return f"{self.latest} is complete: resume with resume_from_checkpoint={'true' if is_own else self.latest}"

    def _advise_earlier(self, point: SavedPoint) -> str:
        before = [
            (place, path)
            for path in point.path.parent.iterdir()
            if (place := checkpoint_order(path)) and place < point.order
        ]
        for _, path in sorted(before, reverse=True):
            with contextlib.suppress(CheckpointError):
                check_files(path)
                return f"The checkpoint before it is complete: resume with resume_from_checkpoint={path}"
        return "No earlier checkpoint is complete: repair the named file, or start a new run"


def _resumed(config: JobConfig, folder: Path) -> SavedPoint | None:
    """Finds the checkpoint of `resume_from_checkpoint`; None for `true` when the run has no checkpoint yet."""
    setting = config.resume_from_checkpoint
    place = folder if setting is True else Path(str(setting))
    point = saved_point(place)
    if point is None and setting is not True:
        raise CheckpointError(
            f"resume_from_checkpoint: {place} is neither a checkpoint of a job nor a folder with checkpoints: name "
            "one, or set true for the run's own last one"
        )
    if point is None and dist.get_rank() == 0:
        logger.warning("there is no checkpoint in %s: the run starts at the beginning", place)
    rl = not config.is_supervised
    phases = {
        "warmup": (config.warmup is not None, "no warmup section"),
        "rl": (rl and config.max_steps > 0, "max_steps: 0" if rl else f"task: {config.task}"),
    }
    if point is not None:
        has_phase, reason = phases.get(point.phase, (config.task == point.phase, f"task: {config.task}"))
        if not has_phase:
            raise CheckpointError(
                f"{point.path} is of the phase {point.phase}, and this configuration has {reason}: change that, or "
                "name another checkpoint in resume_from_checkpoint"
            )
    return point


def saved_point(path: Path) -> SavedPoint | None:
    """Reads the checkpoint at `path`, or the latest in that folder of a run or of checkpoints; None without any."""
    if (path / RECORD).is_file():
        return _read(path)
    folders = (folder for folder in (path, path / FOLDER) if folder.is_dir())
    children = (child for folder in folders for child in folder.iterdir())
    checkpoints = [(place, child) for child in children if (place := checkpoint_order(child)) is not None]
    return _read(max(checkpoints)[1]) if checkpoints else None


def _read(path: Path) -> SavedPoint:
    file = path / RECORD
    with explain_read_errors(file):
        record = json.loads(file.read_text(encoding="utf-8"))
        point = SavedPoint(path=path, **(record | {"layout": ParallelDims(**record["layout"])}))
        named = NAME.fullmatch(path.name)
        if point.phase not in PHASES or type(point.step) is not int or point.step < 1:
            raise CheckpointError(
                f"{file} is malformed: it has step {point.step!r} of {point.phase!r}; copy the checkpoint again, or "
                "name another one"
            )
        if named and (named[1], int(named[2])) != (point.phase, point.step):
            raise CheckpointError(
                f"{file} says step {point.step:,} of {point.phase}, and its folder is {path.name}: the file or the "
                "folder's name is another checkpoint's"
            )
        return point


def _random_file() -> str:
    return f"random-{dist.get_rank():05d}.pt"


def _random_states() -> dict[str, Any]:
    """This rank's generator states as plain data: torch, Megatron, Python and numpy (a loss may draw from any)."""
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
