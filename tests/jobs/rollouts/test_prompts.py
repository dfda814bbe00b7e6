"""The prompts of a step by domain, and those that are too long."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.rewards import prompts_of_domains
from roll_batching.jobs.inputs import check_inputs, load_inputs
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rollouts.prompts import prompt_stream
from roll_batching.jobs.texts.epochs import MixedStream
from roll_batching.jobs.texts.texts import Prompt, PromptDataset
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import TIMES
from tests.support.ranks import RanksFailed, run_ranks

REWARDS = {
    "even": {"reward_function": "tests.jobs.rl.jobs:length", "tag_included": ["e"]},
    "odd": {"reward_function": "tests.jobs.rl.jobs:length", "tag_included": ["o"]},
}


def job(folder: Any, shares: Any = None, **changes: Any) -> dict[str, Any]:
    """Eight prompts: five whose tag is even's, of which one says that it is odd's; three of odd's."""
    write_data(folder)
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tagged = [{**line, "tag": "e" if i < 5 else "o", "id": i} for i, line in enumerate(lines)]
    tagged[0]["domain"] = "odd"
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tagged))
    made = settings(folder, warmup=None, eval_samples=0, rewards=REWARDS, rollout_samples=-1, **changes)
    del made["reward_function"]
    if shares is not None:
        made["actor_train"]["data_args"]["domain_interleave_probs"] = shares
    return made


def named(count: int, letter: str) -> PromptDataset:
    return PromptDataset([Prompt(f"{letter}{i}", "") for i in range(count)])


def test_numbers_of_prompts_are_roll_s():
    shares = {"math": 0.4, "code": 0.3, "judge": 0.1, "cross": 0.1, "if": 0.1}
    assert prompts_of_domains(shares, 64) == {"math": 25, "code": 19, "judge": 6, "cross": 6, "if": 8}


def test_each_domain_goes_through_its_own_prompts_spread_over_the_batch():
    stream = MixedStream({"a": named(5, "a"), "b": named(3, "b")}, {"a": 6, "b": 2}, seed=1)
    batches = [[item.prompt for item in next(stream)] for _ in range(5)]
    for batch in batches:
        assert "".join(prompt[0] for prompt in batch) == "aabaaaba"
    drawn = [prompt for batch in batches for prompt in batch if prompt[0] == "a"]
    for epoch in range(6):
        assert sorted(drawn[5 * epoch : 5 * epoch + 5]) == [f"a{i}" for i in range(5)]


def test_a_saved_position_is_every_domain_s():
    def stream(**counts: int) -> MixedStream[Prompt]:
        return MixedStream({"a": named(5, "a"), "b": named(3, "b"), "c": named(2, "c")}, counts, seed=2)

    one = stream(a=3, b=2)
    for _ in range(4):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    expected, again = [next(one) for _ in range(4)], stream(a=3, b=2)
    again.load_state_dict(state)
    assert [next(again) for _ in range(4)] == expected
    with pytest.raises(DataError, match="has the domains a, b, here there are a, c"):
        stream(a=3, c=2).load_state_dict(state)


