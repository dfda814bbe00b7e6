"""Rollouts by a function on real ranks: whose samples they are, their log-probs, and that they repeat."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks
from tests.support.tiny_job import VOCABULARY

HERE = "tests.jobs.rollouts.rollout_functions:"
PROMPTS, GROUP = 5, 2
TEXTS = [f"a+{i}=" + ";" * i for i in range(PROMPTS)]


def roll_out(payload: dict[str, Any]) -> dict[str, Any]:
    """On a rank: two rollouts by the function, with the trainer's own log-probs of them."""
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.rewards.pool import RewardPool
    from roll_batching.jobs.rollouts.function_rollouts import function_rollouts_of
    from roll_batching.jobs.rollouts.rollout import generate_rollouts, score_rollouts
    from roll_batching.jobs.steps.passes import add_results, log_prob_pass
    from roll_batching.jobs.texts import CharTokenizer
    from roll_batching.jobs.texts.texts import Prompt
    from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy
    from roll_batching.strategy.roles import run_on

    config = JobConfig.model_validate(payload)
    strategy = MegatronTrainStrategy(config.actor_train, seed=1)
    strategy.initialize()
    tokenizer = CharTokenizer(VOCABULARY, eos="$", pad=".")
    prompts = [Prompt(text, "", {"level": i}) for i, text in enumerate(TEXTS)]
    sampling = GenerationSettings(
        max_new_tokens=12, eos_token_id=tokenizer.eos_token_id, seed=7, num_return_sequences=GROUP, vocab_size=43
    )
    function = function_rollouts_of(config)
    made = []
    for _ in range(2):
        rollouts = generate_rollouts(strategy, prompts, tokenizer, sampling, prompt_length=40, function=function)
        scores = score_rollouts(strategy, rollouts, RewardPool(), shown=-1)
        batch = rollouts.batch
        results = run_on(strategy, batch, log_prob_pass(strategy, ("response_mask",)))
        batch = add_results(batch, results, {"log_probs": "trainer"})
        made.append(
            {
                "ids": batch.ids.tolist(),
                "texts": [tokenizer.decode(row.tolist()) for row in batch.to_lists("input_ids")],
                "tokens": [row.tolist() for row in batch.to_lists("input_ids")],
                "masks": [row.tolist() for row in batch.to_lists("response_mask")],
                "log_probs": [row.tolist() for row in batch.to_lists("log_probs")],
                "trainer": [row.tolist() for row in batch.to_lists("trainer")],
                "rewards": scores.rewards.tolist(),
                "odd": scores.marks["odd"].tolist(),
                "turns": scores.turns.tolist(),
                "counted": scores.response_tokens.tolist(),
                "lines": scores.sample_log,
            }
        )
    assert made[0] == made[1], "a rollout that is repeated has the same samples"
    return made[0]


