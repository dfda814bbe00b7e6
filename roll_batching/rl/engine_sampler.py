"""Rollouts by an engine: the model goes to it as a directory, prompts as token ids; token ids come back."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.config import JobConfig
from roll_batching.config.engine_rules import uses_engine
from roll_batching.config.engines import ENGINES
from roll_batching.data import SampleBatch
from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.engines.protocol import Answer, Engine, Question
from roll_batching.observe.metrics_file import Row
from roll_batching.rl.folder import folder_of
from roll_batching.rl.seeds import response_seed
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.generation import as_batch
from roll_batching.strategy.offload import Moved

logger = logging.getLogger(__name__)

WEIGHTS = "engine_weights"
"""Folder of the model directories that engines read, in the run's folder where the job names none."""
_VERSION = re.compile(r"\d{6,}")
_MARGIN = 60.0
"""Seconds that ranks may be apart beside what the engine takes."""


def weights_folder(config: JobConfig) -> Path:
    """Where the model directories of the job's engine lie."""
    folder = config.actor_infer.engine_args.weights_folder
    return folder_of(config) / WEIGHTS if folder is None else Path(folder) / config.exp_name


class EngineClient:
    """The engine that `actor_infer` names, asked by one rank of each replica of `layout`. Methods are collective.

    Engines of the job's own processes (hf_infer) answer and read weights on those ranks; servers are told of weights by
    rank 0. `asleep`: the engine sleeps already.
    """

    def __init__(self, config: JobConfig, layout: ParallelLayout, *, asleep: bool = False) -> None:
        role = config.actor_infer
        self.layout = layout
        self._own_model = role.strategy_args.strategy_name == "hf_infer"
        make = ENGINES.load(role.strategy_args.strategy_name)
        self.engine: Engine = make(role.engine_args, layout.device)
        self._replica = _replica_group(layout)
        self._asleep = asleep

    def load(self, path: Path, version: int) -> None:
        """The engine answers with the model directory at `path` from now on, and is awake.

        Raises RankError, the same on all ranks, where no replica takes it.
        """

        def load() -> tuple[str, ...]:
            if self._speaks:
                self.engine.update_weights(path.resolve(), version, asleep=self._asleep)
            return self.engine.live

        live = exchange(self.layout.host_group, "sending weights to the engine", load, patience=self._for_an_update)
        self.engine.use(live[0], version)
        self._asleep = False

    def sleep(self) -> None:
        """The engine gives its device memory back until the next `load`.

        Raises RankError, the same on all ranks, where no replica does.
        """
        with consensus(self.layout.host_group, "putting the engine to sleep", patience=self._for_an_update):
            if self._speaks:
                self.engine.sleep()
        self._asleep = True

    @property
    def asleep(self) -> bool:
        """Whether it must be loaded before it answers."""
        return self._asleep

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Responses to this replica's prompts, as `MegatronInferStrategy.generate` gives them.

        The ids of `prompts` and the settings' seed seed the draws, for engines that take a seed per request.
        """
        rows = [row for row in prompts.to_lists("input_ids") for _ in range(settings.num_return_sequences)]
        answers: list[Answer] = []
        most = (len(prompts) + 1) * settings.num_return_sequences  # ranks have as many prompts, or one more
        with consensus(self.layout.host_group, "rollouts", patience=self.engine.seconds_to_answer(most) + _MARGIN):
            if self.layout.reports and rows:
                answers = self.engine.generate(_questions(prompts, settings), settings)
        if self._replica is not None:
            box: list[Any] = [answers]
            group, source = self._replica
            dist.broadcast_object_list(box, src=source, group=group)
            answers = box[0]
        found = [(torch.tensor(one.tokens), torch.tensor(one.log_probs, dtype=torch.float32)) for one in answers]
        return as_batch([row.cpu() for row in rows], found)

    def figures(self) -> dict[str, float]:
        """What happened to this rank's requests since the last call. Not collective."""
        return self.engine.figures()

    @property
    def _for_an_update(self) -> float:
        """Seconds that the others wait for those who speak to the engine."""
        return self.engine.seconds_to_update() + _MARGIN

    @property
    def _speaks(self) -> bool:
        """Whether this rank tells the engine of weights."""
        return self.layout.reports if self._own_model else dist.get_rank() == 0


