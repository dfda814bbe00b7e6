"""A step whose plan truncates samples equals a step on samples truncated before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.losses.steps import gap, make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

CAP = 24
LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "context 2": (2, {"context_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
}


def _cut(whole: Any) -> Any:
    from roll_batching.samples import SampleBatch

    columns = {}
    for name, spec in whole.schema.items():
        columns[name] = [row[:CAP] for row in whole.to_lists(name)] if spec.per_token else whole[name]
    return SampleBatch.from_lists(columns, whole.schema, ids=whole.ids.tolist())


def compared(megatron: dict[str, Any]) -> dict[str, Any]:
    """On a rank: how far the two steps are from each other, by aggregation, and what was truncated."""
    from dataclasses import replace

    from roll_batching.losses import PolicyLoss
    from roll_batching.planning import plan_step
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import mine
    from tests.support.models import random_batch

    strategy = make_strategy(megatron=megatron, cap=CAP)
    whole = random_batch(5, 12, 60)
    table = gather_lengths(mine(strategy, whole))
    constraints = replace(strategy.plan(gather_lengths(mine(strategy, _cut(whole)))).constraints, oversize="truncate")
    plan = plan_step(table.lengths, constraints, ids=table.ids, location=table.location)
    found = {}
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum"):
        loss = PolicyLoss(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
        found[aggregation] = gap(step(strategy, whole, loss, plan), step(strategy, _cut(whole), loss))
    return {"gaps": found, "truncated": plan.report.truncated}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_tokens_count_nowhere(layout):
    ranks, megatron = LAYOUTS[layout]
    for outcome in run_ranks(ranks, "tests.losses.test_truncation:compared", megatron):
        assert outcome["truncated"] > 2
        for aggregation, (loss, gradient) in outcome["gaps"].items():
            assert loss < 1e-5 and gradient < 1e-5, (aggregation, loss, gradient)
