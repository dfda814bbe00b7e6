from __future__ import annotations

import json

import pytest
import yaml

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.objectives.from_config import loss_of
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import PHASES
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

RUN = "tests.jobs.rl.jobs:run"


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    return tmp_path


def finished(folder):
    run = folder / "runs" / "tiny"
    return run, read_metrics(run / "metrics.jsonl")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_leaves_rows_events_settings_and_a_picture(folder, ranks):
    run_ranks(ranks, RUN, settings(folder, reward_function="tests.jobs.rl.jobs:length"))
    run, rows = finished(folder)
    assert [(r["phase"], r["step"]) for r in rows] == [("warmup", 1), ("warmup", 2), ("rl", 1), ("rl", 2)]
    keys = "step phase reward loss tokens_per_second padding_share imbalance grad_norm lr skipped_steps".split()
    for row in rows:
        assert set(keys) <= set(row), set(keys) - set(row)
    more = "approx_kl clip_fraction entropy response_length_mean response_length_max".split()
    for row in rows[2:]:
        assert set(more) <= set(row), set(more) - set(row)
        assert row["tokens_packed"] <= row["tokens_dynamic"] <= row["tokens_full"]
        assert row["grad_norm"] > 0
    assert (rows[2]["eval_updates"], rows[3]["eval_updates"]) == (0, 2)
    assert rows[2]["eval_samples"] == 5
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert list((run / "tensorboard").iterdir())
    assert JobConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text())).exp_name == "tiny"


def test_log_probs_of_the_loss_have_a_temperature_of_their_own(folder):
    """One mini-batch per step, so that old log-probs are of the same weights."""
    job = {"warmup": None, "max_steps": 1, "reward_function": "tests.jobs.rl.jobs:length"}
    job["actor_train__training_args__per_device_train_batch_size"] = 12
    rows = []
    for temperature in (None, 1.0):
        sampled = {"actor_infer__generating_args__temperature": 0.25}
        run_ranks(1, RUN, settings(folder, **job, **sampled, actor_train__logprob_temperature=temperature))
        rows.append(finished(folder)[1][-1])
    sharp, plain = rows
    assert sharp["reward"] == plain["reward"], "the same samples"
    assert plain["entropy"] > 1.02 * sharp["entropy"], "of the distribution at temperature 1"
    assert plain["approx_kl"] < 1e-6, "old log-probs have the same"


