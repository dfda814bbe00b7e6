"""Non-finite numbers in every layout: a loss is an error that names its samples, a gradient skips the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.steps import make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_numbers:"
LAYOUTS = {
    "tensor 2, sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
    "context 2": (2, {"context_parallel_size": 2}),
    "data 2, distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "data 2, micro-batch mean, overlapped": (2, {"calculate_per_token_loss": False, "overlap_grad_reduce": True}),
}


def _batch(bad: bool) -> Any:
    from tests.support.models import random_batch

    data = random_batch(3, 9, 30)
    if not bad:
        return data
    values = torch.where(torch.arange(len(data)) == data.lengths.argmax(), float("nan"), data["advantages"])
    return data.with_fields({"advantages": values}, {"advantages": "sample"})


def _losses() -> dict[str, Any]:
    from roll_batching.losses import LossOutput, PolicyLoss

    class BySequence:
        masks = ("response_mask",)

        def sequence_loss(self, s: Any) -> Any:
            return LossOutput(s.mean(s.log_probs() * s["advantages"]))

    class Whole(BySequence):
        gather_cp = True

    class FiniteWithoutGradient:
        """The square root's slope at 0 is infinite: the loss is 0 and its gradient NaN, from one sample."""

        masks, needs = ("response_mask",), {"log_probs"}

        def token_loss(self, tokens: Any) -> Any:
            zero = torch.where(torch.isnan(tokens.per_token("advantages")), 0.0, 1.0)
            return LossOutput(tokens.mean((tokens.log_probs.square() * zero).sqrt()))

    return {"tokens": PolicyLoss(), "sequences": BySequence(), "whole": Whole(), "gradient": FiniteWithoutGradient()}


def weights(strategy: Any) -> float:
    from roll_batching.modeling.head import gpt_of

    return sum(float(p.detach().double().sum()) for c in strategy.chunks for p in gpt_of(c).parameters())


def attempt(megatron: dict[str, Any]) -> dict[str, Any]:
    from roll_batching.errors import LossError

    strategy, found = make_strategy(megatron=megatron), {}
    before = weights(strategy)
    for name, loss in _losses().items():
        try:
            result, _ = step(strategy, _batch(bad=True), loss)
            found[name] = (result.loss, result.skipped, strategy.skipped_steps)
        except LossError as error:
            found[name] = str(error)
        assert weights(strategy) == before, name
        good, gradients = step(strategy, _batch(bad=False), loss)
        assert not good.skipped and good.grad_norm > 0 and weights(strategy) != before, name
        found[f"{name} after"] = (good.loss, good.grad_norm)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_that_are_not_finite(layout: str) -> None:
    ranks, megatron = LAYOUTS[layout]
    outcomes = run_ranks(ranks, HERE + "attempt", megatron)
    assert all(outcome == outcomes[0] for outcome in outcomes), "every rank says the same"
    found = outcomes[0]
    data = _batch(bad=True)
    bad = int(data.ids[data.lengths.argmax()])
    for name in ("tokens", "sequences", "whole"):
        assert f"the loss is nan for sample {bad}:" in found[name]
    loss, skipped, count = found["gradient"]
    assert skipped and count == 1 and loss > 0


def far_apart(_: None) -> list[tuple[float, float, bool, dict[str, float]]]:
    """Steps on a batch in which one counted token's old log-prob is far off, under an advantage of -1."""
    from roll_batching.losses import PolicyLoss

    strategy, found = make_strategy(), []
    data = _batch(bad=False)
    longest = int(data.lengths.argmax())
    row = int(data.offsets[longest])
    mask, old = data["response_mask"].clone(), data["old_log_probs"]
    mask[row + 1] = True
    data = data.with_fields(
        {"response_mask": mask, "advantages": -torch.ones(len(data))},
        {"response_mask": "token", "advantages": "sample"},
    )
    for value in (-60.0, -120.0):
        values = old.clone()
        values[row] = value
        fields = {"old_log_probs": values, "ref_log_probs": values}
        rows = data.with_fields(fields, dict.fromkeys(fields, "next_token"))
        result, _ = step(strategy, rows, PolicyLoss(kl_coef=0.1))
        found.append((result.loss, result.grad_norm, result.skipped, result.metrics))
    return found


def test_an_old_log_prob_far_off_is_bounded_and_the_step_made() -> None:
    for loss, norm, skipped, metrics in run_ranks(1, HERE + "far_apart")[0]:
        assert 0 < loss < 1e9 and 0 < norm < 10 and not skipped
        assert 0 < metrics["ratio_bounded"] == metrics["ref_kl_bounded"] < 0.05
