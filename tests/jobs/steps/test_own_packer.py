"""A packer of somebody's own that fails on one rank alone, or plans otherwise there: one error on all ranks."""

from __future__ import annotations

import pytest

from tests.jobs.rl.jobs import settings
from tests.support.ranks import run_ranks


def said_by_each(payload):
    """On a rank: what planned steps of texts and updates on rollouts end with, by the packer's mood."""
    import numpy as np
    import torch

    from roll_batching.errors import RankError
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.steps.planned_steps import Encoder, PlannedSteps
    from roll_batching.jobs.steps.update import train_on_rollouts
    from roll_batching.jobs.texts.texts import Document, TextDataset
    from roll_batching.jobs.texts.tokenizers import CharTokenizer
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.jobs.steps import own_packer

    strategy = MegatronTrainStrategy(JobConfig.model_validate(payload["job"]).actor_train, seed=1)
    strategy.initialize()
    encoder = Encoder(tokenizer=CharTokenizer("ab$", eos="$", pad="$"), max_length=40)
    texts = TextDataset([Document("b", "a" * n) for n in range(3, 11)])
    rows = [np.arange(n).tolist() for n in range(3, 11)]
    batch = SampleBatch.from_lists(
        {"input_ids": rows, "response_mask": [[1] * len(row) for row in rows]},
        {"input_ids": "token", "response_mask": "token"},
    )
    home = batch.select(torch.arange(strategy.layout.dp_rank, len(batch), 2))

    def planned_texts():
        next(PlannedSteps(texts, encoder, strategy, size=8, seed=1))

    def updates():
        list(train_on_rollouts(strategy, home, SFTLoss(), mini_batch_size=4, seed=1))

    said = {}
    acts = {act.__name__: act for act in (planned_texts, updates)}
    for mood, act in ((mood, acts[name]) for mood, name in payload["moods"]):
        own_packer.mood = mood
        try:
            act()
        except RankError as error:
            said[mood, act.__name__] = str(error)
    return said


@pytest.mark.bad_input
def test_a_packer_that_fails_or_differs_on_one_rank_is_one_error_on_all(tmp_path, report):
    packing = {"algorithm": "tests.jobs.steps.own_packer:pack", "max_packed_sequence_length_train": 64}
    job = settings(tmp_path, warmup=None, max_steps=1, actor_train__sequence_packing_args=packing)
    moods = [("fails", "planned_texts"), ("fails", "updates"), ("differs", "updates"), ("well", "updates")]
    one, other = run_ranks(2, "tests.jobs.steps.test_own_packer:said_by_each", {"job": job, "moods": moods}, timeout=60)
    assert one == other and len(one) == 3
    for act in ("planned_texts", "updates"):
        assert one["fails", act].startswith(
            "planning: rank 1: PlanError: algorithm='tests.jobs.steps.own_packer:pack' raised"
        )
        assert "FileNotFoundError: my table of costs" in one["fails", act]
    assert "ranks differ in the plan" in one["differs", "updates"]
    report(one["fails", "updates"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("mood", "act"),
    [("stuck", "updates"), pytest.param("stuck everywhere", "planned_texts", marks=pytest.mark.slow)],
)
def test_a_packer_that_never_returns_is_an_error_before_ranks_give_each_other_up(tmp_path, report, mood, act):
    packing = {"algorithm": "tests.jobs.steps.own_packer:pack", "max_packed_sequence_length_train": 64}
    job = settings(tmp_path, max_steps=1, actor_train__sequence_packing_args=packing, actor_train__backend_timeout=0.2)
    moods = [("well", "updates"), (mood, act), ("well", "updates")]
    one, other = run_ranks(2, "tests.jobs.steps.test_own_packer:said_by_each", {"job": job, "moods": moods}, timeout=90)
    assert one == other and len(one) == 1
    (words,) = one.values()
    report(words)
    assert "the packing algorithm 'tests.jobs.steps.own_packer:pack' has not returned after 0.16 minutes" in words
    assert words.startswith("planning: rank 1:" if mood == "stuck" else "planning: ranks 0, 1:"), words
