"""An engine as its askers see it: prompts go to it as token ids, and token ids come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import reads_engine_log_probs, wrong_log_probs
from roll_batching.jobs.config.engines import ENGINES
from roll_batching.jobs.engines.protocol import Answer, Engine, Question, ServerProcess
from roll_batching.jobs.seeds import response_seed
from roll_batching.samples import SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.generation import responses_to_batch

_MARGIN = 60.0
"""Seconds that ranks may be apart beside what the engine takes."""


class EngineClient:
    """The engine that `actor_infer` names, asked by one rank of each replica of `layout`. Methods are collective.

    Engines of the job's own processes (hf_infer) answer and read weights on those ranks; servers are told of weights by
    rank 0. `asleep`: the engine sleeps already.
    """

    def __init__(self, config: JobConfig, layout: ParallelLayout, *, asleep: bool = False) -> None:
        role = config.actor_infer
        self.config, self.layout = config, layout
        self._own_model = role.strategy_args.strategy_name == "hf_infer"
        make = ENGINES.load(role.strategy_args.strategy_name)
        self.engine: Engine = make(role.engine_args, layout.device)
        self._replica = _replica_group(layout)
        self._asleep = asleep

    def load(self, path: Path, version: int) -> None:
        """The engine answers with the model directory at `path` from now on, and is awake.

        Raises RankError, the same on all ranks, where no replica takes it.
        """

        def load() -> Mapping[str, ServerProcess | None]:
            if self._speaks:
                self.engine.update_weights(path.resolve(), version, asleep=self._asleep)
                self._check_log_probs()
            return self.engine.live

        live = exchange(self.layout.host_group, "sending weights to the engine", load, patience=self.patience)
        self.loaded(live[0], version)

    def _check_log_probs(self) -> None:
        """Raises EngineError where the loss reads log-probs of servers that were started so that it cannot."""
        if not reads_engine_log_probs(self.config):
            return
        for url, process in self.engine.live.items():
            wrong = None if process is None else wrong_log_probs(self.config, process.logprobs_mode)
            if wrong is not None:
                raise EngineError(
                    f"{url}: {wrong}. Start the server with another --logprobs-mode: logprob_plan: rollout and "
                    "engine_ratio_cap have the loss read its log-probs"
                )

    def loaded(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """These replicas have the weights of `version`, and are awake."""
        self.engine.use(live, version)
        self._asleep = False

    def sleep(self) -> None:
        """The engine gives its device memory back until the next `load`.

        Raises RankError, the same on all ranks, where no replica does.
        """
        with consensus(self.layout.host_group, "putting the engine to sleep", patience=self.patience):
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
            if self.layout.is_replica_leader and rows:
                answers = self.engine.generate(_questions(prompts, settings), settings)
        if self._replica is not None:
            box: list[Any] = [answers]
            group, source = self._replica
            dist.broadcast_object_list(box, src=source, group=group)
            answers = box[0]
        found = [(torch.tensor(one.tokens), torch.tensor(one.log_probs, dtype=torch.float32)) for one in answers]
        return responses_to_batch([row.cpu() for row in rows], found)

    def figures(self) -> dict[str, float]:
        """What happened to this rank's requests since the last call. Not collective."""
        return self.engine.figures()

    @property
    def patience(self) -> float:
        """Seconds that the others wait for those who give weights to the engine, or put it to sleep."""
        return self.engine.seconds_to_update() + _MARGIN

    @property
    def _speaks(self) -> bool:
        """Whether this rank tells the engine of weights."""
        return self.layout.is_replica_leader if self._own_model else dist.get_rank() == 0


def joined(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """An engine's figures from several who asked it, or who asked it several times."""
    names = figures[0] if figures else ()
    return {
        name: (min if name == "engine_replicas" else sum)(one[name] for one in figures)  # type: ignore[operator]
        for name in names
    }


def _questions(prompts: SampleBatch, settings: GenerationSettings) -> list[Question]:
    group = settings.num_return_sequences
    return [
        Question(tokens=row.tolist(), seed=response_seed(settings.seed, number * group + member), group=number)
        for number, row in zip(prompts.ids.tolist(), prompts.to_lists("input_ids"), strict=True)
        for member in range(group)
    ]


def _replica_group(layout: ParallelLayout) -> tuple[Any, int] | None:
    """This replica's ranks on gloo, and the one that speaks for it; None where every rank is a replica."""
    places = exchange(layout.host_group, "the replicas", lambda: (layout.dp_rank, layout.is_replica_leader))
    if len(places) == layout.dp_size:
        return None
    members = [[rank for rank, (dp, _) in enumerate(places) if dp == one] for one in range(layout.dp_size)]
    group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
    return group, next(rank for rank in members[layout.dp_rank] if places[rank][1])
