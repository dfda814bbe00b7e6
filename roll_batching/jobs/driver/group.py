"""`WorkerGroup`: a strategy whose ranks are Ray actors, called with whole batches from your own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from roll_batching.errors import RankError, RollBatchingError
from roll_batching.jobs.config import WorkerConfig
from roll_batching.jobs.driver.columns import merge_shards, replica_samples
from roll_batching.jobs.driver.rank import StrategyRank, StrategySettings
from roll_batching.jobs.driver.shard_distribution import (
    DistributedBatch,
    FieldShards,
    RankLayout,
    call_ranks,
    distribute_batch,
    from_columns,
    with_fields,
)
from roll_batching.jobs.launch.failures import Failure, report_failure
from roll_batching.jobs.launch.on_ray.actors import RankActors, start_actors
from roll_batching.jobs.launch.on_ray.cluster import reserve_devices
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.planning import Plan, RolePlanner
from roll_batching.samples import LengthTable, SampleBatch, find_shared_prefixes
from roll_batching.samples.fields import SchemaLike


class WorkerGroup:
    """The ranks of one role, as actors of the Ray cluster that this process has joined (`ray.init`).

        with WorkerGroup(job.actor_train, 4, seed=job.seed) as policy:
            step = policy.distribute(batch)
            step = policy.with_log_probs(step, "old_log_probs", masks=("response_mask",))
            result = policy.train_step(step, loss)

    Each rank runs a `MegatronTrainStrategy`, call by call. Ranks start in `with`, and end after it, after an error that
    is not the same on all ranks, and with this process.

    Args:
        worker: the role's settings; its parallel sizes decide how `count` ranks are laid out.
        count: ranks, with one GPU each where Ray has GPUs, else one CPU each.
        seed: of random weights and dropout.
        temperature: divides logits; use the temperature of the rollouts.
        strategy: a subclass of `MegatronTrainStrategy` to use instead.
        variables: added to the ranks' environment, such as `job.environment()`.
        folder: ranks write logs to `folder/logs`; None: Ray's logs alone.

    Raises:
        LayoutError: when `count` ranks do not divide into replicas.
        RankError: the same error on all ranks, as for wrong samples; they can be called again.
        RollBatchingError: any other failure; all ranks have ended.
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
        parent = None if folder is None else Path(folder).resolve()
        self._settings = StrategySettings(
            worker=worker, seed=seed, temperature=temperature, strategy=strategy, folder=parent
        )
        self._count, self._variables = count, dict(variables or {})
        self._resources = contextlib.ExitStack()
        self._ranks: RankActors | None = None
        self.layouts: Sequence[RankLayout] = ()
        """The place of each rank in the parallel layout."""

    def __enter__(self) -> Self:
        import ray

        if not ray.is_initialized():
            raise RollBatchingError("a WorkerGroup needs a Ray that this process has joined: call ray.init() first")
        hide_known_warnings()  # unpickling results imports Megatron
        worker, resources = self._settings.worker, self._resources
        tp_size = worker.strategy_args.strategy_config.tensor_model_parallel_size
        with resources:
            reservation = resources.enter_context(
                reserve_devices(self._count, tp_size, worker.backend_timeout, lambda: False)
            )
            assert reservation is not None, "nothing stops the wait"
            ranks = self._ranks = resources.enter_context(start_actors(reservation, self._variables, StrategyRank))
            environments = self._check(ranks.prepare(reservation.ranks))
            built = self._check(ranks.call("build", [(self._settings, environment) for environment in environments]))
            self.layouts = [layout for layout, _ in built]
            self.planner: RolePlanner = built[0][1]
            """Plans in this process, without a process group."""
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._ranks is not None:
            self._ranks.call("leave_process_group", [()] * self._count)
        self.close()

    def close(self) -> None:
        """Ends all ranks; returns when they have ended."""
        self._ranks = None
        self._resources.close()

    @property
    def dp_size(self) -> int:
        """Data-parallel size: the number of replicas."""
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
        """Plans a step over all samples of `batch`, in this process.

        Args:
            batch: all samples of the step.
            forward: plan a pass without gradient.
            batch_balance: assign as many samples of near-equal cost to each replica first, as ROLL does. By default the
                planner places samples, which balances better.
            group_ids: as in `plan_step`.
            home_rank: as in `plan_step`.
        """
        table = LengthTable.of(batch)
        if self.planner.share_prefixes:
            table = find_shared_prefixes(batch, table)
        if batch_balance:
            home_rank = self.planner.balanced_homes(table)
        return self.planner.plan(table, forward=forward, group_ids=group_ids, home_rank=home_rank)

    def distribute(self, batch: SampleBatch, plan: Plan | None = None) -> DistributedBatch:
        """Puts each replica's samples into the object store, once, with the plan (default: `plan(batch)`).

        The result serves any number of calls and is freed when it is dropped. Raises `DataError` when plan and batch do
        not match, and for a batch without `input_ids`.
        """
        return distribute_batch(batch, self.plan(batch) if plan is None else plan, self.layouts)

    def with_fields(self, batch: DistributedBatch, fields: Mapping[str, Any], schema: SchemaLike) -> DistributedBatch:
        """`batch` with more fields, such as advantages; fields that it has are not sent again.

        Args:
            batch: from `distribute`.
            fields: name to flat values, in the order of the distributed batch.
            schema: name to kind or `FieldSpec`.
        """
        return with_fields(batch, fields, schema)

    def train_step(self, batch: DistributedBatch, loss: Any = None) -> Any:
        """One optimizer step over all samples: the `StepResult` of `MegatronTrainStrategy.train_step`."""
        return self._call_with_samples(batch, "train_step", (loss,))[0]

    def evaluate(self, batch: DistributedBatch, loss: Any) -> dict[str, float]:
        """Loss and metrics without gradient; see `MegatronInferStrategy.evaluate`."""
        metrics: dict[str, float] = self._call_with_samples(batch, "evaluate", (loss,))[0]
        return metrics

    def compute_log_probs(self, batch: DistributedBatch, masks: Sequence[str] | None = None) -> SampleBatch:
        """Log-prob of every token given its prefix, in the order of the distributed batch.

        `masks`: fields that select tokens; other tokens get 0, and so do samples that the plan dropped.
        """
        import ray

        computed = ray.get(list(self._call_with_samples(batch, "compute_log_probs", (masks,))[1]))
        by_id = np.argsort(batch.ids, kind="stable")  # ids need not be sorted; `searchsorted` needs an order
        shards = []
        for dp_rank, columns in enumerate(computed):
            ids, _ = replica_samples(batch.plan, dp_rank)
            shards.append((columns, by_id[np.searchsorted(batch.ids, ids, sorter=by_id)]))
        return from_columns(batch.ids, batch.lengths, merge_shards(shards, batch.lengths))

    def with_log_probs(
        self, batch: DistributedBatch, name: str, masks: Sequence[str] | None = None
    ) -> DistributedBatch:
        """`batch` with the policy's log-probs as field `name`, which go from rank to rank and not to this process."""
        computed = self._call_with_samples(batch, "compute_log_probs", (masks,), name=name)[1]
        return batch.with_shards(FieldShards(names=frozenset({name}), objects=computed))

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls `strategy.method(...)` on every rank, such as `save(path)`; returns rank 0's result."""
        return self._check(self._running().call("call", [(method, arguments, keywords)] * self._count))[0]

    # ---- results of ranks

    def _call_with_samples(
        self, batch: DistributedBatch, method: str, arguments: tuple[Any, ...], *, name: str | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Rank 0's result, and references of the columns that each replica computed."""
        ranks = self._running()
        results, columns = call_ranks(ranks.actors, self.layouts, batch, method, arguments, name=name)
        return self._check(ranks.results(results))[0], columns

    def _running(self) -> RankActors:
        if self._ranks is None:
            raise RollBatchingError(
                "this WorkerGroup has no ranks: call it inside of its `with`; after an error that ended them, make "
                "another and load a checkpoint"
            )
        return self._ranks

    def _check(self, results: list[Any]) -> list[Any]:
        """Returns `results` if no rank failed.

        Raises RankError for the same error on all ranks, which stay alive; else ends all ranks and raises
        RollBatchingError.
        """
        ranks = self._running()
        if ranks.failure is None:
            return results
        failures = [result for result in results if isinstance(result, Failure)]
        is_same_on_all = len(failures) == self._count and len({failure.message for failure in failures}) == 1
        # After a failure with frames, an aftermath or silence a rank may be in any state.
        if is_same_on_all and not (failures[0].frames or failures[0].aftermath or failures[0].silent):
            raise RankError(failures[0].message)
        failure, folder = ranks.failure, self._settings.folder
        self.close()
        raise RollBatchingError(report_failure(failure, folder))
