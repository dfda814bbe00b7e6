"""A loss in one file of a user's own, with settings of its own, named in YAML: a change from outside."""

from __future__ import annotations

import json

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.objectives.from_config import advantages_of, loss_of
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

OWN = "tests.jobs.rl.own_loss:"
PATH = OWN + "ClippedWeights"


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    return tmp_path


def job(folder, loss=PATH, **changes):
    base = {"warmup": None, "eval_samples": 0, "reward_function": "tests.jobs.rl.jobs:length", "loss_function": loss}
    return settings(folder, **base, **changes)


def train(payload):
    """On a rank: the whole job, from its file; of every micro-batch the values that the loss's metrics are made of."""
    from roll_batching.jobs.job import run_job
    from tests.jobs.rl.own_loss import ClippedWeights

    seen, token_loss = [], ClippedWeights.token_loss

    def recorded(self, tokens):
        mask = tokens.mask()
        seen.append((tokens["rollout_log_probs"][mask].tolist(), tokens.per_token("rewards")[mask].tolist()))
        return token_loss(self, tokens)

    ClippedWeights.token_loss = recorded
    try:
        run_job(load_config(payload))
    finally:
        ClippedWeights.token_loss = token_loss
    return seen


def written(folder, **changes):
    file = folder / "job.yaml"
    file.write_text(json.dumps(job(folder, **changes), indent=1))  # JSON is YAML
    return str(file)


def test_it_trains_with_its_settings_and_every_kind_of_metric_reaches_the_rows(folder):
    """Two ranks, two optimizer steps per row, several micro-batches: what a row holds follows the kind alone."""
    file = written(
        folder,
        max_steps=1,
        loss_args={"largest": 3, "shares": [1, 2]},
        actor_train__sequence_packing_args__max_packed_sequence_length_train=64,
    )
    seen = [part for rank in run_ranks(2, "tests.jobs.rl.test_own_loss:train", file) for part in rank]
    (row,) = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    drawn = [value for part, _ in seen for value in part]
    rewards = [value for _, part in seen for value in part]
    assert len(seen) > 4 and row["micro_batches"] > 1
    assert row["own/tokens"] == row["own/tokens_max"] == len(drawn)
    assert row["own/reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)
    assert row["own/drawn"] == pytest.approx(sum(drawn) / len(drawn), rel=1e-5)
    assert (row["own/highest"], row["own/lowest"]) == (max(drawn), min(drawn))
    assert (row["own/setting"], row["own/is_float"], row["own/shares"], row["own/is_tuple"]) == (3.0, 1.0, 2.0, 1.0)
    assert row["grad_norm"] > 0 and "clip_fraction" not in row


def test_settings_of_the_policy_loss_that_have_no_key(folder):
    given = {"engine_ratio_cap": 2.0, "sample_weights": "rewards"}
    run_ranks(1, "tests.jobs.rl.test_own_loss:train", written(folder, loss="policy", max_steps=1, loss_args=given))
    (row,) = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    assert row["engine_ratio"] == pytest.approx(1.0, abs=1e-3), "rollouts and training have the same numbers"
    assert row["grad_norm"] > 0


def test_an_estimator_of_ones_own(folder):
    run_ranks(2, "tests.jobs.rl.test_own_loss:train", written(folder, max_steps=1, adv_estimator=OWN + "ranks"))
    (row,) = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    assert row["grad_norm"] > 0


WRONG = {
    "unknown": ({"loss_args": {"larges": 1.0}}, ["loss_args.larges: unknown setting; did you mean 'largest'?"]),
    "kind": ({"loss_args": {"largest": "high"}}, ["loss_args.largest: input should be a valid number, got 'high'"]),
    "in a list": (
        {"loss_args": {"shares": [1, 0.5]}},
        ["loss_args.shares.1: input should be a valid integer, got 0.5"],
    ),
    "refused": ({"loss_args": {"largest": -1.0}}, ["loss_args: ", "largest is -1.0; give a positive number"]),
    "missing": ({"loss": OWN + "NoLoss"}, ["loss_args.weight: is missing"]),
    "no loss": ({"loss": OWN + "NoLoss", "loss_args": {"weight": 1}}, ["loss_function: ", "neither token_loss nor"]),
    "no module": ({"loss": "nowhere.at_all:Loss"}, ["loss_function: ", "No module named 'nowhere'"]),
    "no name": ({"loss": OWN + "Nothing"}, ["loss_function: ", "has no 'Nothing'"]),
    "exit": ({"loss": OWN + "Leaves"}, ["loss_args: ", "SystemExit"]),
    "no estimator": ({"adv_estimator": OWN + "Nothing"}, ["adv_estimator: ", "has no 'Nothing'"]),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_key_and_line(folder, name, report):
    changes, words = WRONG[name]
    config = load_config(written(folder, **changes))
    with pytest.raises(ConfigFileError) as caught:
        loss_of(config), advantages_of(config)
    said = str(caught.value)
    assert all(word in said for word in (*words, "job.yaml:")), said
    report(f"{name}: {said.splitlines()[-1].strip()}")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_args": {"larges": 1.0}}, "job.yaml:48: loss_args.larges: unknown setting"),
        ({"loss": OWN + "Leaves", "loss_args": {"rank": 1}}, "rank 1: ConfigFileError: "),
    ],
    ids=["on all", "on one"],
)
def test_and_is_one_error_on_all_ranks_before_the_model_is_built(folder, changes, words):
    file = written(folder, max_steps=1, **changes)
    outcomes = run_ranks(2, "tests.jobs.rl.test_own_loss:train", file, check=False, timeout=90)
    said = [outcome.output.strip() for outcome in outcomes]
    assert all(outcome.returncode not in (0, -9) for outcome in outcomes), said
    errors = [text[text.index("RankError: the job's objective: ") :] for text in said]
    assert errors[0] == errors[1] and words in errors[0], said
    assert not (folder / "runs").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adv_estimator": OWN + "too_few"}, "the advantages of tests.jobs.rl.own_loss:too_few have shape (11,)"),
        ({"loss": OWN + "TakesAColumn"}, "the loss reports a metric named 'reward'"),
    ],
    ids=["advantages", "column"],
)
def test_what_only_shows_in_a_step_is_told_by_all(folder, changes, words):
    file = written(folder, max_steps=1, **changes)
    for outcome in run_ranks(2, "tests.jobs.rl.test_own_loss:train", file, check=False, timeout=90):
        assert outcome.returncode not in (0, -9) and words in outcome.output, outcome.output
