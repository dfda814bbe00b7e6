"""Rollouts on real ranks: whose response is whose, what rewards see of it, and what an evaluation averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs.rl.jobs import settings
from tests.support.ranks import run_ranks
from tests.support.tiny_job import VOCABULARY

PROMPTS, GROUP = 5, 3
TEXTS = [f"a+{i}=" + ";" * i for i in range(PROMPTS)]  # unlike lengths: the ranks get them out of order


# ---- on ranks


def numbered(completion: Any) -> Any:
    """10 x the prompt's number, plus a little for the length; marks what ended and odd prompts."""
    from roll_batching.jobs.rewards import Score

    number = completion.record["number"]
    return Score(
        reward=10 * number + completion.tokens / 1000, marks={"odd": bool(number % 2), "finished": completion.finished}
    )


def roll_out(job: dict[str, Any]) -> dict[str, Any]:
    """Two rollouts and an evaluation with an untrained model; all that a rank sees of them."""
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
    from roll_batching.jobs.rollouts.evaluation import Evaluator
    from roll_batching.jobs.rollouts.rollout import generate_rollouts, score_rollouts
    from roll_batching.jobs.texts import CharTokenizer
    from roll_batching.jobs.texts.texts import Prompt, PromptDataset
    from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy

    config = JobConfig.model_validate(job)
    strategy = MegatronTrainStrategy(config.actor_train, seed=1)
    strategy.initialize()
    tokenizer = CharTokenizer(VOCABULARY, eos="$", pad=".")
    prompts = [Prompt(text, str(i), {"number": i}) for i, text in enumerate(TEXTS)]
    sampling = GenerationSettings(
        max_new_tokens=30, eos_token_id=tokenizer.eos_token_id, seed=7, num_return_sequences=GROUP
    )
    rollouts = generate_rollouts(strategy, prompts, tokenizer, sampling, prompt_length=40)
    reward = RewardPool(RewardDomain(path="tests.jobs.rollouts.test_rollout:numbered"))
    scores = score_rollouts(strategy, rollouts, reward)
    evaluate = Evaluator(
        prompts=PromptDataset(prompts[1:4]),
        tokenizer=tokenizer,
        reward=reward,
        settings=replace(sampling, num_return_sequences=1),
        samples=5,
        prompt_length=40,
        seed=3,
    )
    batch = rollouts.batch
    return {
        "ids": batch.ids.tolist(),
        "rows": [tokenizer.decode(row.tolist()) for row in batch.to_lists("input_ids")],
        "masks": [mask.tolist() for mask in batch.to_lists("response_mask")],
        "said": [(c.prompt, c.record["number"], c.response, c.finished, c.tokens) for c in rollouts.completions],
        "score_ids": scores.ids.tolist(),
        "rewards": scores.rewards.tolist(),
        "odd": scores.marks["odd"].tolist(),
        "finished": scores.finished.tolist(),
        "response_tokens": scores.response_tokens.tolist(),
        "lengths": scores.lengths.tolist(),
        "evaluations": [evaluate(strategy, number=number)[0] for number in (0, 0, 1)],
    }


def score_slowly(job: dict[str, Any]) -> list[float]:
    """A reward that takes three seconds on rank 1, under groups whose collectives wait for one."""
    import dataclasses
    import datetime

    import torch.distributed as dist

    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
    from roll_batching.jobs.rollouts.rollout import generate_rollouts, score_rollouts, start_reward
    from roll_batching.jobs.texts import CharTokenizer
    from roll_batching.jobs.texts.texts import Prompt
    from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy

    strategy = MegatronTrainStrategy(JobConfig.model_validate(job).actor_train, seed=1)
    strategy.initialize()
    tokenizer = CharTokenizer(VOCABULARY, eos="$", pad=".")
    prompts = [Prompt(text, "", {}) for text in TEXTS[:2]]
    sampling = GenerationSettings(max_new_tokens=8, eos_token_id=tokenizer.eos_token_id, seed=7)
    rollouts = generate_rollouts(strategy, prompts, tokenizer, sampling, prompt_length=40)
    short = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1))
    dist.all_reduce(torch.ones(1), group=short)  # its connections are made
    strategy.state = dataclasses.replace(strategy.state, layout=dataclasses.replace(strategy.layout, host_group=short))
    with RewardPool(
        RewardDomain(path="tests.jobs.rewards.reward_functions:slow_on_rank_1", arguments={"seconds": 3})
    ) as reward:
        start_reward(strategy.layout, reward)
        return score_rollouts(strategy, rollouts, reward).rewards.tolist()


