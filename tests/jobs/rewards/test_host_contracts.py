"""Reward functions of verl, slime and ROLL, called by their contracts in the worker processes of rewards."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config.rewards import REWARDS
from roll_batching.jobs.rewards import Completion, load_reward
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool
from roll_batching.jobs.rewards.process import RewardLimits

VERL = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """As in verl's own files: keywords, and a dict whose `score` is the reward."""
    assert extra_info["num_turns"] == 2 and extra_info["rollout_reward_scores"] == {}
    if data_source == "dict":
        return {"score": 0.5 + bonus, "acc": solution_str == ground_truth, "length": len(solution_str)}
    return float(solution_str == ground_truth) + extra_info["index"] + bonus


async def slow(data_source, solution_str, ground_truth, extra_info):
    import asyncio
    await asyncio.sleep(0)
    return {"score": len(solution_str)}


def batched(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    assert isinstance(solution_strs, list) and [extra["index"] for extra in extra_infos]
    return [scale * (a == b) for a, b in zip(solution_strs, ground_truths)]


def broken(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1} if solution_str == "dict" else [][3]


def two(data_sources, solution_strs, ground_truths, extra_infos):
    return [1, 2]


def hangs(data_source, solution_str, ground_truth, extra_info):
    import time
    time.sleep(60) if solution_str == "hang" else None
    return 1


NUMBER = 3
'''
SLIME = """
async def reward_func(args, sample, **kwargs):
    assert sample.reward is None if hasattr(sample, "reward") else True
    level = sample.metadata.get("level", 0)
    done = sample.status == type(sample).Status.COMPLETED
    return {"score": level + (sample.response == sample.label), "done": float(done), "scale": getattr(args, "scale", 1)}


async def asks(args, sample, **kwargs):
    return args.rm_url


def plain(args, sample):
    return sample.response_length


def lists(args, samples):
    return [sample.response_length for sample in samples]


def tokens(args, sample):
    return len(sample.tokens)
"""
ROLL = """
def reward_fn(response, ground_truth, reward_type="loose"):
    right = response == ground_truth
    return response, (1.0 if right else {"loose": -1.0, "strict": -2.0}[reward_type]), True, right
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in (("verl_rewards", VERL), ("slime_rewards", SLIME), ("roll_rewards", ROLL)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completion(response="a", answer: Any = "a", *, finished=True, **record) -> Completion:
    line = {"data_source": "x", "extra_info": {"index": 2}, "metadata": {"level": 4}, **record}
    return Completion(
        prompt="p", response=response, answer=answer, record=line, finished=finished, tokens=len(response)
    )


def reward(name: str, /, **arguments: Any):
    entry = REWARDS.get(name)
    assert entry is not None
    return load_reward(entry.target, arguments)


def pool(name: str, failure: Any = "error", seconds: float = 5.0, /, **arguments: Any) -> RewardPool:
    entry = REWARDS.get(name)
    assert entry is not None
    domain = RewardDomain(path=entry.target, arguments=arguments)
    return RewardPool(domain, failure=failure, limits=RewardLimits(seconds=seconds))


def test_verls_contract_value_dict_and_keywords(folder):
    score = reward("verl_compute_score", path="verl_rewards.py", reward_kwargs={"bonus": 0.25})
    assert score(completion()) == 3.25 and score(completion("b")) == 2.25
    dictionary = score(completion(data_source="dict"))
    assert (dictionary.reward, dictionary.marks) == (0.75, {"acc": True}), "numbers of a dict are no marks"
    assert (
        reward("verl_compute_score", path=str(folder / "verl_rewards.py"), name="slow")(completion("abc")).reward == 3
    )
    for path in ("verl_rewards", "pkg://verl_rewards"):
        assert reward("verl_compute_score", path=path)(completion()) == 3
    nested = {"target": [1, 2], "numbers": {"a": 3}}
    assert score(completion(nested, nested)) == 3.25, "answers of any type arrive as they stand"


def test_a_record_is_not_changed_by_the_call(folder):
    line = completion()
    reward("verl_compute_score", path="verl_rewards.py")(line)
    assert line.record["extra_info"] == {"index": 2}


def test_verls_batch_form_gets_batches_of_one_and_says_so(folder):
    batched = reward("verl_compute_score", path="verl_rewards.py", name="batched", reward_kwargs={"scale": 2.0})
    assert batched(completion()) == 2.0 and batched(completion("b")) == 0.0
    assert "takes batches, and gets one response at a time" in batched.notice
    assert not reward("verl_compute_score", path="verl_rewards.py").notice
    with pytest.raises(ValueError, match=r"returned \[1, 2\] for a batch of one"):
        reward("verl_compute_score", path="verl_rewards.py", name="two")(completion())


def test_slimes_contract_with_samples_and_options(folder):
    score = reward("slime_custom_rm", path="slime_rewards.reward_func", reward_key="score")
    assert score(completion()) == 5 and score(completion("b")) == 4 and score(completion(info={}, metadata=None)) == 1
    done = reward("slime_custom_rm", path="slime_rewards.reward_func", reward_key="done")
    assert (done(completion()), done(completion(finished=False))) == (1.0, 0.0)
    level = reward("slime_custom_rm", path="slime_rewards.reward_func", reward_key="score", metadata_key="info")
    assert level(completion(info={"level": 9})) == 10
    scaled = reward("slime_custom_rm", path="slime_rewards.reward_func", reward_key="scale", options={"scale": 7})
    assert scaled(completion()) == 7
    assert reward("slime_custom_rm", path="slime_rewards.plain")(completion("abcd")) == 4
    with pytest.raises(ValueError, match=r"args\.rm_url is not set here: add it to reward_args\.options"):
        reward("slime_custom_rm", path="slime_rewards.asks")(completion())
    with pytest.raises(ValueError, match=r"a sample has no tokens here: only prompt, response, .*status"):
        reward("slime_custom_rm", path="slime_rewards.tokens")(completion())
    grouped = reward("slime_custom_rm", path="slime_rewards.lists", grouped=True)
    assert grouped(completion("abcd")) == 4 and "cannot compare samples" in grouped.notice
    with pytest.raises(ValueError, match="which has no 'other'"):
        reward("slime_custom_rm", path="slime_rewards.reward_func", reward_key="other")(completion())


def test_slimes_own_sample_is_used_where_the_function_has_imported_it(folder):
    """A status of another class would equal none."""
    package = folder / "slime" / "utils"
    package.mkdir(parents=True)
    (package / "types.py").write_text(SAMPLE)
    (folder / "slime_rewards.py").write_text(
        "from slime.utils.types import Sample\n\ndef plain(args, sample):\n"
        "    return isinstance(sample, Sample) + 2 * (sample.status is Sample.Status.COMPLETED)\n"
    )
    with pool("slime_custom_rm", path="slime_rewards.plain") as scores:
        found = scores.score([completion(), completion(finished=False)], [0, 1], seed=0)
    assert found.rewards.tolist() == [3.0, 1.0]


SAMPLE = """
import enum
from dataclasses import dataclass, field
@dataclass
class Sample:
    index: int | None = None
    prompt: str = ""
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
"""


def test_plain_functions_of_response_and_answer(folder):
    loose = reward("response_and_answer", path="roll_rewards.py", name="reward_fn", item=1)
    strict = reward(
        "response_and_answer", path="roll_rewards", name="reward_fn", item=1, arguments={"reward_type": "strict"}
    )
    assert (loose(completion()), loose(completion("b")), strict(completion("b"))) == (1.0, -1.0, -2.0)
    with pytest.raises(ValueError, match="which has no 9"):
        reward("response_and_answer", path="roll_rewards", name="reward_fn", item=9)(completion())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("verl_compute_score", {}, "missing a required"),
        ("verl_compute_score", {"path": "gone.py"}, "gone.py is no file: relative paths start at"),
        ("verl_compute_score", {"path": "verl_rewards.py", "name": "none"}, "has no 'none'"),
        ("verl_compute_score", {"path": "verl_rewards.py", "name": "NUMBER"}, "is a int, not a function"),
        ("verl_compute_score", {"path": "gone_module"}, "cannot import 'gone_module'"),
        ("verl_compute_score", {"path": "broken.py"}, "broken.py cannot be imported: ZeroDivisionError"),
        ("verl_compute_score", {"path": "exits.py"}, "exits.py cannot be imported: SystemExit"),
        ("slime_custom_rm", {"path": "reward_func"}, "write package.module.function"),
        ("slime_custom_rm", {"path": "slime_rewards.gone"}, "has no 'gone'"),
        ("response_and_answer", {"path": "roll_rewards.py"}, "missing a required"),
    ],
)
def test_what_cannot_be_loaded_is_named_before_training(folder, name, arguments, words):
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=words), pool(name, **arguments) as started:
        started.start()


def test_a_failing_function_is_named_with_its_line_and_a_hanging_one_ends(folder):
    """In worker processes: the failure belongs to one response, and the others are scored."""
    answers = [completion(response) for response in ("a", "dict", "b")]
    with pool("verl_compute_score", path="verl_rewards.py", name="broken") as scores:
        with pytest.raises(DataError, match=r"sample 7 .*verl_rewards\.py: IndexError.* at .*verl_rewards\.py:22"):
            scores.score([completion("x")], [7], seed=0)
        with pytest.raises(DataError, match="which has no 'score'"):
            scores.score([answers[1]], [0], seed=0)
    responses = [completion(response) for response in ("a", "hang", "b")]
    with pool("verl_compute_score", "drop", 2.0, path="verl_rewards.py", name="hangs") as scores:
        scored = scores.score(responses, [0, 1, 2], seed=0)
    assert scored.rewards.tolist() == [1, 0, 1] and scored.failed.tolist() == [False, True, False]
    assert "did not return within 2 s" in scored.failures[0]


def test_lines_without_a_ground_truth_are_told_apart(folder):
    score = reward("verl_compute_score", path="verl_rewards.py")
    assert "no ground truth" in score.fault(completion(answer=None)) and not score.fault(completion())
    assert not score.fault(completion(answer={"a": 1}))
