"""An examination whose ranks are Ray actors, placed as those of a job are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.launch.failures import Failure, describe_failure
from roll_batching.jobs.launch.on_ray.actors import Rank, start_actors
from roll_batching.jobs.launch.on_ray.cluster import check_address, connected, reserve_devices
from roll_batching.known_warnings import hide_known_warnings

if TYPE_CHECKING:  # Megatron-Core warns when it is imported
    from roll_batching.tools.doctor.examination import Record

_MINUTES = 2.0
"""Longest wait for devices."""


class ExaminedRank(Rank):
    """One rank of an examination, as an actor."""

    def examine(self, variables: Mapping[str, str], folder: Path, full: bool) -> list[Record] | Failure:
        """Runs all checks; returns their records, or a Failure."""
        os.environ.update(variables)
        hide_known_warnings()
        from roll_batching.tools.doctor.examination import checks_of, examine, open_session

        try:
            session = open_session(folder, full=full)
            records = examine(session, checks_of(session.world_size, full=full))
            session.close()
            return records
        except BaseException as error:  # every failure must reach the command
            return describe_failure(self.number, error)


def examine_on_ray(count: int, folder: Path, *, full: bool, address: str) -> list[Record]:
    """Runs all checks on `count` ranks of the Ray at `address`; returns the records of rank 0.

    Raises ConfigError where there is no Ray, RollBatchingError when it has no room or a rank fails.
    """
    check_address(address)
    with (
        connected(address, max(count, os.cpu_count() or 1)),
        reserve_devices(count, 1, _MINUTES, lambda: False) as reservation,
    ):
        assert reservation is not None, "nothing stops the wait"
        with start_actors(reservation, {}, ExaminedRank) as ranks:
            environments = ranks.prepare(reservation.ranks)
            records: list[Any] = ranks.call("examine", [(variables, folder, full) for variables in environments])
            if ranks.failure is not None:
                raise RollBatchingError(ranks.failure.line)
            return list(records[0])
