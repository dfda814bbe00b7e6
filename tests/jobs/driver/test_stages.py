"""Pipeline stages that get only the fields they read compute the same as with all fields."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")


def both_ways(_: Any) -> list[tuple[Any, ...]]:
    """(loss, gradient norm, metrics, sum of log-probs, loss of `evaluate`): all ranks have all fields, or what they
    read."""
    from dataclasses import replace

    from roll_batching.losses import LossOutput, SFTLoss
    from roll_batching.samples import LengthTable
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, random_batch, worker_config

    class Divided(SFTLoss):
        """By a sum that is negative, and that every stage hears of."""

        sums = ("advantages",)

        def token_loss(self, tokens: Any) -> LossOutput:
            found = super().token_loss(tokens)
            return LossOutput(found.loss / tokens.total("advantages"), found.metrics)

    layers = {"pipeline_model_parallel_size": 3}
    config = worker_config("packed", 64, megatron=layers, architecture={**ARCHITECTURE, "num_layers": 3})
    found = []
    for handed in (False, True):
        strategy = MegatronTrainStrategy(config)
        strategy.initialize()
        fill(strategy.chunks, 61)
        batch = random_batch(8, 9, 40)
        batch = batch.with_fields({"advantages": -batch["advantages"].abs() - 1}, {"advantages": "sample"})
        plan = strategy.plan(LengthTable.of(batch))
        local = plan.shard(batch, 0)
        if handed:
            reads = [["input_ids"], [], list(local.schema)][strategy.layout.pp_rank]
            local = replace(local.only(reads), origin="one step")
        log_probs = strategy.compute_log_probs(local, plan)["log_probs"].sum().item()
        value = strategy.evaluate(local, plan, Divided())["loss"]
        step = strategy.train_step(local, plan, Divided())
        found.append((step.loss, step.grad_norm, step.metrics, log_probs, value))
    return found


def test_stages_that_have_what_they_read_compute_the_same_bits():
    for rank in run_ranks(3, "tests.jobs.driver.test_stages:both_ways"):
        whole, handed = rank
        assert whole == handed
        assert whole[0] < 0 and whole[0] == pytest.approx(whole[-1])
