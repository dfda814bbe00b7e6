"""What the model said: rollouts.jsonl of a run, and the commands that ask its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.support.commands import run_command
from tests.support.ranks import run_ranks


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A run of one rank, evaluated before its first and after its last step."""
    folder = tmp_path_factory.mktemp("said")
    write_data(folder)
    changes = {"save_steps": 1, "rollout_samples": 5, "reward_function": "tests.jobs.rl.jobs:length"}
    job = settings(folder, **changes)
    run_ranks(1, "tests.jobs.rl.jobs:run", job)
    return job


@pytest.fixture(scope="module")
def run(job):
    from pathlib import Path

    return Path(job["output_dir"]) / "tiny"


def test_a_run_leaves_a_sample_of_its_rollouts(run):
    said, rows = lines(run / "rollouts.jsonl"), [r for r in read_metrics(run / "metrics.jsonl") if r["phase"] == "rl"]
    kinds = [(line["step"], line["kind"], line["version"]) for line in said]
    expected = [(1, "eval", 0)] * 5 + [(1, "train", 0)] * 5 + [(2, "train", 1)] * 5 + [(2, "eval", 2)] * 5
    assert kinds == expected
    train = [line for line in said if line["kind"] == "train" and line["step"] == 1]
    assert [line["id"] for line in train] == [0, 2, 4, 7, 9], "of 12, spread over the prompts"
    assert all(line["reward"] == pytest.approx(line["response_tokens"] / 10) for line in said)
    assert all(line["prompt"].startswith("a+") and line["prompt_tokens"] == len(line["prompt"]) for line in said)
    assert {len(line["response"]) + line["finished"] - line["response_tokens"] for line in said} == {0}
    shown = [line["reward"] for line in said if line["kind"] == "eval" and line["step"] == 2]
    assert rows[-1]["eval_reward"] == pytest.approx(sum(shown) / 5), "five answers, and all of them are shown"


def test_all_of_them_from_all_ranks(tmp_path):
    write_data(tmp_path)
    job = settings(tmp_path, warmup=None, max_steps=1, rollout_samples=-1, eval_samples=0)
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    assert [line["id"] for line in lines(tmp_path / "runs" / "tiny" / "rollouts.jsonl")] == list(range(12))


def test_eval_finds_what_the_run_found(run):
    command = [sys.executable, "-m", "roll_batching.cli", "eval", "--checkpoint", str(run), "--json"]
    done = subprocess.run(
        [*command, "--output", str(run / "answers.jsonl")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, "nothing that its reader cannot change"
    figures, last = json.loads(done.stdout), read_metrics(run / "metrics.jsonl")[-1]
    for name in ("eval_reward", "eval_samples", "eval_response_length_mean"):
        assert figures[name] == last[name]
    before = [line for line in lines(run / "rollouts.jsonl") if line["kind"] == "eval" and line["step"] == 2]
    assert [line["response"] for line in lines(run / "answers.jsonl")] == [line["response"] for line in before]


def test_a_checkpoint_is_asked_with_the_attention_of_its_run(tmp_path):
    from types import SimpleNamespace

    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.run.saved_model import RECORD, _on_one_process

    def asked(backend, *, runs):
        job = settings(tmp_path)
        job["actor_train"]["strategy_args"] = {"strategy_config": {"attention_backend": backend}}
        role = config_from_dict(job).actor_train
        found = _on_one_process(role, SimpleNamespace(path=tmp_path), None, runs=runs)
        return found.strategy_args.strategy_config.attention_backend

    (tmp_path / RECORD).write_text('{"dtype": "float32"}')
    own = "tests.support.own_attention:MaskedSoftmax"
    assert asked(own, runs=True) == own, "nobody knows whether it computes what others do"
    assert asked(own, runs=False) == asked("varlen", runs=True) == "auto"


def test_generate_answers_prompts(run, tmp_path, report):
    out = tmp_path / "said.jsonl"
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a+1="}\n')  # without an answer
    arguments = ("--prompt", "b+2=", "--prompts", tmp_path / "asked.jsonl", "--num-return-sequences", 2, "--greedy")
    done = run_command("generate", "--checkpoint", run / "checkpoints" / "rl-000001", *arguments, "--output", out)
    assert done.returncode == 0, done.stderr
    said = lines(out)
    assert [line["prompt"] for line in said] == ["b+2="] * 2 + ["a+1="] * 2 and {line["version"] for line in said} == {
        1
    }
    assert said[0]["response"] == said[1]["response"] and said[2]["response"] == said[3]["response"]
    report(f"generate: {said[0]}")


@pytest.mark.bad_input
def test_more_new_tokens_than_the_model_has_positions_for_are_refused(run, report):
    checkpoint = run / "checkpoints" / "rl-000001"
    for tokens in (10**9, 125):
        done = run_command("generate", "--checkpoint", checkpoint, "--prompt", "a+1=", "--max-new-tokens", tokens)
        assert done.returncode == 2 and "after the longest prompt the model has positions for 124 tokens" in done.stderr
    report(done.stderr)
    done = run_command("generate", "--checkpoint", checkpoint, "--prompt", "a+1=", "--max-new-tokens", 124)
    assert done.returncode == 0, done.stderr


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("", "no run's folder"),
        ("config.yaml", "saved none. Train again with save_steps"),
        ("model/config.json", "the trained model, in "),
    ],
)
def test_a_run_without_a_checkpoint_says_what_to_do(made, words, tmp_path):
    from roll_batching.errors import CheckpointError
    from roll_batching.jobs.run.saved_model import open_checkpoint

    if made:
        (tmp_path / made).parent.mkdir(exist_ok=True)
        (tmp_path / made).touch()
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.bad_input
def test_what_cannot_be_answered(run):
    """In one process: the same code as behind the commands."""
    done = subprocess.run([sys.executable, "-c", REFUSED, str(run)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "nowhere is not a folder" in said[0]
    assert "'?'" in said[1] and "41 tokens" in said[2] and "nowhere.jsonl" in said[3]


REFUSED = """
import sys
from pathlib import Path
from roll_batching.errors import RollBatchingError
from roll_batching.jobs.inputs import prompt_of, read_prompts
from roll_batching.jobs.run.saved_model import open_checkpoint, tokenizer_of
try:
    open_checkpoint(Path("nowhere"))
except RollBatchingError as error:
    print(error)
model = open_checkpoint(Path(sys.argv[1]))
tokenizer = tokenizer_of(model)
for text in ("a?", "a" * 41):
    try:
        next(model.answers([prompt_of(text, model.config, tokenizer)], tokenizer, model.sampling(tokenizer)))
    except RollBatchingError as error:
        print(error)
try:
    read_prompts(model.config, tokenizer, [Path("nowhere.jsonl")])
except RollBatchingError as error:
    print(" ".join(str(error).split()))
"""


def test_a_resumed_run_forgets_what_came_after(job, run):
    path = run / "rollouts.jsonl"
    whole = path.read_text()
    path.write_text(whole + json.dumps({"step": 3, "kind": "train"}) + '\n{"step": 3, "ki')
    run_ranks(1, "tests.jobs.rl.jobs:run", {**job, "resume_from_checkpoint": True, "max_steps": 3})
    assert path.read_text().startswith(whole)
    assert [line["step"] for line in lines(path)] == [*[1] * 10, *[2] * 10, *[3] * 10]
    kept = list((run / "previous").rglob("rollouts.jsonl"))
    assert len(kept) == 1 and kept[0].read_text().endswith('"ki')