def test_the_figures_of_a_row_agree_with_each_other(folder):
    """One mini-batch per step, so that a row's sums are those of one plan."""
    job = settings(
        folder,
        warmup=None,
        reward_function="tests.jobs.rl.jobs:length",
        actor_train__training_args__per_device_train_batch_size=6,
        actor_train__planning_args__sequence_multiple=8,
    )
    run_ranks(2, RUN, job)
    rows = finished(folder)[1]
    for row in rows:
        samples, prompt = 4 * 3, len("a+1b+1=")
        assert row["tokens"] == pytest.approx(samples * (prompt + row["response_length_mean"]))
        assert row["reward"] == pytest.approx(row["response_length_mean"] / 10)
        assert row["computed_tokens"] == row["tokens_packed"] > row["tokens"]
        assert row["padding_share"] == pytest.approx(1 - row["tokens"] / row["computed_tokens"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["train_seconds"])
        spent = {name: row[name] for name in PHASES}
        assert all(seconds > 0 for seconds in spent.values()), spent
        assert _within_training(row) < 1
        assert row["flops_per_second"] > 6 * 43 * 32 * row["tokens"] / 2 / row["train_seconds"] and "mfu" not in row
        longest = row["length_max_over_mean"] * row["tokens"] / samples
        assert longest == pytest.approx(prompt + row["response_length_max"])
        assert row["tokens_padded"] == pytest.approx(samples * longest)
        assert row["tokens_full"] == samples * (40 + 24)
        assert row["tokens_packed"] <= row["tokens_dynamic"] <= row["tokens_full"]
        assert row["seconds"] >= row["rollout_seconds"] + row["update_seconds"]
        shares = {part: row[f"share/{part}"] for part in ("rollout", "reward", "transfer", "train", "wait")}
        assert min(shares.values()) >= 0 and sum(shares.values()) <= 1.0001, "evaluations are the rest"
        assert shares["transfer"] == 0 < shares["rollout"] and shares["train"] > shares["reward"] > 0
        assert 0 <= row["imbalance"] < 1 and row["micro_batches"] >= 1 and row["fillers"] >= 0
    # A part without a name would be missing in every step; one step may lose the processor between two parts.
    assert max(map(_within_training, rows)) > 0.9


def _within_training(row) -> float:
    """The share of a step's training that its parts explain."""
    return (sum(row[name] for name in PHASES) - row["plan_seconds"]) / row["train_seconds"]


@pytest.mark.parametrize(
    ("ranks", "size", "changes", "remainder"),
    [(1, 11, {"ppo_epochs": 2}, 1), (2, 5, {"batch_balance": True}, 2), (1, 6, {}, None)],
)
def test_a_smaller_last_mini_batch_is_announced_once(folder, ranks, size, changes, remainder):
    rows = {"actor_train__training_args__per_device_train_batch_size": size}
    job = settings(folder, warmup=None, max_steps=2, **rows, **changes)
    outcomes = run_ranks(ranks, RUN, job, check=False)
    assert [outcome.returncode for outcome in outcomes] == [0] * ranks, outcomes[0].output
    shown = [line for outcome in outcomes for line in outcome.output.splitlines() if "do not divide" in line]
    assert len(shown) == (remainder is not None), shown
    if remainder is not None:
        assert f"12 samples do not divide into mini-batches of {size * ranks}" in shown[0]
        assert f"holds {remainder}" in shown[0] and "rollout_batch_size x num_return_sequences_in_group" in shown[0]


def test_the_keys_of_the_objective_reach_the_loss(folder):
    loss = loss_of(JobConfig.model_validate(settings(folder)))
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.ratio, loss.kl_coef) == (0.2, 0.2, None, "token", 0.0)
    changes = {
        "pg_clip": 0.3,
        "dual_clip_loss": True,
        "importance_sampling": "seq",
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_loss_coef": 0.01,
        "loss_agg_mode": "seq-mean-token-mean",
        "reference": {},
    }
    loss = loss_of(JobConfig.model_validate(settings(folder, **changes)))
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.ratio) == (0.3, 0.3, 1.6, "sequence")
    assert (loss.kl_coef, loss.entropy_coef, loss.aggregation) == (0.1, 0.01, "sequence_mean")
    assert loss.kl_bound == 10.0
    for bound in (3.5, None):
        job = JobConfig.model_validate(settings(folder, **changes, kl_loss_bound=bound))
        assert loss_of(job).kl_bound == bound


