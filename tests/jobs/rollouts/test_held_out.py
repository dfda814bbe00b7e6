"""How held-out prompts are answered: as rollouts are, but for what the section `validation` says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roll_batching.jobs.config import JobConfig, config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import TIMES
from tests.support.ranks import run_ranks

GREEDY = {"generating_args": {"do_sample": False, "max_new_tokens": 5, "num_return_sequences": 2}}


@pytest.mark.config
def test_keys_that_are_not_given_are_the_rollouts(tmp_path):
    sampling = {"temperature": 0.9, "top_k": 7}
    job = settings(tmp_path, actor_infer__generating_args=sampling, validation={"generating_args": {"top_p": 0.6}})
    found = config_from_dict(job)
    for config in (found, JobConfig.model_validate(found.to_dict())):  # as whoever starts the ranks has it, and they
        args = config.validation.generating_args
        assert (args.temperature, args.top_k, args.top_p, args.max_new_tokens) == (0.9, 7, 0.6, 24)
        assert (args.num_return_sequences, config.actor_infer.generating_args.num_return_sequences) == (1, 3)
    with pytest.raises(ConfigFileError, match="validation.generating_args.max_new_tokens: is 25, more than"):
        config_from_dict(settings(tmp_path, validation={"generating_args": {"max_new_tokens": 25}}))


def test_held_out_prompts_have_their_own_sampling_and_rollouts_theirs(tmp_path):
    def run(name: str, **changes: Any) -> tuple[Any, Any]:
        folder = tmp_path / name
        folder.mkdir()
        write_data(folder)
        job = settings(folder, warmup=None, rollout_samples=-1, reward_function="tests.jobs.rl.jobs:length", **changes)
        run_ranks(2, "tests.jobs.rl.jobs:run", job)
        lines = (folder / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()
        return read_metrics(folder / "runs" / "tiny" / "metrics.jsonl"), [json.loads(line) for line in lines]

    plain, _ = run("plain")
    own, said = run("own", validation=GREEDY)
    for one, other in zip(plain, own, strict=True):
        trained = {name for name in one.keys() - TIMES if not name.startswith("eval_")}
        assert {name: one[name] for name in trained} == {name: other[name] for name in trained}
    assert [row["eval_samples"] for row in plain] == [5, 5] and [row["eval_samples"] for row in own] == [10, 10]
    answers = [line for line in said if line["kind"] == "eval" and line["version"] == 2]
    assert len(answers) == 10 and all(line["response_tokens"] <= 5 for line in answers)
    for first, second in zip(answers[::2], answers[1::2], strict=True):
        assert (first["prompt"], first["response"]) == (second["prompt"], second["response"]), "greedy"
