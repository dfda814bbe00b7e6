"""Preference losses against their formulas, for any placement of the pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.losses.formulas import BINS, batch, close, formula, run

pytestmark = pytest.mark.loss

PAIRED = [[4, 2, 1, 0], [], [3, 5]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_equals_its_formula_for_any_placement_of_pairs(smoothing: float) -> None:
    from roll_batching.losses import DPOLoss

    data = whole_pairs()
    found = run(DPOLoss(beta=0.2, label_smoothing=smoothing), data, PAIRED)

    def join(rewards: list[Any]) -> Any:
        pairs = {}
        for i, reward in enumerate(rewards):
            pairs.setdefault(int(data["pair"][i]), {})[bool(data["chosen"][i])] = reward
        margins = torch.stack([p[True] - p[False] for p in pairs.values()])
        right, wrong = torch.log(torch.sigmoid(margins)), torch.log(torch.sigmoid(-margins))
        return -((1 - smoothing) * right + smoothing * wrong).mean()

    close(found, formula(data, lambda f, lp, h: 0.2 * (lp - f["ref_log_probs"]).sum(), join))
    again = run(DPOLoss(beta=0.2, label_smoothing=smoothing), data, [[0, 4], [5, 3], [1, 2]])
    close(again, found)


def test_metrics_of_dpo() -> None:
    from roll_batching.losses import DPOLoss

    data = whole_pairs()
    metrics = run(DPOLoss(beta=0.2), data, PAIRED)[2]
    rewards: list[Any] = []
    formula(
        data, lambda f, lp, h: 0.2 * (lp - f["ref_log_probs"]).sum(), lambda parts: rewards.extend(parts) or sum(parts)
    )
    values, chosen, pair = torch.stack(rewards).detach(), data["chosen"], data["pair"]
    order = torch.argsort(pair[chosen])
    liked, other = values[chosen][order], values[~chosen][torch.argsort(pair[~chosen])]
    assert metrics["chosen_reward"] == pytest.approx(float(liked.mean()))
    assert metrics["reward_margin"] == pytest.approx(float((liked - other).mean()))
    assert metrics["reward_accuracy"] == pytest.approx(float((liked > other).double().mean()))


def whole_pairs() -> Any:
    """Three pairs, every response with counted tokens."""
    data = batch().select([0, 2, 3, 4, 5, 6])
    every = torch.ones(data.num_tokens, dtype=torch.bool)
    return data.with_fields({"response_mask": every}, {"response_mask": "token"})


def test_an_incomplete_pair_is_an_error_before_the_step() -> None:
    from roll_batching.errors import DataError
    from roll_batching.losses import DPOLoss

    with pytest.raises(DataError, match="complete pairs.*group_ids="):
        run(DPOLoss(), whole_pairs(), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(DataError, match=r"samples \[10, 40\] have no counted response token"):
        run(DPOLoss(), batch(), [[0, 5, 1, 7], [2, 3, 4, 6]])
    with pytest.raises(DataError, match="sample field 'pair'"):
        run(DPOLoss(), batch().without(["pair"]), BINS)


@pytest.mark.parametrize("kind", ["token", "next_token"])
def test_dpo_counts_responses_by_the_kind_of_their_mask(kind: str) -> None:
    """Of samples of two tokens the second is predicted: at place 1 of a token field, and 0 of a next_token field."""
    from roll_batching.errors import DataError
    from roll_batching.losses import DPOLoss
    from roll_batching.samples import SampleBatch

    def data(place: int) -> SampleBatch:
        mask = torch.arange(2) == place
        return SampleBatch.from_lists(
            {"input_ids": [[3, 4], [3, 5]], "response_mask": [mask] * 2, "pair": [0, 0], "chosen": [True, False]},
            {"input_ids": "token", "response_mask": kind, "pair": "sample", "chosen": "sample"},
        )

    right = int(kind == "token")
    DPOLoss().check(data(right), [np.array([0, 1])])
    with pytest.raises(DataError, match=r"samples \[0, 1\] have no counted response token"):
        DPOLoss().check(data(1 - right), [np.array([0, 1])])
