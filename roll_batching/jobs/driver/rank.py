"""One rank of a strategy that somebody else's loop calls: an actor that holds its part of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.config import WorkerConfig
from roll_batching.jobs.driver.columns import Column, Columns, share_of
from roll_batching.jobs.driver.handout import Station
from roll_batching.jobs.launch.environment import rank_place
from roll_batching.jobs.launch.failures import Failure, describe
from roll_batching.jobs.launch.logs import keep_log, note
from roll_batching.jobs.launch.on_ray.rank import Rank
from roll_batching.planning import Plan, RolePlanner


@dataclass(frozen=True, kw_only=True)
class Role:
    """The strategy that all ranks build."""

    worker: WorkerConfig
    seed: int
    temperature: float
    strategy: type | None
    """A strategy's class; None for `MegatronTrainStrategy`."""
    folder: Path | None
    """Where ranks keep their logs."""


class StrategyRank(Rank):
    """To be made an actor. Its strategy is the one that jobs have."""

    def __init__(self, number: int, secrets: Mapping[str, str]) -> None:
        super().__init__(number, secrets)
        self._strategy: Any = None
        self._met: object = None

    def build(self, role: Role, variables: Mapping[str, str]) -> tuple[Station, RolePlanner] | Failure:
        """Meets the other ranks and builds this one's part of the model."""
        os.environ.update(variables)
        try:
            return self._build(role)
        except BaseException as error:  # whatever it was, it must reach the driver
            return self._failed(error)

    def _build(self, role: Role) -> tuple[Station, RolePlanner]:
        from roll_batching.jobs.launch.meeting import meet
        from roll_batching.known_warnings import hide_known_warnings
        from roll_batching.lifetime import forks_die_with_us

        place = rank_place()
        assert place is not None, "a rank has a place"
        if role.folder is not None:
            keep_log(role.folder, place)
        forks_die_with_us()
        hide_known_warnings()
        self._met = meet(place, role.worker.backend_timeout)
        from roll_batching.strategy import MegatronTrainStrategy

        kind = role.strategy or MegatronTrainStrategy
        self._strategy = kind(role.worker, seed=role.seed, temperature=role.temperature)
        self._strategy.initialize()
        layout = self._strategy.layout
        station = Station(
            dp_rank=layout.dp_rank,
            is_first_stage=layout.pp_rank == 0,
            is_last_stage=layout.is_last_stage,
            is_replica_leader=layout.is_replica_leader,
        )
        return station, self._strategy.planner

    def work(
        self,
        method: str,
        arguments: tuple[Any, ...],
        name: str | None,
        origin: str,
        plan: Plan,
        *parts: Columns,
    ) -> tuple[Any, dict[str, Column] | None]:
        """`strategy.method(this rank's samples, plan, *arguments)`: what it says, and columns of what it made.

        What is the same on all ranks is said by rank 0; columns, under `name` where it is one field, are made by the
        rank that reports for its replica. A Failure is said in place of what was raised.
        """
        from roll_batching.jobs.driver.batches import batch_of, columns_of
        from roll_batching.samples import SampleBatch

        try:
            layout = self._strategy.layout
            ids, lengths = share_of(plan, layout.dp_rank)
            columns = {name: column for part in parts for name, column in part.items()}
            local = batch_of(ids, lengths, columns, origin)
            result = getattr(self._strategy, method)(local, plan, *arguments)
            if isinstance(result, SampleBatch):
                made = columns_of(result)
                return None, {
                    name or field: column for field, column in made.items()
                } if layout.is_replica_leader else None
            return result if self.number == 0 else None, None
        except BaseException as error:
            return self._failed(error), None

    def do(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """`strategy.method(*arguments)`; what it returns, from rank 0. A Failure in place of what was raised."""
        try:
            result = getattr(self._strategy, method)(*arguments, **keywords)
            return result if self.number == 0 else None
        except BaseException as error:
            return self._failed(error)

    def leave(self) -> None:
        """Leaves the process group, at the end of a loop that went well."""
        from roll_batching.distributed.parallel_layout import leave_processes

        leave_processes()

    def _failed(self, error: BaseException) -> Failure:
        failure = describe(self.number, error)
        note(failure.frames + failure.line)
        return failure