def test_fewer_prompts_than_ranks_still_train(folder):
    run_ranks(3, RUN, settings(folder, rollout_batch_size=2, num_return_sequences_in_group=2, warmup=None))
    _, rows = finished(folder)
    assert [r["step"] for r in rows] == [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_train__logprob_plan": "own"},
        {"actor_train__logprob_plan": "none", "actor_train__training_args__per_device_train_batch_size": 6},
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "reference": {},
            "actor_train__training_args__per_device_train_batch_size": 6,
        },
        {"adv_estimator": "reinforce", "norm_mean_type": "batch", "whiten_advantages": True},
        {"drop_zero_advantage_groups": True, "ppo_epochs": 2},
        {"max_len_mask": True, "ppo_epochs": 2},
        {"difficulty_mask": True, "difficulty_low_threshold": 1e8, "difficulty_high_threshold": 1e9},
        {"importance_sampling": "seq", "dual_clip_loss": True, "loss_agg_mode": "seq-mean-token-mean"},
        {"actor_train__training_args__lr_scheduler_type": "linear"},
        {"actor_train__use_sequence_packing": False, "actor_train__training_args__gradient_accumulation_steps": 2},
    ],
    ids=[
        "own plan",
        "no old log-probs",
        "reference",
        "reinforce",
        "idle groups",
        "overlong",
        "too hard",
        "sequence ratio",
        "decaying rate",
        "padded",
    ],
)
def test_variants_of_the_objective_run(folder, changes):
    base = {"reward_function": "tests.jobs.rl.jobs:length", "warmup": None}
    run_ranks(2, RUN, settings(folder, **(base | changes)))
    _, rows = finished(folder)
    assert all(abs(r["loss"]) < 10 for r in rows)
    if "kl_loss_coef" in changes:
        assert rows[0]["ref_kl"] == pytest.approx(0, abs=1e-9), "the reference is the policy at the start of RL"
        assert rows[1]["ref_kl"] > 1e-6
    if "max_len_mask" in changes:
        assert 0 < rows[0]["finished_share"] < 1
        samples, prompt = 4 * 3, len("a+1b+1=")
        # The longest responses are those that were cut off: without them even two epochs learn from fewer tokens.
        assert rows[0]["tokens"] < 2 * samples * (prompt + rows[0]["response_length_mean"])
    if "difficulty_mask" in changes:
        assert all(r["loss"] == 0 and r["grad_norm"] == 0 for r in rows), "of no prompt is anything learnt"
    if changes.get("actor_train__training_args__lr_scheduler_type") == "linear":
        # Two steps of two mini-batches: a row shows the rate of its second.
        assert [r["lr"] for r in rows] == pytest.approx([0.75e-3, 0.25e-3])


@pytest.mark.parametrize("ranks", [1, 2])
def test_cut_off_responses_are_neither_computed_nor_counted(folder, ranks):
    job = settings(folder, max_len_mask=True, reward_function="tests.jobs.rl.jobs:length", warmup=None)
    steps = run_ranks(ranks, "tests.jobs.rl.jobs:run_and_count", job)[0]
    _, rows = finished(folder)
    assert any(row["finished_share"] < 1 for row in rows)
    # A mini-batch of nothing but cut-off responses computes one of them, which counts nothing.
    empty = [lengths for lengths, counted in steps if not counted]
    assert all(len(lengths) == 1 for lengths in empty)
    whole = [(lengths, counted) for lengths, counted in steps if counted]
    assert sum(len(lengths) for lengths, _ in whole) == sum(12 * row["finished_share"] for row in rows)
    for lengths, counted in whole:
        assert counted == sum(lengths) - len("a+1b+1=") * len(lengths)