def test_a_job_draws_its_parts_and_goes_on_with_them(tmp_path):
    shares = {"even": 0.75, "odd": 0.25}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run_ranks(2, "tests.jobs.rl.jobs:run", job(whole, shares, max_steps=3))
    run_ranks(2, "tests.jobs.rl.jobs:run", job(parts, shares, max_steps=2, save_steps=2))
    run_ranks(2, "tests.jobs.rl.jobs:run", job(parts, shares, max_steps=3, save_steps=2, resume_from_checkpoint=True))
    said = [json.loads(line) for line in (whole / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    for step in (1, 2, 3):
        domains = [line["domain"] for line in said if line["step"] == step]
        assert (domains.count("even"), domains.count("odd")) == (9, 3)
    last = [read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")[-1] for folder in (whole, parts)]
    assert last[0]["step"] == last[1]["step"] == 3
    assert {k: v for k, v in last[0].items() if k not in TIMES} == {k: v for k, v in last[1].items() if k not in TIMES}


def test_a_line_s_domain_goes_before_its_tag(tmp_path):
    config = config_from_dict(job(tmp_path, {"even": 0.5, "odd": 0.5}))
    inputs = load_inputs(config)
    assert [inputs.reward.domain_of(prompt.line) for prompt in inputs.prompts] == [1, 0, 0, 0, 0, 1, 1, 1]
    stream = prompt_stream(config, inputs)
    drawn = [prompt.line["id"] for _ in range(2) for prompt in next(stream)]
    assert {i for i in drawn if i in (0, 5, 6, 7)} == {0, 5, 6, 7}, "two steps are odd's four prompts"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"even": 0.5, "old": 0.5}, "old: names no domain of `rewards` (even, odd)"),
        ({"even": 1.0}, "lacks odd"),
        ({"even": 0.5, "odd": 0.6}, "all are above 0 and sum to 1"),
        ({"even": 0.0, "odd": 1.0}, "all are above 0 and sum to 1"),
        ({"even": 0.1, "odd": 0.9}, "leaves even no prompt of the 4 of a step"),
        ({"even": float("nan"), "odd": 0.9}, "domain_interleave_probs"),
    ],
)
def test_parts_that_cannot_be_are_refused(tmp_path, shares, words):
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job(tmp_path, shares))
    assert words in str(caught.value)


@pytest.mark.bad_input
def test_a_domain_without_prompts_is_named(tmp_path):
    made = job(tmp_path, {"even": 0.5, "odd": 0.25, "none": 0.25})
    made["rewards"] = {**REWARDS, "none": {"reward_function": "tests.jobs.rl.jobs:length", "tag_included": ["n"]}}
    with pytest.raises(RanksFailed, match="draws from none, and no prompt of the data files belongs to it") as caught:
        run_ranks(1, "tests.jobs.rl.jobs:run", made)
    assert "in run_job" in str(caught.value) and "Grpo" not in str(caught.value), "before the model is built"


def run_with_own_file(payload: dict[str, Any]) -> None:
    """On a rank: the job with the prompts of this rank."""
    from tests.jobs.rl.jobs import run

    texts = payload["actor_train"]["data_args"]
    run({**payload, "actor_train": {**payload["actor_train"], "data_args": {**texts, "file_name": own_file(texts)}}})


def own_file(texts: dict[str, Any]) -> str:
    return str(texts["file_name"]).replace(".jsonl", f"{os.environ['RANK']}.jsonl")


@pytest.mark.bad_input
def test_ranks_that_have_other_domains_for_the_same_texts_do_not_begin(tmp_path):
    made = job(tmp_path, {"even": 0.5, "odd": 0.5})
    text = (tmp_path / "prompts.jsonl").read_text()
    (tmp_path / "prompts0.jsonl").write_text(text)
    (tmp_path / "prompts1.jsonl").write_text(text.replace('"domain": "odd"', '"domain": "even"'))
    with pytest.raises(RanksFailed, match="the prompts of each domain") as caught:
        run_ranks(2, "tests.jobs.rollouts.test_prompts:run_with_own_file", made)
    assert "Give all machines the same files" in str(caught.value)


def test_long_prompts_are_left_out_where_the_job_says_so(tmp_path, caplog, monkeypatch):
    made = job(tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    long = json.dumps({"prompt": "1+" * 30, "answer": "1", "tag": "e"}) + "\n"
    (tmp_path / "prompts.jsonl").write_text("".join([*lines[:3], long, *lines[3:]]))
    with pytest.raises(DataError, match=r"prompts.jsonl:4: the prompt has 60 tokens, more than the 40 allowed"):
        load_inputs(config_from_dict(made))
    made["actor_train"]["data_args"]["long_prompts"] = "drop"
    config = config_from_dict(made)
    inputs = load_inputs(config)
    assert len(inputs.prompts) == 8 and "1 of 9 prompts" in caplog.text and "up to 60" in caplog.text
    for name, value in check_inputs(config).items():
        monkeypatch.setenv(name, value)
    assert load_inputs(config).fingerprint in check_inputs(config).values(), "what was checked is what is read"
    (tmp_path / "prompts.jsonl").write_text(long)
    with pytest.raises(DataError, match="every prompt .* has more than 40 tokens"):
        load_inputs(config)
