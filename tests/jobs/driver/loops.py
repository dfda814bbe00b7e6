"""A driver whose ranks first raise a common error, then train endlessly: `-m tests.jobs.driver.loops FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from examples.ray_driver import POLICY, advantages, rollouts
from roll_batching.errors import DataError, RankError
from roll_batching.jobs.driver.group import WorkerGroup
from roll_batching.losses import SFTLoss


def main(folder: Path) -> None:
    strategy = POLICY.strategy_args
    flat = strategy.strategy_config.model_copy(update={"tensor_model_parallel_size": 1})
    worker = POLICY.model_copy(update={"strategy_args": strategy.model_copy(update={"strategy_config": flat})})
    ray.init("local", num_cpus=2, object_store_memory=200_000_000, include_dashboard=False)
    with WorkerGroup(worker, 2, seed=5, folder=folder) as policy:
        batch = rollouts(0)
        try:
            policy.train_step(policy.distribute(batch.without("response_mask")), SFTLoss())
        except RankError as error:
            print(f"all ranks: {error}", flush=True)
        try:
            policy.distribute(batch, policy.plan(rollouts(1)))
        except DataError as error:
            print(f"here: {error}", flush=True)
        while True:
            plan = policy.plan(batch, batch_balance=True)
            step = policy.distribute(batch, plan)
            step = policy.with_fields(step, {"advantages": advantages(batch)}, {"advantages": "token"})
            print(f"counts {[len(plan.rank_samples(rank)) for rank in range(2)]}", flush=True)
            print(f"loss {policy.train_step(step, SFTLoss()).loss}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
