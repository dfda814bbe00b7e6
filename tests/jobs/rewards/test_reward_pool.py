"""Reward pools: domains, parallel workers, failure policies, limits, and the registered functions."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rewards import Completion, exact_match
from roll_batching.jobs.rewards.code import check_run, code_tests
from roll_batching.jobs.rewards.pool import RewardDomain, RewardPool, reward_of
from roll_batching.jobs.rewards.process import RewardLimits
from tests.jobs.launch.commands import wait_for
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

HERE = "tests.jobs.rewards.test_reward_pool:"


def completion(response="#12", **record: Any) -> Completion:
    record = {"prompt": "a+9=", "answer": "12", **record}
    return Completion(
        prompt="a+9=", response=response, finished=True, tokens=len(response), answer=record["answer"], record=record
    )


# ---- called in the reward's process


def sleeps(completion: Completion) -> float:
    time.sleep(0.5)
    return float(completion.response)


def breaks_on_x(completion: Completion) -> float:
    """What a response asks for."""
    if completion.response == "raise":
        raise RuntimeError("broken")
    if completion.response == "hang":
        time.sleep(60)
    if completion.response == "exit":
        import os

        os._exit(3)
    if completion.response == "memory":
        return float(len(np.ones(1 << 27)))  # 1 GiB
    return 1.0


def fails_for_some(completion: Completion) -> float:
    if completion.tokens % 2:
        raise RuntimeError("odd")
    return completion.tokens / 10


def one(completion: Completion) -> float:
    return 1.0


def two(completion: Completion) -> float:
    return 2.0


# ---- here


def test_processes_work_side_by_side():
    with RewardPool(RewardDomain(path=HERE + "sleeps"), workers=4) as pool:
        pool.score([completion(str(i)) for i in range(4)], range(4), seed=0)  # all four have started
        started = time.monotonic()
        scored = pool.score([completion(str(i)) for i in range(12)], range(12), seed=0)
        assert time.monotonic() - started < 12 * 0.5 * 0.75, "not one after the other"
    assert scored.rewards.tolist() == list(range(12)) and not scored.failed.any()


@pytest.mark.cluster
def test_a_process_that_was_killed_between_two_calls_is_started_again(capfd):
    """No sample is to blame, so none fails under any policy."""
    with RewardPool(RewardDomain(path=HERE + "one"), workers=2) as pool:
        pool.score([completion() for _ in range(4)], range(4), seed=0)
        for child in psutil.Process().children():
            if "rewards.worker" in " ".join(child.cmdline()):
                child.kill()
                while child.status() != psutil.STATUS_ZOMBIE:  # ended, and the pool's to hear of
                    time.sleep(0.01)
        scored = pool.score([completion() for _ in range(4)], range(4), seed=1)
    assert scored.rewards.tolist() == [1.0] * 4 and not scored.failed.any()
    assert "ended by signal 9 (SIGKILL) and is started again" in capfd.readouterr().err


@pytest.mark.parametrize("policy", ["zero", "error"])
def test_a_failure_is_one_samples(policy):
    said = ["fine", "raise", "fine", "hang", "exit", "memory", "fine"]
    limits = RewardLimits(seconds=3, memory=256)
    with RewardPool(RewardDomain(path=HERE + "breaks_on_x"), workers=2, failure=policy, limits=limits) as pool:
        asked = [completion(text) for text in said]
        if policy == "error":
            with pytest.raises(DataError, match="failed on sample 1 .* RuntimeError: broken"):
                pool.score(asked, range(7), seed=0)
            assert pool.score(asked[:1], [0], seed=0).rewards.tolist() == [1]
        else:
            scored = pool.score(asked, range(7), seed=0)
            assert scored.rewards.tolist() == [1, 0, 1, 0, 0, 0, 1]
            assert scored.failed.tolist() == [False, True, False, True, True, True, False]
            words = " ".join(scored.failures)
            for expected in ("broken", "did not return within 3 s", "exit code 3", "MemoryError"):
                assert expected in words
        pids = [process._process.pid for process in pool._processes() if process._process is not None]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_domains_by_tag():
    domains = RewardDomain(name="a", path=HERE + "one", tags=("x", "y")), RewardDomain(name="b", path=HERE + "two")
    with RewardPool(*domains, tag="kind") as pool:
        scored = pool.score(
            [completion(kind="x"), completion(kind="z"), completion(), completion(kind="y")], range(4), seed=0
        )
        assert scored.rewards.tolist() == [1, 2, 2, 1] and scored.domains == ["a", "b", "b", "a"]
    with pytest.raises(DataError, match=r"sample 7: no reward is for its tag \('kind': 'z'\)"):
        RewardPool(domains[0], tag="kind").score([completion(kind="z")], [7], seed=0)


def test_exact_match():
    assert exact_match(completion(" 12\n")).reward == 1
    assert exact_match(completion("so: 12"), after="so:").reward == 1
    assert exact_match(completion("12"), after="so:") == exact_match(completion("13"), after="12")
    assert exact_match(completion("yes", answer="Yes")).reward == 0
    assert exact_match(completion("yes", answer="Yes"), ignore_case=True).reward == 1


@pytest.mark.parametrize(
    ("answer", "response", "reward", "has_answer"),
    [
        ("12", r"so it is $\boxed{12}$", 1, True),
        (r"\frac{1}{2}", "the result is 0.5", 1, True),
        ("x^2+1", r"\boxed{1+x^2}", 1, True),
        ("12", r"\boxed{13}", 0, True),
        ("12", "no idea", 0, False),
        ("she earns $5*3=$<<5*3=15>>15, then $1,000.\n#### 1,015", "so 1015", 1, True),  # GSM8K's form
    ],
)
def test_math_verify(answer, response, reward, has_answer):
    pytest.importorskip("math_verify")
    from roll_batching.jobs.rewards.mathematics import math_verify

    score = math_verify(completion(response, answer=answer))
    assert (score.reward, score.marks) == (reward, {"has_answer": has_answer})
    assert math_verify(completion(response, answer=answer), after="</think>").reward == 0
    assert math_verify(completion(f"7</think>{response}", answer=answer), after="</think>").reward == reward


TESTS = json.dumps(
    [{"stdin": "2\n", "expected_stdout": "4"}, {"assert_code": "assert double(3) == 6"}, "assert double(0) == 0"]
)


def wrote(code):
    return completion(f"Here:\n```python\n{code}\n```\n", test_cases=TESTS)


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("double = lambda x: 2 * x\nimport sys\ns = sys.stdin.read()\nif s: print(double(int(s)), ' ')", 1),
        ("double = lambda x: 2 * x", 2 / 3),
        ("double = lambda x: x", 1 / 3),
        ("import sys; sys.exit(0)", 0),
        ("while True: pass", 0),
        ("x = 'x' * (1 << 31)", 0),
        ("import os, signal; os.kill(os.getppid(), 0); os.kill(os.getpid(), 9)", 0),
        ("def", 0),
        ("open('big', 'wb').write(b'x' * (1 << 26))", 0),
        ("double = lambda x: 2 * x  # \0", 0),
        (f"double = lambda x: 2 * x  # {'x' * 200_000}", 2 / 3),
    ],
)
def test_code_against_tests(code, reward):
    score = code_tests(wrote(code), run="subprocess", seconds=2, memory=512)
    assert score.reward == pytest.approx(reward)
    assert score.marks == {"has_code": True, "passes_all": reward == 1, "asserts_nothing": False}


def test_code_ends_with_the_process_that_runs_it():
    mark = f"{os.getpid()}4321"
    code = f"import subprocess\nsubprocess.run(['sleep', '{mark}'])"

    def runs():
        return any(mark in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))

    arguments = {"run": "subprocess", "seconds": 300}
    domain = RewardDomain(path="roll_batching.jobs.rewards.code:code_tests", arguments=arguments)
    with RewardPool(domain, limits=RewardLimits(seconds=5)) as pool:
        with pytest.raises(DataError, match="did not return within 5 s"):
            (process,) = pool._workers[0]
            process.call(wrote(code), 0, 0)
            wait_for(runs, 5)
            while process.result() is None:
                time.sleep(0.05)
    wait_for(lambda: not runs(), 5)


def test_code_through_a_command(tmp_path):
    """The hook for containers: what runs is the command, with the program as its last word."""
    (tmp_path / "box").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nexec python "$@"\n')
    (tmp_path / "box").chmod(0o755)
    code = "double = lambda x: 2 * x\nimport sys\ns = sys.stdin.read()\nif s: print(double(int(s)))"
    assert code_tests(wrote(code), run=[str(tmp_path / "box"), "-c"], all_or_nothing=True).reward == 1
    assert code_tests(wrote("\0"), run=[str(tmp_path / "box"), "-c"]).reward == 0
    calls = (tmp_path / "calls").read_text()
    assert calls.count("-c from string import *") == 1 and calls.count('-c """Stand-alone program') == 2
    assert code_tests(completion("no code", test_cases=TESTS), run="subprocess").marks["has_code"] is False


