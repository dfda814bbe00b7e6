"""Clip-Cov and KL-Cov: beside verl's functions, and the same tokens on one rank and on several.

The numbers were made once by running verl b178a3c, verl/trainer/ppo/core_algos.py, compute_policy_loss_clip_cov and
_kl_cov, in float64 on `waves.batch()`, padded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.losses.formulas import run
from tests.losses.waves import batch, figures, rows
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

ALONE = SimpleNamespace(host_group=None, is_replica_leader=True)


def on_policy() -> Any:
    """The batch with old log-probs equal to the current ones, by which verl selects."""
    return batch().with_fields({"old_log_probs": rows()[:, 0].clone()}, {"old_log_probs": "next_token"})


def test_clip_cov_excludes_the_tokens_that_verl_excludes() -> None:
    from roll_batching.losses import ClipCovLoss

    loss = ClipCovLoss(clip_low=0.2, clip_high=0.3, share=0.5, lowest=0.28, highest=0.8)
    marked = loss.prepare(on_policy(), ALONE, 0)
    assert int(marked["held_back"].sum()) == 9, "all of the range, which is less than half of all"
    assert figures(loss, marked) == pytest.approx((-0.302983459468, 0.115862075779, 0.121612231812), rel=1e-8)


def test_kl_cov_penalises_the_tokens_that_verl_penalises() -> None:
    from roll_batching.losses import KlCovLoss

    loss = KlCovLoss(share=0.2, penalty=0.7)
    held = loss.prepare(on_policy(), ALONE, 0)["held_back"]
    assert int(held.sum()) == 6
    marked = batch().with_fields({"held_back": held}, {"held_back": "next_token"})
    assert figures(loss, marked) == pytest.approx((-0.391977482219, 0.203457824681, 0.157896871485), rel=1e-8)
    assert run(loss, marked, rows=rows())[2]["held_back"] == pytest.approx(6 / 33)


def test_the_share_of_clip_cov_is_drawn_with_the_seed() -> None:
    from roll_batching.losses import ClipCovLoss

    loss = ClipCovLoss(share=0.1, lowest=-10, highest=10)
    drawn = [loss.prepare(batch(), ALONE, seed)["held_back"].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and sum(drawn[0]) == 3


def held_on_ranks(_: Any) -> list[list[int]]:
    """On a rank with every other sample: the selected positions of each loss, by sample."""
    from roll_batching.losses import ClipCovLoss, KlCovLoss
    from tests.losses.steps import make_strategy, mine

    strategy = make_strategy()
    home, layout = mine(strategy, batch()), strategy.layout
    found = []
    for loss in (ClipCovLoss(share=0.2, lowest=-10, highest=10), KlCovLoss(share=0.2)):
        held = loss.prepare(home, layout, 7).to_lists("held_back")
        places = zip(home.ids.tolist(), held, strict=True)
        found.append([1000 * sample + at for sample, row in places for at in torch.nonzero(row)[:, 0].tolist()])
    return found


def test_the_tokens_do_not_depend_on_where_the_samples_are() -> None:
    (alone,) = run_ranks(1, "tests.losses.test_covariance:held_on_ranks")
    parts = run_ranks(2, "tests.losses.test_covariance:held_on_ranks")
    for number, expected in enumerate(alone):
        assert len(expected) == 6
        assert sorted(part for rank in parts for part in rank[number]) == sorted(expected)


def test_samples_without_old_log_probs_are_an_error() -> None:
    from roll_batching.errors import DataError
    from roll_batching.losses import KlCovLoss

    with pytest.raises(DataError, match="set logprob_plan to train or own"):
        KlCovLoss().prepare(batch().without(["old_log_probs"]), ALONE, 0)
