"""Environments: what the model reads of them, their seeds and faults, and that FrozenLake is learned."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rollouts.environments import FrozenLake
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.tokenizers import HFTokenizer
from tests.huggingface import tiny
from tests.jobs.rl.jobs import settings
from tests.jobs.rollouts.examples import run_example
from tests.support.ranks import run_ranks

HERE = "tests.jobs.rollouts.test_environments:"
ENVIRONMENTS = "roll_batching.jobs.rollouts.environments:"


# ---- environments, named by path


class Counter:
    """Says how many turns it has had; ends after three, with a reward for each. Its seed and line are in the first."""

    def __init__(self, turns: int = 3, folder: str | None = None) -> None:
        self.turns, self.count, self.folder = turns, 0, folder

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        return f"{seed % 10}+{options['level']}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = self.count / 10 + sum(map(ord, action)) % 97 / 1000
        return f"+{self.count}", reward, self.count == self.turns, False, {"long": np.bool_(self.turns > 2)}

    def close(self) -> None:
        if self.folder is not None:
            (Path(self.folder) / f"{uuid.uuid4()}.closed").write_text(str(self.count))


class Numbers(Counter):
    def step(self, action: str) -> Any:
        return (3, *super().step(action)[1:])


class Talks(Counter):
    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        return "+" * 80, {}


class Teller:
    """Shows what it was told; two turns, with a reward of 1.5 each."""

    def __init__(self, valid: bool = True) -> None:
        self.count, self.valid = 0, valid

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        return "a", {"instruction": "go"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"b{len(action)}", 1.5, self.count == 2, False, {"valid": self.valid}


def write_lines(folder: Path, **more: Any) -> None:
    lines = [{"prompt": f"a+{i}=", "level": i, "seed": i, **more} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def job_of(folder: Path, name: str = "tiny", environment: str = "Counter", **arguments: Any) -> dict[str, Any]:
    job = settings(
        folder,
        exp_name=name,
        warmup=None,
        eval_samples=0,
        rollout_samples=-1,
        loss_agg_mode="rollout-token-mean",
        rollout_function=ENVIRONMENTS + "rollout",
        rollout_args={"environment": HERE + environment, **arguments},
        response_length=3,
    )
    del job["reward_function"], job["actor_train"]["data_args"]["eval_file_name"]
    return job


# ---- rollouts


@pytest.mark.equality
@pytest.mark.parametrize("estimator", ["grpo", "gigpo"])
def test_turns_with_their_whole_history_train_as_the_episode(estimator, tmp_path):
    """`history: 9` gives each turn as a sample, behind all that was before it; rewards follow what the model wrote."""
    write_lines(tmp_path)
    found = {}
    for name, history in (("episode", {}), ("turns", {"history": 9})):
        run_ranks(2, "tests.jobs.rl.jobs:run", job_of(tmp_path, name, **history) | {"adv_estimator": estimator})
        found[name] = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
    for ours, theirs in zip(found["turns"], found["episode"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6) and ours["turns_mean"] == 3
        assert (ours["samples_mean"], theirs["samples_mean"], ours["mark/long"]) == (3, 1, 1)
        assert ours["reward"] == pytest.approx(theirs["reward"]) and ours["reward"] > 0.6
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=2e-6) and ours["grad_norm"] > 0.01


def test_a_short_history_is_what_each_turn_reads(tmp_path):
    write_lines(tmp_path)
    run_ranks(
        1,
        "tests.jobs.rl.jobs:run",
        job_of(tmp_path, history=1, observation_format=";{observation};", environment_args={"folder": str(tmp_path)}),
    )
    assert [file.read_text() for file in tmp_path.glob("*.closed")] == ["3"] * 24, "every environment is closed"
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    for line in lines:  # the last sample: prompt, second turn (";+1;" and at most 3 tokens), then ";+2;" and the answer
        assert line["response"].startswith(";+2;") and line["samples"] == 3
        assert len("a+0=;+1;") < line["prompt_tokens"] <= len("a+0=;+1;") + 3


def test_rollouts_of_a_prompt_have_one_seed(tmp_path):
    write_lines(tmp_path, seed=None)
    run_ranks(1, "tests.jobs.rl.jobs:run", job_of(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    starts: dict[str, set[str]] = {}
    for line in lines:
        starts.setdefault(line["prompt"], set()).add(line["response"][:4])
    assert all(len(found) == 1 for found in starts.values()) and len({s[0] for f in starts.values() for s in f}) > 1


def texts_of(folder: Path, **arguments: Any) -> tuple[list[dict[str, Any]], Any]:
    """Lines of rollouts.jsonl of a job with a character tokenizer of transformers, and this tokenizer."""
    model = folder / "model"
    tiny.write_model(model, "qwen3")
    tokenizer = tiny.write_tokenizer(model)
    write_lines(folder)
    made = job_of(folder, **arguments)
    del made["tokenizer"], made["actor_train"]["model_args"]["architecture"]
    run_ranks(1, "tests.jobs.rl.jobs:run", made | {"pretrain": str(model), "sequence_length": 200})
    lines = (folder / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], tokenizer


@pytest.mark.models
def test_texts_of_turns_have_their_places(tmp_path):
    """A turn reads those before it as text alone; braces around other words stay."""
    form = "{instruction} {turn} {turns_done} {turns_left} {history} {observation} {x}"
    more = {"history": 3, "max_turns": 4, "action_pattern": "()", "observation_format": form}
    lines, tokenizer = texts_of(tmp_path, environment="Teller", **more)
    text = tokenizer.decode(tokenizer.encode("go 2 1 3 (turn 1, observation: a, action: , reward: 1.5) b0 {x}"))
    for line in lines:
        assert line["response"].startswith(text) and line["prompt_tokens"] == len("a+0=")
        assert (line["samples"], line["turns"], line["reward"]) == (2, 2, 3)


@pytest.mark.models
@pytest.mark.parametrize(
    ("more", "told", "reward"),
    [
        ({}, "b[1-9]", 3),
        ({"environment_args": {"valid": False}}, "b[1-9]", 2),
        ({"action_pattern": "(no)(way)"}, "b0", 2),
        ({"action_pattern": "(.*)"}, "b[1-9]", 3),
        ({"action_pattern": "(.*)()"}, "b0", 3),
    ],
)
def test_a_text_without_an_action_has_a_penalty(tmp_path, more, told, reward):
    """The environment reads the action alone, and the instruction precedes the first observation."""
    lines, _ = texts_of(tmp_path, environment="Teller", format_penalty=-0.5, **more)
    assert all(line["reward"] == reward and line["response"].startswith("go\na") for line in lines)
    read = [bool(re.search(told, line["response"])) for line in lines]
    assert sum(read) > len(lines) / 2 and (told != "b0" or all(read)), "some answers are empty"


@pytest.mark.models
@pytest.mark.parametrize("history", [None, 1])
def test_a_chat_is_what_the_template_renders(history, tmp_path):
    """Two turns by transformers' own rendering of the conversation, ended by a stop token and by the limit."""
    folder = tmp_path / "model"
    tiny.write_model(folder, "qwen3")
    tokenizer = tiny.write_tokenizer(folder)
    messages = [{"role": "system", "content": "be brief"}]
    write_lines(tmp_path, messages=messages)
    made = job_of(tmp_path, chat=True, history=history, system="hi", observation_format="now {observation}")
    made["rollout_args"]["environment_args"] = {"turns": 2}
    del made["tokenizer"], made["actor_train"]["model_args"]["architecture"]
    run_ranks(1, "tests.jobs.rl.jobs:run", made | {"pretrain": str(folder)})
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    ends = set()
    for line in lines:
        level = int(line["prompt"][2])
        chat = [{"role": "system", "content": "hi"}, *messages, {"role": "user", "content": f"now {level}+{level}="}]
        start = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if history is None:
            first, found, _ = line["response"].partition("<u>now +1$<a>")
            assert found and line["prompt_tokens"] == len(tokenizer.encode(start))
            count = len(tokenizer.encode(first))
            assert first.endswith("$") and count <= 4, "at most three tokens, and an end token if it had none"
            ends.add(count == 4)
        else:
            assert line["samples"] == 2 and 1 <= line["prompt_tokens"] - len(tokenizer.encode(start)) <= 3, "one turn"
            assert line["response"].removeprefix("$").startswith("<u>now +1$<a>")
    assert history == 1 or ends == {True, False}