STAND_IN = """#!/usr/bin/env python
# Stands in for docker: `run` starts a "container" that is no child of its client's group and outlives it; `rm` ends it.
import os, subprocess, sys
action, *words = sys.argv[1:]
home = os.path.dirname(os.path.abspath(__file__))
if action == "run":
    assert words[0] == "--name" and words[2:5] == ["--rm", "-i", "python:3"], words
    container = subprocess.Popen([sys.executable, *words[6:]], start_new_session=True)
    open(os.path.join(home, words[1]), "w").write(str(container.pid))
    code = container.wait()
    os.remove(os.path.join(home, words[1]))
    sys.exit(code)
assert action == "rm" and words[0] == "--force", words
file = os.path.join(home, words[1])
os.kill(int(open(file).read()), 9)
os.remove(file)
"""


@pytest.mark.slow
@pytest.mark.bad_input
def test_no_container_outlives_its_limit_or_the_process_that_judges(tmp_path):
    client = tmp_path / "docker"
    client.write_text(STAND_IN)
    client.chmod(0o755)
    run = [str(client), "run", "--rm", "-i", "python:3", "python", "-c"]
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"

    def is_gone():
        pid = int((tmp_path / "pid").read_text())
        (tmp_path / "pid").unlink()
        wait_for(lambda: not psutil.pid_exists(pid), 20)
        wait_for(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["docker"], 20)

    assert code_tests(wrote(code), run=run, seconds=3).reward == 0
    is_gone()
    path, arguments = "roll_batching.jobs.rewards.code:code_tests", {"run": run, "seconds": 300}
    with RewardPool(RewardDomain(path=path, arguments=arguments), limits=RewardLimits(seconds=5)) as pool:
        with pytest.raises(DataError, match="did not return within 5 s"):
            pool.score([wrote(code)], [0], seed=0)
    is_gone()
    fine = "double = lambda x: 2 * x\nimport sys\ns = sys.stdin.read()\nif s: print(double(int(s)))"
    assert code_tests(wrote(fine), run=run, seconds=60).reward == 1
    assert [path.name for path in tmp_path.iterdir()] == ["docker"]