# ---- here


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request, tmp_path_factory):
    job = settings(tmp_path_factory.mktemp("job"), warmup=None)
    return run_ranks(request.param, "tests.jobs.rollouts.test_rollout:roll_out", job)


def test_every_prompt_is_answered_once_by_one_rank(ranks):
    ids = [i for rank in ranks for i in rank["ids"]]
    assert sorted(ids) == list(range(PROMPTS * GROUP))
    for rank in ranks:
        assert [i // GROUP for i in rank["ids"]] == [number for _, number, _, _, _ in rank["said"]]


def test_a_completion_is_its_rows_text(ranks):
    ended = []
    for rank in ranks:
        for row, mask, (prompt, number, response, finished, tokens) in zip(
            rank["rows"], rank["masks"], rank["said"], strict=True
        ):
            assert prompt == TEXTS[number]
            assert row == prompt + response + ("$" if finished else "")
            assert mask == [0] * len(prompt) + [1] * tokens
            assert tokens == len(response) + finished
            assert "$" not in response and tokens <= 30
            assert finished or tokens == 30
            ended.append(finished)
    assert True in ended and False in ended


def test_scores_are_in_the_order_of_ids_on_every_rank(ranks):
    said = {i: said for rank in ranks for i, said in zip(rank["ids"], rank["said"], strict=True)}
    for rank in ranks:
        assert rank["score_ids"] == list(range(PROMPTS * GROUP))
        for i in rank["score_ids"]:
            prompt, number, _, finished, tokens = said[i]
            assert number == i // GROUP
            assert rank["rewards"][i] == 10 * number + tokens / 1000
            assert rank["odd"][i] == bool(number % 2)
            assert rank["finished"][i] == finished
            assert rank["response_tokens"][i] == tokens
            assert rank["lengths"][i] == len(prompt) + tokens


def test_responses_of_a_group_differ(ranks):
    groups: dict[int, set[str]] = {}
    for rank in ranks:
        for _, number, response, _, _ in rank["said"]:
            groups.setdefault(number, set()).add(response)
    assert all(len(group) == GROUP for group in groups.values())


def test_an_evaluation_averages_over_all_its_prompts(ranks):
    """Prompts 1, 2, 3, 1, 2: those that lie there are taken again until there are five."""
    for rank in ranks:
        assert rank["evaluations"] == ranks[0]["evaluations"]
        figures = rank["evaluations"][0]
        assert figures["eval_samples"] == 5
        little = figures["eval_response_length_mean"] / 1000
        assert figures["eval_reward"] == pytest.approx(10 * np.mean([1, 2, 3, 1, 2]) + little)
        assert figures["eval_mark/odd"] == pytest.approx(3 / 5)
        assert figures["eval_reward_with/odd"] == pytest.approx(10 * np.mean([1, 3, 1]), abs=0.04)
        assert figures["eval_reward_without/odd"] == pytest.approx(20, abs=0.04)


def test_evaluations_are_told_apart_by_their_number(ranks):
    first, again, second = ranks[0]["evaluations"]
    assert first == again
    assert first["eval_reward"] != second["eval_reward"]


def test_ranks_wait_for_a_reward_longer_than_their_collectives_may_take(tmp_path):
    first, second = run_ranks(2, "tests.jobs.rollouts.test_rollout:score_slowly", settings(tmp_path, warmup=None))
    assert first == second and len(first) == 2