LAYOUTS = [
    (1, {}),
    (2, {}),
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    (2, {"pipeline_model_parallel_size": 2}),
    pytest.param(4, {"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
]


@pytest.mark.equality
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_samples_of_several_turns_in_every_layout(world, layout, tmp_path, report):
    """Every sample is made once, replies are masked, and log-probs are those that the trainer computes itself."""
    job = settings(
        tmp_path,
        warmup=None,
        rollout_function=HERE + "three_turns",
        rollout_args={"pause": 0.02},
        actor_train__strategy_args={"strategy_name": "megatron_train", "strategy_config": layout},
    )
    del job["reward_function"]
    ranks = run_ranks(world, "tests.jobs.rollouts.test_function_rollouts:roll_out", job)
    replicas = {tuple(rank["ids"]): rank for rank in ranks}
    assert sorted(number for ids in replicas for number in ids) == list(range(PROMPTS * GROUP))
    largest = 0.0
    for rank in ranks:
        assert rank == replicas[tuple(rank["ids"])], "all ranks of a replica have the same samples"
        for place, number in enumerate(rank["ids"]):
            prompt, text = TEXTS[number // GROUP], rank["texts"][place]
            mask, sampled = rank["masks"][place], [0.0] * 0
            assert text.startswith(prompt) and not any(mask[: len(prompt)])
            rest, replies = text[len(prompt) :], [place for place, counted in enumerate(mask) if not counted]
            assert rest.count("+") >= 1 + number % 2 and len(replies) == len(prompt) + 2 * (1 + number % 2)
            assert rank["turns"][number] == 2 + number % 2 and rank["counted"][number] == sum(mask)
            for at in range(1, len(mask)):
                ours, theirs = rank["log_probs"][place][at - 1], rank["trainer"][place][at - 1]
                assert (ours < 0) == bool(mask[at])
                if mask[at]:
                    largest = max(largest, abs(ours - theirs))
                    sampled.append(ours)
            assert len(sampled) == sum(mask)
        expected = [number // GROUP + number / 100 for number in range(PROMPTS * GROUP)]
        assert rank["rewards"] == pytest.approx(expected)
        assert rank["odd"] == [bool(number % 2) for number in range(PROMPTS * GROUP)]
        lines = rank["lines"]
        assert [line["id"] for line in lines] == list(range(PROMPTS * GROUP))
        assert [line["prompt_tokens"] for line in lines] == [len(TEXTS[i // GROUP]) for i in range(PROMPTS * GROUP)]
    assert largest < 1e-5
    report(f"log-probs of samples of several turns against the trainer's: {largest:.1e}")


def test_concurrent_calls_with_other_limits(tmp_path):
    job = settings(tmp_path, warmup=None, rollout_function=HERE + "searches", max_steps=1, eval_samples=0)
    del job["reward_function"]
    write_data(tmp_path)
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    (row,) = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert row["reward"] == 1 and row["finished_share"] == 1 and row["turns_mean"] == 3


# ---- whole jobs


def lines_of(folder, name="tiny"):
    lines = [json.loads(line) for line in (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "kind", "id", "prompt", "response", "reward")} for line in lines]


def rows_of(folder, name="tiny"):
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES and "second" not in key} for row in rows]


def test_a_resumed_job_makes_the_same_samples(tmp_path):
    write_data(tmp_path)
    job = settings(
        tmp_path,
        warmup=None,
        rollout_function=HERE + "three_turns",
        rollout_args={"pause": 0.01},
        rollout_samples=-1,
        max_steps=3,
        save_steps=1,
        exp_name="whole",
    )
    del job["reward_function"]
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    parts = {**job, "exp_name": "parts", "max_steps": 2}
    run_ranks(2, "tests.jobs.rl.jobs:run", parts)
    run_ranks(2, "tests.jobs.rl.jobs:run", {**parts, "max_steps": 3, "resume_from_checkpoint": True})
    whole = [line for line in lines_of(tmp_path, "whole") if line["kind"] == "train"]
    assert [line for line in lines_of(tmp_path, "parts") if line["kind"] == "train"] == whole
    assert len(whole) == 3 * 12 and all("+1" in line["response"] for line in whole)
    rows, other = rows_of(tmp_path, "whole"), rows_of(tmp_path, "parts")
    assert [row["loss"] for row in rows] == [row["loss"] for row in other]
    assert rows[0]["turns_mean"] == 2.5 and "eval_reward" in rows[-1] and rows[-1]["grad_norm"] > 0


def test_a_reward_function_scores_them_and_a_sampler_ahead_makes_the_same(tmp_path):
    """With weights that stay, an asynchronous job's samples are those of a synchronous one."""
    write_data(tmp_path)
    fixed = {"warmup": None, "rollout_function": HERE + "three_turns", "rollout_args": {"reward": False}}
    fixed |= {"rollout_samples": -1, "eval_samples": 0, "reward_function": "tests.jobs.rl.jobs:length"}
    fixed |= {"actor_train__training_args__learning_rate": 1e-12}
    run_ranks(1, "tests.jobs.rl.jobs:run", settings(tmp_path, exp_name="sync", **fixed))
    run_ranks(1, "tests.jobs.rl.jobs:run", settings(tmp_path, exp_name="ahead", async_generation_ratio=1, **fixed))
    sync = lines_of(tmp_path, "sync")
    assert lines_of(tmp_path, "ahead") == sync and len(sync) == 2 * 12
    assert all(0.2 <= line["reward"] <= 0.9 for line in sync)
    assert [row["turns_mean"] for row in rows_of(tmp_path, "ahead")] == [2.5, 2.5]


@pytest.mark.bad_input
def test_a_fault_on_one_rank_ends_all(tmp_path):
    write_data(tmp_path)
    job = settings(
        tmp_path, warmup=None, rollout_function=HERE + "faulty", rollout_args={"fault": "nan"}, eval_samples=0
    )
    del job["reward_function"]
    outcomes = run_ranks(2, "tests.jobs.rl.jobs:run", job, check=False)
    for outcome in outcomes:
        assert outcome.returncode != 0
        assert "RankError" in outcome.output and "log_probs[" in outcome.output and "rollout 2" in outcome.output


def test_a_rollout_of_one_turn_trains_as_the_job_without_one(tmp_path):
    """Greedy, where no draws differ: responses, log-probs and losses are those of the model that answers once."""
    write_data(tmp_path)
    base = {"warmup": None, "rollout_samples": -1, "adv_estimator": "reinforce", "eval_samples": 0}
    base |= {"num_return_sequences_in_group": 1, "actor_infer__generating_args": {"do_sample": False}}
    base |= {"reward_function": "tests.jobs.rl.jobs:length"}
    run_ranks(1, "tests.jobs.rl.jobs:run", settings(tmp_path, exp_name="plain", **base))
    run_ranks(
        1, "tests.jobs.rl.jobs:run", settings(tmp_path, exp_name="own", rollout_function=HERE + "one_turn", **base)
    )
    assert lines_of(tmp_path, "own") == lines_of(tmp_path, "plain")
    ours, theirs = rows_of(tmp_path, "own"), rows_of(tmp_path, "plain")
    assert torch.allclose(
        torch.tensor([row["loss"] for row in ours]), torch.tensor([row["loss"] for row in theirs]), atol=1e-6
    )
    assert all(row.pop("turns_mean") == row.pop("samples_mean") == 1 for row in ours)
    assert {frozenset(row) for row in ours} == {frozenset(row) for row in theirs}


# ---- rollouts of several samples


@pytest.mark.equality
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}),
        (2, {"batch_balance": True}),
        (
            2,
            {
                "dynamic_sampling": True,
                "actor_train__strategy_args__strategy_config": {"tensor_model_parallel_size": 2},
            },
        ),
        (1, {"async_generation_ratio": 0.5}),
        pytest.param(
            4,
            {
                "actor_train__strategy_args__strategy_config": {"context_parallel_size": 2},
                "actor_infer__strategy_args__strategy_config": {"context_parallel_size": 1},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one rank", "balanced by rank", "dynamic sampling, TP", "asynchronous", "DP and CP"],
)
def test_turns_as_samples_train_as_the_whole_rollout(world, changes, tmp_path):
    """One sample per turn, behind all that was before it: every loss is that of a sample of all turns."""
    write_data(tmp_path)
    base = {"warmup": None, "rollout_samples": -1, "eval_samples": 0, "loss_agg_mode": "rollout-token-mean", **changes}
    base |= {"actor_train__training_args__per_device_train_batch_size": 2}  # several optimizer steps of each step
    for name in ("three_turns", "turns_as_samples"):
        job = settings(tmp_path, exp_name=name, rollout_function=HERE + name, **base)
        del job["reward_function"]
        run_ranks(world, "tests.jobs.rl.jobs:run", job)
    whole, apart = rows_of(tmp_path, "three_turns"), rows_of(tmp_path, "turns_as_samples")
    assert [row["samples_mean"] for row in apart] == [row["turns_mean"] for row in apart] == [2.5, 2.5]
    assert [row["samples_mean"] for row in whole] == [1, 1]
    for name in ("loss", "grad_norm", "reward"):
        ours, theirs = ([row[name] for row in rows] for rows in (apart, whole))
        assert ours == pytest.approx(theirs, abs=2e-6), name
    assert whole[0]["grad_norm"] > 0
    texts = [line["response"] for line in lines_of(tmp_path, "three_turns")]
    assert all(
        text.endswith(line["response"])
        for text, line in zip(texts, lines_of(tmp_path, "turns_as_samples"), strict=True)
    )


@pytest.mark.bad_input
def test_advantages_of_tokens_need_one_sample(tmp_path):
    write_data(tmp_path)
    job = settings(tmp_path, warmup=None, eval_samples=0, rollout_function=HERE + "turns_as_samples", gamma=0.9)
    del job["reward_function"]
    for refused in run_ranks(2, "tests.jobs.rl.jobs:refusal", job):
        assert "rollout 0 has 2 samples, and the job makes advantages of tokens (adv_estimator: grpo)" in refused