@pytest.mark.bad_input
def test_code_does_not_run_unless_asked():
    named = {"run": ["podman", "run", "--name=mine", "python:3", "python", "-c"]}
    for arguments, words in (
        ({}, "nothing says that it may"),
        ({"run": "docker"}, "a command as a list of words"),
        (named, "leave --name out"),
    ):
        with RewardPool(RewardDomain(path="roll_batching.jobs.rewards.code:code_tests", arguments=arguments)) as pool:
            with pytest.raises(ConfigError, match=words):
                pool.start()
    check_run("subprocess", seconds=3)
    with pytest.raises(ValueError, match="holds no list of tests"):
        code_tests(completion("```python\n1\n```"), run="subprocess")


@pytest.mark.config
def test_the_section_rewards(tmp_path):
    base = settings(tmp_path)
    del base["reward_function"]
    rewards = {"math": {"reward_function": "final_answer", "tag_included": ["m"]}, "rest": {"reward_function": "a:b"}}
    pool = reward_of(config_from_dict({**base, "rewards": rewards, "reward_workers": 3}))
    assert [(d.name, d.path, d.tags) for d in pool.domains] == [
        ("math", "roll_batching.jobs.rewards:final_answer", ("m",)),
        ("rest", "a:b", None),
    ]
    wrong = {
        "a": {"reward_function": "final_answr"},
        "b": {"reward_function": "exact_match", "tags": ["m"]},
        "c": {"reward_args": {}},
    }
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict({**base, "rewards": wrong})
    said = {".".join(problem.path): problem.message for problem in caught.value.problems}
    assert "did you mean 'final_answer'" in said["rewards.a.reward_function"]
    assert "unknown key" in said["rewards.b.tags"] and said["rewards.c.reward_function"] == "is missing"
    twice = {"a": {"reward_function": "a:b"}, "b": {"reward_function": "a:b"}}
    tags = {name: {"reward_function": "a:b", "tag_included": ["m"]} for name in "cd"}
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict({**base, "rewards": {**twice, **tags}, "reward_function": "final_answer"})
    said = {".".join(problem.path): problem.message for problem in caught.value.problems}
    assert said.keys() == {"reward_function", "rewards.b.tag_included", "rewards.d.tag_included"}


