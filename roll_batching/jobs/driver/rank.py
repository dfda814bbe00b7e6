"""One rank of a `WorkerGroup`: an actor with its part of the model, which a user's own loop calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.config import WorkerConfig
from roll_batching.jobs.driver.columns import Column, Columns, replica_samples
from roll_batching.jobs.driver.shard_distribution import RankLayout
from roll_batching.jobs.launch.failures import Failure, describe_failure
from roll_batching.jobs.launch.logs import keep_log, write_to_log
from roll_batching.jobs.launch.on_ray.actors import Rank
from roll_batching.jobs.launch.rendezvous import rank_info
from roll_batching.planning import Plan, RolePlanner


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Arguments with which all ranks build the strategy."""

    worker: WorkerConfig
    seed: int
    temperature: float
    strategy: type | None
    """The strategy's class; None for `MegatronTrainStrategy`."""
    folder: Path | None
    """Parent of the ranks' logs; None for none."""


class StrategyRank(Rank):
    """One rank of the strategy. Becomes an actor."""

    def __init__(self, number: int, secrets: Mapping[str, str]) -> None:
        super().__init__(number, secrets)
        self._strategy: Any = None
        self._rendezvous: object = None

    def build(
        self, settings: StrategySettings, variables: Mapping[str, str]
    ) -> tuple[RankLayout, RolePlanner] | Failure:
        """Joins the rendezvous and builds this rank's part of the model. Returns a Failure instead of raising."""
        os.environ.update(variables)
        try:
            return self._build(settings)
        except BaseException as error:  # also SystemExit: every failure must reach the driver
            return self._failure(error)

    def _build(self, settings: StrategySettings) -> tuple[RankLayout, RolePlanner]:
        from roll_batching.jobs.launch.rendezvous import wait_for_ranks
        from roll_batching.known_warnings import hide_known_warnings
        from roll_batching.lifetime import forks_die_with_us

        info = rank_info()
        assert info is not None, "the variables name a rank"
        if settings.folder is not None:
            keep_log(settings.folder, info)
        forks_die_with_us()
        hide_known_warnings()
        self._rendezvous = wait_for_ranks(info, settings.worker.backend_timeout)
        from roll_batching.strategy import MegatronTrainStrategy

        strategy_class = settings.strategy or MegatronTrainStrategy
        self._strategy = strategy_class(settings.worker, seed=settings.seed, temperature=settings.temperature)
        self._strategy.initialize()
        parallel = self._strategy.layout
        layout = RankLayout(
            dp_rank=parallel.dp_rank,
            is_first_stage=parallel.pp_rank == 0,
            is_last_stage=parallel.is_last_stage,
            is_replica_leader=parallel.is_replica_leader,
        )
        return layout, self._strategy.planner

    def call_with_samples(
        self,
        method: str,
        arguments: tuple[Any, ...],
        name: str | None,
        origin: str,
        plan: Plan,
        *shards: Columns,
    ) -> tuple[Any, dict[str, Column] | None]:
        """Calls `strategy.method(this rank's samples, plan, *arguments)`; returns its result, and computed columns.

        Rank 0 returns the result, which is the same on all ranks; replica leaders return the columns of a result that
        is a batch, renamed to `name` if given; other ranks return None. Returns a Failure instead of raising.
        """
        from roll_batching.jobs.driver.shard_distribution import from_columns, to_columns
        from roll_batching.samples import SampleBatch

        try:
            layout = self._strategy.layout
            ids, lengths = replica_samples(plan, layout.dp_rank)
            columns = {field: column for shard in shards for field, column in shard.items()}
            local_batch = from_columns(ids, lengths, columns, origin)
            result = getattr(self._strategy, method)(local_batch, plan, *arguments)
            if isinstance(result, SampleBatch):
                computed = {name or field: column for field, column in to_columns(result).items()}
                return None, computed if layout.is_replica_leader else None
            return result if self.number == 0 else None, None
        except BaseException as error:
            return self._failure(error), None

    def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Calls `strategy.method(*arguments, **keywords)`. Returns the result on rank 0; a Failure if it raises."""
        try:
            result = getattr(self._strategy, method)(*arguments, **keywords)
            return result if self.number == 0 else None
        except BaseException as error:
            return self._failure(error)

    def leave_process_group(self) -> None:
        """Leaves the process group, after a loop without errors."""
        from roll_batching.distributed.parallel_layout import leave_processes

        leave_processes()

    def _failure(self, error: BaseException) -> Failure:
        """Describes `error`, writes it to this rank's log and returns it."""
        failure = describe_failure(self.number, error)
        write_to_log(failure.frames + failure.line)
        return failure
