"""`WorkerGroup`: a strategy whose ranks are actors of Ray, called with whole batches by your own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from roll_batching.errors import RankError, RollBatchingError
from roll_batching.jobs.config import WorkerConfig
from roll_batching.jobs.driver.batches import batch_of
from roll_batching.jobs.driver.columns import join, share_of
from roll_batching.jobs.driver.handout import Handout, Part, Station, call_ranks, hand_out, with_fields
from roll_batching.jobs.driver.rank import Role, StrategyRank
from roll_batching.jobs.launch.failures import Failure, told
from roll_batching.jobs.launch.on_ray.actors import Ranks, started
from roll_batching.jobs.launch.on_ray.cluster import room_for
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.planning import Plan, RolePlanner
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.samples.fields import SchemaLike


class WorkerGroup:
    """The ranks of one role, on the Ray that this process has joined (`ray.init`).

        with WorkerGroup(job.actor_train, 4, seed=job.seed) as policy:
            held = policy.hand_out(batch)
            held = policy.with_log_probs(held, "old_log_probs", masks=("response_mask",))
            result = policy.train_step(held, loss)

    What ranks do is `MegatronTrainStrategy`, call by call. They start in `with`, and are gone after it, after an error,
    and when this process ends, however it ends.

    Args:
        worker: the role's settings; its parallel sizes decide how `count` ranks are laid out.
        count: ranks, with a GPU each where Ray has GPUs, else with a CPU each.
        seed: of the weights, where they are random, and of dropout.
        temperature: logits are divided by it; rollouts should sample with the same.
        strategy: a class of your own instead of `MegatronTrainStrategy`, which it extends.
        variables: further environment variables of the ranks, such as `job.environment()`.
        folder: ranks keep logs in `folder/logs`; None for none but Ray's.

    Raises:
        LayoutError: when `count` ranks do not divide into replicas.
        RankError: what all ranks failed with alike, as for wrong samples; they can be called again.
        RollBatchingError: what else ended a rank; none is left then.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        count: int,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        strategy: type | None = None,
        variables: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        worker.strategy_args.strategy_config.parallel_dims(count)
        place = None if folder is None else Path(folder).resolve()
        self._role = Role(worker=worker, seed=seed, temperature=temperature, strategy=strategy, folder=place)
        self._count, self._variables = count, dict(variables or {})
        self._until_the_end = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self.stations: Sequence[Station] = ()
        """What each rank works on."""

    def __enter__(self) -> Self:
        import ray

        if not ray.is_initialized():
            raise RollBatchingError("a WorkerGroup needs a Ray that this process has joined: call ray.init() first")
        hide_known_warnings()  # what ranks return is of modules that import Megatron
        worker, end = self._role.worker, self._until_the_end
        tp_size = worker.strategy_args.strategy_config.tensor_model_parallel_size
        with end:
            room = end.enter_context(room_for(self._count, tp_size, worker.backend_timeout, lambda: False))
            assert room is not None, "nobody stops the wait"
            ranks = self._ranks = end.enter_context(started(room, self._variables, StrategyRank))
            places = self._heed(ranks.settle(room.seats))
            built = self._heed(ranks.ask("build", [(self._role, own) for own in places]))
            self.stations = [station for station, _ in built]
            self.planner: RolePlanner = built[0][1]
            """Makes the plans; pure, of no use to the ranks."""
            self._until_the_end = end.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._ranks is not None:
            self._ranks.ask("leave", [()] * self._count)
        self.close()

    def close(self) -> None:
        """Ends all ranks; returns when they are gone."""
        self._ranks = None
        self._until_the_end.close()

    @property
    def dp_size(self) -> int:
        """Replicas: the data-parallel size."""
        return self.planner.train.dp_size

    # ---- steps

    def plan(
        self,
        batch: SampleBatch,
        *,
        forward: bool = False,
        batch_balance: bool = False,
        group_ids: Any = None,
        home_rank: Any = None,
    ) -> Plan:
        """A plan over all samples of `batch`, made here.

        `forward` plans a pass without gradient. `batch_balance` first gives each replica as many samples, of near-equal
        cost, and then keeps them there: ROLL's way. Else the planner places them, which is better. `group_ids` and
        `home_rank` are those of `plan_step`.
        """
        table = LengthTable.of(batch)
        if batch_balance:
            home_rank = self.planner.balanced_homes(table)
        return self.planner.plan(table, forward=forward, group_ids=group_ids, home_rank=home_rank)

    def hand_out(self, batch: SampleBatch, plan: Plan | None = None) -> Handout:
        """Puts each replica's samples into the object store, once, with the plan (default: `plan(batch)`).

        Pass the result to as many calls as you like; it is freed when you drop it. Raises `DataError` for a plan that
        is not of this batch, or a batch without `input_ids`.
        """
        return hand_out(batch, self.plan(batch) if plan is None else plan, self.stations)

    def with_fields(self, held: Handout, fields: Mapping[str, Any], schema: SchemaLike) -> Handout:
        """`held` with fields that are known only now, such as advantages; what was handed out stays where it is.

        Args:
            held: what `hand_out` returned.
            fields: name to values, flat, in the order of the batch that was handed out.
            schema: name to kind or `FieldSpec`.
        """
        return with_fields(held, fields, schema)

    def train_step(self, held: Handout, loss: Any = None) -> Any:
        """One optimizer step over all samples: the `StepResult` of `MegatronTrainStrategy.train_step`."""
        return self._work(held, "train_step", (loss,))[0]

    def evaluate(self, held: Handout, loss: Any) -> dict[str, float]:
        """Loss and metrics without gradient; see `MegatronInferStrategy.evaluate`."""
        found: dict[str, float] = self._work(held, "evaluate", (loss,))[0]
        return found

    def compute_log_probs(self, held: Handout, masks: Sequence[str] | None = None) -> SampleBatch:
        """Log-probability of every token given those before it, in the order of the batch that was handed out.

        `masks`: fields that say which rows are wanted; the others read 0. So do samples that the plan dropped.
        """
        import ray

        made = ray.get(list(self._work(held, "compute_log_probs", (masks,))[1]))
        rows = np.argsort(held.ids, kind="stable")
        parts = []
        for dp_rank, columns in enumerate(made):
            ids, _ = share_of(held.plan, dp_rank)
            parts.append((columns, rows[np.searchsorted(held.ids, ids, sorter=rows)]))
        return batch_of(held.ids, held.lengths, join(parts, held.lengths))

    def with_log_probs(self, held: Handout, name: str, masks: Sequence[str] | None = None) -> Handout:
        """`held` with the policy's log-probs as its field `name`. They go from rank to rank, and never come here."""
        made = self._work(held, "compute_log_probs", (masks,), name=name)[1]
        return held.with_part(Part(names=frozenset({name}), objects=made))

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """`strategy.method(...)` on every rank, as `save(path)`; what it returns on rank 0."""
        return self._heed(self._alive().ask("do", [(method, arguments, keywords)] * self._count))[0]

    # ---- what ranks say

    def _work(
        self, held: Handout, method: str, arguments: tuple[Any, ...], *, name: str | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """What rank 0 says, and references of what each replica made."""
        ranks = self._alive()
        said, made = call_ranks(ranks.actors, self.stations, held, method, arguments, name=name)
        return self._heed(ranks.answers(said))[0], made

    def _alive(self) -> Ranks:
        if self._ranks is None:
            raise RollBatchingError(
                "this WorkerGroup has no ranks: call it inside of its `with`; after an error that ended them, make "
                "another and load a checkpoint"
            )
        return self._ranks

    def _heed(self, answers: list[Any]) -> list[Any]:
        """`answers`, unless a rank failed. What all ranks failed with alike leaves them as they were; else they end."""
        ranks = self._alive()
        if ranks.failure is None:
            return answers
        failures = [one for one in answers if isinstance(one, Failure)]
        if len(failures) == self._count and len({one.message for one in failures}) == 1 and not _broken(failures[0]):
            raise RankError(failures[0].message)
        failure, folder = ranks.failure, self._role.folder
        self.close()
        raise RollBatchingError(told(failure, folder))


def _broken(failure: Failure) -> bool:
    """Nobody knows what state the rank is in."""
    return bool(failure.frames) or failure.aftermath or failure.silent