def test_a_job_with_two_rewards_that_drops_what_fails(tmp_path):
    write_data(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tagged = [{**line, "kind": "even" if i % 2 else "some"} for i, line in enumerate(lines)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tagged))
    job = settings(tmp_path, warmup=None, eval_samples=0, rollout_samples=-1, reward_failure="drop", reward_workers=2)
    del job["reward_function"]
    job["rewards"] = {
        "whole": {"reward_function": "tests.jobs.rl.jobs:length", "tag_included": ["even"]},
        "half": {"reward_function": HERE + "fails_for_some", "tag_included": ["some"]},
    }
    job["actor_train"]["data_args"]["tag"] = "kind"
    (seen, _) = run_ranks(2, "tests.jobs.rl.jobs:run_and_count", job)
    row = next(row for row in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if row["step"] == 1)
    said = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    first = [line for line in said if line["step"] == 1]
    failed = [line for line in first if line["failed"]]
    assert failed and row["reward_failures"] == len(failed)
    assert {line["domain"] for line in failed} == {"half"} and all(line["response_tokens"] % 2 for line in failed)
    whole = [line["reward"] for line in first if line["domain"] == "whole"]
    assert row["reward/whole"] == pytest.approx(np.mean(whole)) and "reward/half" in row
    counted = sum(tokens for _, tokens in seen[:2])  # two mini-batches of the first step
    assert counted == sum(line["response_tokens"] for line in first if not line["failed"])


@pytest.mark.bad_input
def test_a_prompt_without_a_reward_is_named(tmp_path):
    from roll_batching.jobs.inputs import load_inputs

    write_data(tmp_path)
    job = settings(tmp_path)
    del job["reward_function"]
    job["rewards"] = {"a": {"reward_function": "final_answer", "tag_included": ["m"]}}
    with pytest.raises(DataError, match=r"prompts.jsonl:1: no reward is for its tag \('tag': None\)"):
        load_inputs(config_from_dict(job))


def test_a_dropped_reward_is_its_groups_mean():
    from roll_batching.jobs.rollouts.rollout import impute_failed

    rewards = np.array([1.0, 0.0, 4.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0])
    failed = np.array([False, True, False, True, True, True, False, False, False])
    domains = np.full(9, "    ")
    scores = SimpleNamespace(rewards=rewards, failed=failed, domains=domains)
    filled = impute_failed(scores, 3)
    assert filled.tolist() == [1, 2.5, 4, 2.2, 2.2, 2.2, 2, 2, 2], "a group without any takes its domain's"
    domains[:6] = "code"
    assert impute_failed(scores, 3).tolist() == [1, 2.5, 4, 2.5, 2.5, 2.5, 2, 2, 2]
    domains[3:6] = "none"
    assert impute_failed(scores, 3)[3:6].tolist() == [0, 0, 0], "a domain without any reward"