def test_every_step_draws_anew(folder):
    """One prompt, weights that stay: two steps differ by their draws alone."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "prompts.jsonl").write_text(lines[0] + "\n")
    job = settings(
        folder,
        reward_function="tests.jobs.rl.jobs:length",
        warmup=None,
        rollout_batch_size=1,
        num_return_sequences_in_group=6,
        actor_train__training_args__learning_rate=1e-12,
    )
    run_ranks(1, RUN, job)
    first, second = finished(folder)[1]
    assert first["reward"] != second["reward"]
    run_ranks(1, RUN, job | {"exp_name": "again"})
    again = read_metrics(folder / "runs" / "again" / "metrics.jsonl")
    assert [r["reward"] for r in again] == [first["reward"], second["reward"]]


def test_the_control_gives_advantages_to_the_wrong_samples(folder):
    seen = {}
    for control in ("none", "shuffled"):
        job = settings(folder, control=control, reward_function="tests.jobs.rl.jobs:length", warmup=None)
        run_ranks(1, RUN, job)
        seen[control] = finished(folder)[1]
    plain, shuffled = seen["none"][0], seen["shuffled"][0]
    assert plain["reward"] == shuffled["reward"], "the first rollout is the same"
    assert plain["grad_norm"] != shuffled["grad_norm"]


def both_say(folder, job, words, ranks=2):
    """Every rank fails with the words; the error of one of them."""
    outcomes = run_ranks(ranks, RUN, job, check=False, timeout=60)
    for outcome in outcomes:
        assert outcome.returncode not in (0, -9), outcome.output
        assert words in outcome.output, outcome.output
    return outcomes[0].output.strip().splitlines()[-1]


@pytest.mark.bad_input
def test_nan_in_rewards_names_the_sample_on_every_rank(folder, report):
    job = settings(folder, reward_function="tests.jobs.rl.jobs:nan_for_one", rollout_batch_size=8)
    report("NaN in rewards: " + both_say(folder, job, "(prompt 'a+3b+3="))


@pytest.mark.bad_input
def test_a_missing_prompt_file(folder, report):
    (folder / "prompts.jsonl").unlink()
    report("missing prompt file: " + both_say(folder, settings(folder), "prompts.jsonl does not exist"))


@pytest.mark.bad_input
def test_a_malformed_line_is_named_by_its_number(folder, report):
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "a+1=", "answer"\n')
    report("malformed JSONL line: " + both_say(folder, settings(folder), "prompts.jsonl:9"))


@pytest.mark.bad_input
def test_a_tokenizer_larger_than_the_model(folder, report):
    job = settings(folder, actor_train__model_args__architecture__vocab_size=20)
    report("tokenizer larger than the model: " + both_say(folder, job, "raise actor_train.model_args"))


@pytest.mark.bad_input
def test_a_prompt_longer_than_allowed_is_named_by_its_line(folder, report):
    job = settings(folder, prompt_length=4, warmup=None)
    report("prompt too long: " + both_say(folder, job, "more than the 4 allowed"))


def test_data_files_that_differ_between_ranks(folder):
    outcomes = run_ranks(2, "tests.jobs.rl.test_job:run_on_own_file", str(folder), check=False, timeout=60)
    assert all("ranks differ in the data files" in o.output for o in outcomes)


@pytest.mark.bad_input
def test_settings_that_differ_between_ranks(folder):
    """Such as files of two machines: ranks would wait for each other in different collectives."""
    job = settings(folder, warmup=None, train_infer_correction={"is_weight": {}})
    other = settings(folder, warmup=None, save_steps=1)
    outcomes = run_ranks(2, "tests.jobs.rl.test_job:run_own_settings", [job, other], check=False, timeout=60)
    for outcome in outcomes:
        assert "RankError: the job's settings, which all ranks must share: ranks differ in save_steps" in outcome.output
        assert "ranks differ in train_infer_correction" in outcome.output and "absent on rank 1" in outcome.output


def run_own_settings(jobs):
    import os

    from tests.jobs.rl.jobs import run

    run(jobs[int(os.environ["RANK"])])


@pytest.mark.bad_input
def test_a_response_that_one_rank_cannot_decode(folder):
    """Such as a token that the model has and the tokenizer lacks; the other ranks have other responses."""
    texts = run_ranks(2, "tests.jobs.rl.test_job:refusal_without_decoder", settings(folder, warmup=None))
    start = "RankError: decoding the responses: rank 1: TypeError: no text for token 42 ("
    assert len(set(texts)) == 1 and texts[0].startswith(start) and "test_job.py:" in texts[0], texts


def refusal_without_decoder(payload):
    import os

    from roll_batching.jobs.texts import CharTokenizer
    from tests.jobs.rl.jobs import refusal

    def decode(self, ids):
        raise TypeError("no text for token 42")

    if os.environ["RANK"] == "1":
        CharTokenizer.decode = decode
    return refusal(payload)


def run_on_own_file(folder):
    import os
    from pathlib import Path

    from tests.jobs.rl.jobs import run

    own = Path(folder) / f"prompts{os.environ['RANK']}.jsonl"
    own.write_text(json.dumps({"prompt": f"a+{os.environ['RANK']}=", "answer": "1"}) + "\n")
    run(settings(Path(folder), actor_train__data_args__file_name=str(own)))