@pytest.mark.models
def test_what_stands_between_two_turns(tmp_path):
    """Whatever the observation says, and with the template's variables."""
    tiny.write_tokenizer(tmp_path, tiny.PLAIN_TEMPLATE.replace("'<a>'", "'<a>' + mood|default('')"))
    template = ChatTemplate(HFTokenizer(str(tmp_path)))
    for text in ("b", "the assistant's text", "a the assistant's text. b"):
        assert template.text_between_turns({"role": "user", "content": text}) == f"$<u>{text}$<a>"
    assert template.text_between_turns({"role": "user", "content": "b"}, {"mood": "no"}) == "$<u>b$<a>no"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("more", "line", "words"),
    [
        ({"environment": "Talks"}, {}, "leaves no room within sequence_length"),
        ({"observation_format": "{text}"}, {}, "observation_format is '{text}': it must contain {observation}"),
        ({"observation_format": "{observation}{history}"}, {}, "observation_format has {history}: set history"),
        ({"action_pattern": "("}, {}, "action_pattern '(' is no regular expression"),
        ({"environment_args": {"rounds": 3}}, {}, "unexpected keyword argument 'rounds'"),
        ({"environment": "Missing"}, {}, "Missing"),
        ({"environment": "Numbers"}, {}, "the environment's step returned 3 as the observation: return a text"),
        ({"chat": True}, {}, "need a tokenizer with a chat template"),
        ({"max_turns": 0}, {}, "max_turns"),
        ({"history": -1}, {}, "history"),
        ({}, {"seed": -1}, "seed is -1: give a whole number, at least 0"),
    ],
)
def test_faults_name_their_cure(tmp_path, more, line, words):
    write_lines(tmp_path, **line)
    (refused,) = run_ranks(1, "tests.jobs.rl.jobs:refusal", job_of(tmp_path, **more))
    assert words in refused and "rollout 0" in refused