class EngineSampler(EngineClient):
    """The same on the ranks of a job, which write the model directories, and compare log-probs.

    `sleeps`: the engine sleeps, now and whenever it is told to rest.
    """

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool = False) -> None:
        super().__init__(config, strategy.layout, asleep=sleeps)
        self.strategy, self.gap_warning = strategy, config.actor_infer.engine_args.gap_warning
        self._folder = weights_folder(config)
        self._sleeps = sleeps
        self._version: int | None = None
        self._transfer_seconds = self._sleep_seconds = 0.0

    @property
    def moved(self) -> Moved:
        """Nothing: an engine makes room in its own ways."""
        return Moved()

    def update(self, version: int) -> None:
        """The engine answers with the strategy's weights from now on, which are those of `version`.

        Raises RankError, the same on all ranks, where the model cannot be written or no replica takes it.
        """
        if version == self._version and not self.asleep:
            return
        started = time.perf_counter()
        path = self._folder / f"{version:06d}"
        if version != self._version:
            self.strategy.export(path, replaces=lambda path: True)  # of a run that was interrupted
        self.load(path, version)
        self._forget(all_but=path)
        self._version = version
        self._transfer_seconds += time.perf_counter() - started

    def rest(self) -> None:
        """The model is about to train: an engine that shares its devices sleeps."""
        if self._sleeps and not self.asleep:
            started = time.perf_counter()
            self.sleep()
            self._sleep_seconds += time.perf_counter() - started

    def columns(self, home: SampleBatch) -> Row:
        """Of the rollouts `home`, and of what led to them.

        Where old log-probs are the trainer's own (`logprob_plan` train or own), `engine_gap_mean` and `engine_gap_max`
        are of |engine - trainer| log-prob per response token, `engine_kl` the mean of engine - trainer, which is the
        divergence of the trainer's policy from the engine's. Collective.
        """
        if self.strategy.batching.logprob_plan not in ("train", "own"):
            gap = torch.zeros(0)  # the trainer's own are not known
        else:
            ours, theirs = home["old_log_probs"].double(), home["rollout_log_probs"].double()
            mask = home["response_mask"].bool()
            rows = torch.cat([mask[1:], mask.new_zeros(min(1, len(mask)))])  # a prompt follows a sample's last row
            gap = (theirs - ours)[rows & (ours != 0)].cpu()  # samples that no plan held read 0
        mine = (len(gap), float(gap.sum()), float(gap.abs().sum()), float(gap.abs().max()) if len(gap) else 0.0)
        own = self.figures()
        parts = exchange(self.layout.host_group, "figures of the engine", lambda: (mine, own, self.layout.reports))
        parts = [part for part in parts if part[2]]
        row: Row = {"weights_seconds": self._transfer_seconds}
        if self._sleeps:
            row["engine_sleep_seconds"] = self._sleep_seconds
        self._transfer_seconds = self._sleep_seconds = 0.0
        row |= joined([figures for _, figures, _ in parts])
        tokens = sum(one[0] for one, _, _ in parts)
        if tokens:
            row["engine_kl"] = sum(one[1] for one, _, _ in parts) / tokens
            row["engine_gap_mean"] = sum(one[2] for one, _, _ in parts) / tokens
            row["engine_gap_max"] = max(one[3] for one, _, _ in parts)
            if row["engine_gap_mean"] > self.gap_warning and dist.get_rank() == 0:
                logger.warning(
                    "the engine's log-probs differ from the trainer's by %.4f per token in the mean (%.4f at most), "
                    "above actor_infer.engine_args.gap_warning = %g: see docs/rollout-engines.md",
                    row["engine_gap_mean"],
                    row["engine_gap_max"],
                    self.gap_warning,
                )
        return row

    def close(self) -> None:
        """The model directories are no longer needed."""
        self._forget()
        if dist.get_rank() == 0:
            with suppress(OSError):  # something else lies there
                self._folder.rmdir()

    def _forget(self, all_but: Path | None = None) -> None:
        """Removes model directories of earlier versions."""
        if dist.get_rank() == 0 and self._folder.is_dir():
            for older in self._folder.iterdir():
                if older != all_but and _VERSION.fullmatch(older.name):
                    shutil.rmtree(older, ignore_errors=True)


def joined(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An engine's figures from several who asked it, or who asked it several times."""
    names = figures[0] if figures else ()
    return {
        name: (min if name == "engine_replicas" else sum)(one[name] for one in figures)  # type: ignore[operator]
        for name in names
    }


@contextmanager
def engine_sampler(
    config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool
) -> Iterator[EngineSampler | None]:
    """The sampler of the engine that `config` names, for the block; `sleeps` as `EngineSampler` has it.

    None where the strategy's model samples itself, and where the process that draws ahead of training asks the engine.
    """
    if not uses_engine(config) or config.asynchronous:
        yield None
        return
    sampler = EngineSampler(config, strategy, sleeps=sleeps)
    try:
        yield sampler
    finally:
        sampler.close()


def _questions(prompts: SampleBatch, settings: GenerationSettings) -> list[Question]:
    group = settings.num_return_sequences
    return [
        Question(tokens=row.tolist(), seed=response_seed(settings.seed, number * group + member), group=number)
        for number, row in zip(prompts.ids.tolist(), prompts.to_lists("input_ids"), strict=True)
        for member in range(group)
    ]


def _replica_group(layout: ParallelLayout) -> tuple[Any, int] | None:
    """This replica's ranks on gloo, and the one that speaks for it; None where every rank is a replica."""
    places = exchange(layout.host_group, "the replicas", lambda: (layout.dp_rank, layout.reports))
    if len(places) == layout.dp_size:
        return None
    members = [[rank for rank, (dp, _) in enumerate(places) if dp == one] for one in range(layout.dp_size)]
    group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
    return group, next(rank for rank in members[layout.dp_rank] if places[rank][1])
