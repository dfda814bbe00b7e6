"""Adapters between strategies: copied into another layout with the weights, refused where one has none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.adapters import ALL
from tests.support.layouts import Layout
from tests.support.ranks import meet, run_ranks

HERE = "tests.strategy.test_adapter_resharding:"
SAMPLER = Layout(pp=2)


def copied(layout: Layout) -> tuple[float, float]:
    """Largest difference of adapters after a copy into `SAMPLER`, and of log-probs between the two."""
    import torch

    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.strategy.test_adapters import settings
    from tests.strategy.test_resharding import _crossed
    from tests.support.adapters import adapter_values
    from tests.support.models import fill, random_batch, worst_difference

    meet(0)
    role = settings(layout, "packed", ALL)
    policy = MegatronTrainStrategy(role)
    policy.initialize()
    fill(policy.chunks, 61, policy.layout.tp_rank, policy.layout.tp_size)
    sampled = settings(SAMPLER, "packed", ALL)
    other = MegatronInferStrategy(sampled.model_copy(update={"model_args": role.model_args}), seed=5)
    other.initialize(weights=False)
    with torch.no_grad():
        for chunk in other.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    other.copy_weights_from(policy)
    expected = adapter_values(policy.chunks, policy.layout.tp_rank)
    difference, _ = worst_difference(adapter_values(other.chunks, other.layout.tp_rank), expected)
    ours, theirs = _crossed(policy, other, random_batch(3, 11, 40))
    return difference, float((ours - theirs).abs().max())


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True)], ids=str)
def test_adapters_come_with_the_weights(layout: Layout, report: Any) -> None:
    for rank, (adapters, log_probs) in enumerate(run_ranks(2, f"{HERE}copied", layout)):
        report(f"rank {rank}: adapters {adapters:.1e}, log-probs {log_probs:.1e}")
        assert adapters == 0 and log_probs < 1e-5


def mismatched(_: None) -> list[str]:
    """Messages of copies between a model with adapters and one without, both ways, in two layouts."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.strategy.test_adapters import settings

    meet(0)
    role = settings(Layout(tp=2, sp=True), "packed", ALL)
    policy = MegatronTrainStrategy(role)
    policy.initialize()
    plain = role.model_args.model_copy(update={"lora_target": None})
    other = MegatronInferStrategy(settings(SAMPLER, "packed", ALL).model_copy(update={"model_args": plain}))
    other.initialize(weights=False)
    messages = []
    for target, source in ((other, policy), (policy, other)):
        try:
            target.copy_weights_from(source)
        except RollBatchingError as error:
            messages.append(str(error))
    return messages


@pytest.mark.bad_input
def test_a_model_without_adapters_is_another_model(report: Any) -> None:
    first, second = run_ranks(2, f"{HERE}mismatched")
    assert first == second
    report("; ".join(first))
    assert "adapter" in first[0] and "is not here" in first[0]
    assert "adapter" in first[1] and "is not in the other" in first[1]
