"""`run_on`: one pass of a whole batch by a model in any layout of the same processes, results in the caller's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import ARCHITECTURE, random_batch, worker_config
from tests.support.ranks import run_ranks

CAP = 96
OTHER_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
]


def _model(kind: Any, megatron: dict[str, Any], **model_args: Any) -> Any:
    from tests.support.models import fill

    config = worker_config("packed", CAP, architecture={**ARCHITECTURE, "num_layers": 4}, megatron=megatron)
    config = config.model_copy(update={"model_args": config.model_args.model_copy(update=model_args)})
    model = kind(config)
    model.initialize()
    fill(model.chunks, 61, model.layout.tp_rank, model.layout.tp_size)
    return model


def passes(other_layout: dict[str, Any]) -> dict[str, Any]:
    """Results for this rank's share of one batch, by the home model directly and through `run_on`."""
    from roll_batching.errors import LayoutError, RankError
    from roll_batching.samples import collect, distribute
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from roll_batching.strategy.roles import run_on

    home = _model(MegatronTrainStrategy, {})
    other = _model(MegatronInferStrategy, other_layout)
    critic = _model(MegatronInferStrategy, other_layout, value_head=True)
    whole = random_batch(5, 11, 40)
    batch = whole.select(torch.arange(home.layout.dp_rank, len(whole), 2).flip(0))
    plan = home.plan(home.gather_table(batch), forward=True)
    expected = collect(home.compute_log_probs(distribute(batch, plan), plan), plan, like=batch)
    expected = expected.select_ids(batch.ids)["log_probs"]
    results = run_on(other, batch, other.compute_log_probs, home)
    values = run_on(critic, batch, lambda local, plan: critic.forward(local, plan, ("values",)), home)

    table = home.gather_table(batch)
    halves = [home.plan(table.select(index), forward=True) for index in ([0, 1, 7], [2, 8])]
    some = run_on(home, batch, home.compute_log_probs, home, plans=halves)
    computed = torch.isin(batch.ids, torch.from_numpy(table.ids[[0, 1, 7, 2, 8]]))
    per_sample = some.to_lists("log_probs")

    def failing_plan(*arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            raise ValueError("an algorithm failed")
        return type(other).plan(other, *arguments, **options)

    other.plan = failing_plan
    with pytest.raises(RankError, match="an algorithm failed"):
        run_on(other, batch, other.compute_log_probs, home)
    if other_layout:
        with pytest.raises(LayoutError, match="leave out plans"):
            run_on(other, batch, other.compute_log_probs, home, plans=halves)
    return {
        "ids": torch.equal(results.ids, batch.ids) and torch.equal(some.ids, batch.ids),
        "log_probs": float((results["log_probs"] - expected).abs().max()),
        "size": float(expected.abs().max()),
        "values": values.to_lists("values"),
        "samples": batch.ids.tolist(),
        # A sample of one token predicts nothing.
        "computed": [bool(row.any()) for row in per_sample] == (computed & (batch.lengths > 1)).tolist(),
    }


@pytest.mark.parametrize("other_layout", OTHER_LAYOUTS, ids=["same layout", "TP2", "PP2"])
def test_results_of_any_layout_come_back_in_the_callers_order(other_layout: dict[str, Any], values_by_id: Any) -> None:
    ranks = run_ranks(2, "tests.strategy.test_roles:passes", other_layout)
    for outcome in ranks:
        assert outcome["ids"] and outcome["computed"]
        assert outcome["size"] > 1 and outcome["log_probs"] < 2e-5
        for sample, values in zip(outcome["samples"], outcome["values"], strict=True):
            known = values_by_id.setdefault(sample, values)
            assert values.any() or len(values) == 1, "a sample without values"
            assert (values - known).abs().max() < 2e-5


@pytest.fixture(scope="module")
def values_by_id() -> dict[int, Any]:
    """A critic's values of each sample, the same in all layouts."""
    return {}