# ---- FrozenLake


def test_the_lake_is_gymnasiums():
    """The shortest way through the drawn map arrives, a hole ends the episode, and other texts move nobody."""
    lake = FrozenLake(size=3)
    text, facts = lake.reset(seed=4, options={})
    rows = text.rstrip("=").split("/")
    assert rows[0][0] == "P" and rows[2][2] == "G" and facts["state"] == "4 0"
    assert lake.step("x")[:4] == (text, 0.0, False, False)
    ways: dict[tuple[int, int], str] = {(0, 0): ""}
    while (2, 2) not in ways:
        for (row, column), way in list(ways.items()):
            for move, to in zip("ldru", ((0, -1), (1, 0), (0, 1), (-1, 0)), strict=True):
                place = row + to[0], column + to[1]
                if set(place) <= {0, 1, 2} and rows[place[0]][place[1]] != "H":
                    ways.setdefault(place, way + move)
    *before, last = ways[2, 2]
    assert all(lake.step(move)[1:4] == (0.0, False, False) for move in before)
    _, reward, is_over, _, facts = lake.step(last)
    assert reward == 1 and is_over and facts["arrived"]


def shares(folder: Path, *overrides: str) -> list[float]:
    """Shares of episodes of the example that arrive, step by step."""
    run_example("frozen_lake", folder, *overrides)
    name = next((one.split("=")[1] for one in overrides if one.startswith("exp_name=")), "frozen_lake")
    return [row["mark/arrived"] for row in read_metrics(folder / "runs" / name / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["adv_estimator=grpo", "adv_estimator=gigpo", "async_generation_ratio=1"])
def test_the_lake_is_learned_and_the_control_learns_nothing(how, tmp_path, report):
    learned = shares(tmp_path, how)
    control = shares(tmp_path, how, "control=shuffled", "exp_name=control", "max_steps=15")
    last, random = sum(learned[-5:]) / 5, sum(control[-5:]) / 5
    report(f"{how}: share of episodes that arrive {learned[0]:.2f} -> {last:.2f}, control {random:.2f}")
    assert last > 0.5 and random < 0.2
