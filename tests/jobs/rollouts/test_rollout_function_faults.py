"""Faults of rollout functions: each is an error with function, sample, field and cure, and nothing hangs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutPrompt, load_rollout_function
from roll_batching.jobs.rollouts.function_calls import FunctionCalls
from roll_batching.jobs.texts import CharTokenizer
from roll_batching.strategy import GenerationSettings
from tests.jobs.rl.jobs import settings
from tests.jobs.rollouts.rollout_functions import FAULTS
from tests.support.tiny_job import VOCABULARY

pytestmark = pytest.mark.bad_input
HERE = "tests.jobs.rollouts.rollout_functions:"
TOKENIZER = CharTokenizer(VOCABULARY, eos="$", pad=".")


def run_calls(
    name: str,
    *,
    prompts: Any = None,
    has_reward: bool = False,
    needs_states: bool = False,
    timeout: float = 20,
    max_calls: int = 9,
    records: Any = None,
    slow_sampling: bool = False,
    **arguments: Any,
) -> Any:
    """The samples of four calls of `name`; every generation is `ab$`, cut at its limit. `prompts` gets the prompts.

    `slow_sampling`: tokens are made only when the event loop has ended.
    """
    path = HERE + name
    function = LoadedRolloutFunction(
        path=path,
        function=load_rollout_function(path, arguments),
        arguments=arguments,
        timeout=timeout,
        max_calls=max_calls,
        sequence_length=64,
        has_reward=has_reward,
        needs_states=needs_states,
    )
    given = [
        RolloutPrompt(
            tokens=TOKENIZER.encode(f"a+{i}="), text=f"a+{i}=", record=records or {"level": i}, sample=i, seed=i
        )
        for i in range(4)
    ]
    sampling = GenerationSettings(max_new_tokens=8, eos_token_id=TOKENIZER.eos_token_id, vocab_size=43)
    made = [*TOKENIZER.encode("ab"), TOKENIZER.eos_token_id]
    if prompts is not None:
        prompts += given
    with FunctionCalls(function, given, TOKENIZER, sampling) as calls:
        while requests := calls.take():
            limits = [request.max_new_tokens for request in requests]
            if slow_sampling:
                calls._thread.join(20)
            calls.answer(requests, [(made[:limit], [-0.5, -0.25, -1.0][:limit]) for limit in limits])
        return calls.collect(range(len(given)))


WORDS = {
    "nothing": "it returned None; return a roll_batching.jobs.rollouts.RolloutSample, or a list of them",
    "no samples": "it returned no sample",
    "a list": r"samples\[1\]: it returned a dict; return a roll_batching",
    "one sample twice": "it returned an object that it has returned for another sample",
    "a fault in the second sample": r"samples\[1\]: loss_mask counts no token",
    "no reward in any sample": "the reward of each of its 2 samples is None",
    "marks without a reward": r"samples\[1\]: marks is set, and reward is None",
    "a dict": "it returned a dict",
    "text": "tokens is a str, 'abc'",
    "no tokens": "tokens is empty",
    "float tokens": r"tokens\[0\] is a float, .*give token ids",
    "a token too large": r"tokens\[2\] is 43, and the vocabulary has the ids 0 to 42",
    "a negative token": r"tokens\[0\] is -1",
    "a huge token": r"tokens\[0\] is 1180591620717411303424",
    "a token of 5,000 digits": r"tokens\[0\] is a number of 16,610 bits, and the vocabulary has",
    "a square": r"tokens is a ndarray.* of shape \(2, 2\)",
    "short mask": "loss_mask has 1 values for 3 tokens",
    "long mask": "loss_mask has 99 values for 3 tokens",
    "no mask": "loss_mask counts no token",
    "weights": r"loss_mask\[0\] is a float, 0.5: give 1 for sampled tokens",
    "no log-probs": "log_probs is missing",
    "short log-probs": "log_probs has 1 values for 3 tokens",
    "a missing log-prob": r"log_probs\[2\] is None, and loss_mask counts that token",
    "nan": r"log_probs\[2\] is nan, which is no logarithm",
    "infinite": r"log_probs\[2\] is -inf",
    "a probability": r"log_probs\[2\] is 0.7, which is no logarithm of a probability",
    "a text for a log-prob": r"log_probs\[2\] is a str",
    "a log-prob of 5,000 digits": r"log_probs\[2\] is a number of 16,610 bits, which is no logarithm",
    "a log-prob below fp32": r"log_probs\[2\] is -1e\+39, which is no logarithm",
    "a complex log-prob": r"log_probs\[2\] is a complex64",
    "no reward": "reward is None, and the job has no reward function",
    "a reward of 5,000 digits": r"reward\[1\]: it returned a int, .*which no float can hold",
    "reward nan": "reward: the reward is nan",
    "reward text": "reward: it returned a str",
    "no turn rewards": "reward is empty",
    "turn reward infinite": r"reward\[1\]: the reward is inf",
    "marks": r"marks: Score.marks\['x'\] is a int, 3",
    "finished": "finished is a str, 'yes'",
    "too long": "tokens has 999 after the prompt's 4, and the job's sequence_length is 64: end the rollout earlier",
    "the prompt twice": "tokens begins with the prompt's tokens, which would be in the sample twice",
}


def test_every_fault_has_its_words():
    assert WORDS.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_sample_is_named(fault):
    where = rf"rollout function {HERE}faulty failed on rollout 2 \(prompt 'a\+2='\): "
    with pytest.raises(DataError, match=where + WORDS[fault]):
        run_calls("faulty", fault=fault)


def test_a_reward_beside_a_reward_function_is_refused():
    with pytest.raises(DataError, match=r"rollout \d .*reward is set, and the job has a reward function as well"):
        run_calls("three_turns", has_reward=True)
    assert all(rollout.score is None for rollout in run_calls("one_turn", has_reward=True))


def test_rewards_marks_and_turns_of_a_rollout_are_those_of_its_samples():
    first, second = run_calls("turns_as_samples")[:2]
    assert [len(rollout.samples) for rollout in (first, second)] == [2, 3]
    assert second.score.reward == pytest.approx(1 + 0.01) and second.score.marks == {"odd": True}
    assert second.calls == 3 and first.score.marks == {"odd": False}
    assert run_calls("turns_as_samples", has_reward=True, reward=False)[0].score is None


def test_states_and_rewards_of_turns_are_checked():
    def made(states: Any, reward: Any) -> Any:
        return run_calls("two_states", needs_states=True, states=states, reward=reward)

    episode = made(["a", "b" * 999], [0.5, 1])[0].episode
    assert episode.states[0] == "'a'" and len(episode.states[1]) == 32 and episode.rewards == (0.5, 1.0)
    assert made(["3", 3], [0, 0])[0].episode.states == ("'3'", "3"), "a text and an integer differ"
    long = made([10**5000, 10**5000 + 1], [0, 0])[0].episode.states
    assert len(set(long)) == 2 and max(map(len, long)) == 32, "more digits than Python writes"
    for states, reward, words in (
        (None, [0, 0], "states is None, and adv_estimator: gigpo .*each of the 2 turns"),
        (["a"], [0, 0], "states has 1 values, and loss_mask has 2 turns"),
        (["a", "b"], [0, 0, 0], "reward has 3 values, and loss_mask has 2 turns"),
        (["a", "b"], 1.0, "reward is a float, 1.0, and adv_estimator: gigpo"),
        ("ab", [0, 0], "states is a str"),
        ([1.5, "b"], [0, 0], r"states\[0\] is a float"),
        ([True, "b"], [0, 0], r"states\[0\] is a bool"),
        (["a", "b"], [0, float("nan")], r"reward\[1\]: the reward is nan"),
    ):
        with pytest.raises(DataError, match=words):
            made(states, reward)
    assert all(rollout.episode is None for rollout in run_calls("two_states", states=None, reward=1.0))


def test_changes_of_a_prompt_reach_neither_its_sample_nor_its_reward():
    prompts: list[Any] = []
    rollouts = run_calls("lengthens", prompts=prompts)
    assert [prompt.tokens for prompt in prompts] == [TOKENIZER.encode(prompt.text) for prompt in prompts]
    assert [prompt.record for prompt in prompts] == [{"level": i} for i in range(4)]
    assert {len(rollout.samples[0].tokens) for rollout in rollouts} == {6}, (
        "two turns of three tokens, without the prompt"
    )


def test_one_object_for_two_samples_is_refused():
    with pytest.raises(DataError, match="an object that it has returned for another sample"):
        run_calls("same_object")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"rollout 2 .*KeyError: \"the tool's reply.* at .*rollout_functions.py:\d+. Handle errors of tools"),
        ("exits", r"rollout 0 .*SystemExit: 3"),
        ("cancels", r"rollout 0 .*CancelledError"),
        ("asks_for_ever", "the rollout calls its client more than 9 times.*rollout_max_calls"),
        ("fills_up", "64 tokens, and sequence_length is 64: nothing fits behind them"),
        ("asks_without_tokens", "got no tokens: pass the whole context"),
        ("asks_with_text", "tokens is a str: give token ids"),
        ("asks_for_unknown", r"tokens\[1\] is 43: give token ids of the model, 0 to 42"),
        ("asks_for_nothing", "max_new_tokens=0 must be an integer of at least 1"),
        ("asks_elsewhere", "must be awaited in the event loop of the rollout function"),
    ],
)
def test_a_call_that_fails_is_named_with_its_line(name, words):
    with pytest.raises(DataError, match=rf"rollout function {HERE}{name} failed on .*{words}"):
        run_calls(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "never_returns",
            r"neither returned nor called its client within 1.5 s \(rollout_function_timeout\) in rollout 2",
        ),
        ("blocks", r"has blocked its event loop at .*rollout_functions.py:\d+ in rollout 2.*asyncio.to_thread"),
        ("hangs_in_a_thread", r"within 1.5 s .* in rollout 0 \(at .*rollout_functions.py:\d+\), rollout 1 \(at"),
    ],
)
def test_a_call_that_never_returns_ends_at_the_time_limit(name, words):
    started, before = time.monotonic(), _event_loops()
    with pytest.raises(DataError, match=words):
        run_calls(name, timeout=1.5)
    assert time.monotonic() - started < 30
    assert _event_loops() - before == (name == "blocks"), "one that blocks ends with the process"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("starts_a_task_that_exits", r"failed in a task or callback that it started: SystemExit: 4.* Handle errors"),
        ("exits_in_a_callback", r"failed in a task or callback that it started: SystemExit: 4.* Handle errors"),
        ("stops_in_a_thread", r"failed on rollout \d .*RuntimeError: a function in a thread raised StopIteration"),
    ],
)
def test_what_asyncio_does_not_pass_on_is_an_error_at_once(name, words):
    """The time limit would tell it otherwise: after ten minutes, and without the cause."""
    with pytest.raises(DataError, match=f"rollout function {HERE}{name} {words}"):
        run_calls(name, timeout=15)


def test_an_event_loop_that_ends_while_tokens_are_sampled():
    with pytest.raises(DataError, match="in a task or callback that it started: SystemExit: 4"):
        run_calls("starts_a_task_that_exits", slow_sampling=True)


def test_a_rollout_returns_while_a_call_is_pending():
    assert all(len(rollout.samples[0].tokens) in (1, 3) for rollout in run_calls("races"))


def test_a_record_that_cannot_be_copied():
    deep: Any = {}
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(DataError, match="failed on rollout 0 .*RecursionError"):
        run_calls("one_turn", records=deep, timeout=15)


def _event_loops() -> int:
    return sum(thread.name == "rollout function" for thread in threading.enumerate())


def test_a_call_that_blocks_is_reported(caplog):
    samples = run_calls("blocks_briefly")
    assert all(sample is not None for sample in samples)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "blocks its event loop" in message and "rollout_functions.py" in message and "(rollout 2)" in message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (HERE + "not_async", "is not async: write it as `async def`"),
        (HERE + "yields", "yields: it must return its samples"),
        (HERE + "Callable_", "is a class"),
        (HERE + "NUMBER", "it is a int, not a function"),
        (HERE + "two_arguments", "cannot be called with a prompt, a client, a tokenizer"),
        (HERE + "missing", "has no 'missing'"),
        ("tests.no_such_module:rollout", "cannot import 'tests.no_such_module'"),
        ("tests..jobs:rollout", "write it as package.module:name"),
        ("../tests/jobs:rollout", "write it as package.module:name"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(path, words):
    with pytest.raises(ConfigError, match=words):
        load_rollout_function(path, {})


def test_arguments_that_it_does_not_take_are_refused():
    with pytest.raises(ConfigError, match=r"rollout_args \['speed'\].*unexpected keyword argument 'speed'"):
        load_rollout_function(HERE + "one_turn", {"speed": 3})
    load_rollout_function(HERE + "an_object", {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rollout_function": "roll"},
            "rollout_function: 'roll' names no function: write it as package.module:function",
        ),
        ({"rollout_function": 7}, "rollout_function"),
        ({"rollout_args": {"x": 1}}, "rollout_args: is read by a rollout function only: set rollout_function"),
        ({"rollout_max_calls": 7}, "rollout_max_calls: is read by a rollout function only"),
        ({"rollout_function": "a:b", "rollout_max_calls": 0}, "rollout_max_calls"),
        ({"rollout_function": "a:b", "rollout_function_timeout": 0}, "rollout_function_timeout"),
        ({"rollout_function": "a:b", "rollout_function_timeout": float("nan")}, "rollout_function_timeout"),
        ({"rollout_function": "a:b", "rollout_args": [1]}, "rollout_args"),
    ],
)
def test_wrong_keys_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigFileError, match=words):
        config_from_dict(settings(tmp_path, **changes))


def test_a_job_needs_a_reward_or_a_rollout_function(tmp_path):
    job = settings(tmp_path)
    del job["reward_function"]
    with pytest.raises(ConfigFileError, match="or a rollout_function that returns rewards"):
        config_from_dict(job).check_runnable()
    config_from_dict({**job, "rollout_function": "a:b"}).check_runnable()
