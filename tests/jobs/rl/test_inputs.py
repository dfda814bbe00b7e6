"""All inputs are read and checked before any process is started, in one pass, and all that is wrong is said."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.inputs import CHECKED, check_inputs, load_inputs
from tests.jobs.rl.jobs import settings, write_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def add(file: Path, *rows: dict[str, str]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def spoil(folder: Path) -> None:
    """Behind the good lines: prompts too long, of 10 MB, with unknown characters; documents likewise."""
    add(
        folder / "prompts.jsonl",
        {"prompt": "1" * 41, "answer": "1"},
        {"prompt": "2" * 10_000_000, "answer": "1"},
        {"prompt": "a\u00e9b", "answer": "1"},
        {"prompt": "a\x00\u00f1", "answer": "1"},
    )
    add(folder / "corpus.jsonl", {"prompt": "1" * 40, "response": "2" * 24}, {"prompt": "1", "response": "Q"})
    add(folder / "heldout.jsonl", {"prompt": "$", "answer": "1"})


SPOILT = (
    "have 7 faults",
    "prompts.jsonl:9: the prompt has 41 tokens, more than the 40 allowed (prompt_length)",
    "prompts.jsonl:10: the prompt has 10,000,000 tokens",
    "The longest has 10,000,000 tokens. Shorten 'prompt', remove the line, or raise prompt_length.",
    r"prompts.jsonl:11: prompt: Character '\xe9' at position 1 of 'a\xe9b' is not in the vocabulary",
    r"The characters are '\x00', '\xe9', '\xf1'. Take such characters out of the text, or add them",
    "corpus.jsonl:13: the document has 65 tokens, end token included, more than the 64 allowed (sequence_length)",
    "Shorten 'prompt' or 'response', remove the line, or raise sequence_length",
    "corpus.jsonl:14: response: Character 'Q'",
    "heldout.jsonl:5: prompt: Character '$' at position 0 of '$' is reserved",
)


@pytest.mark.bad_input
def test_everything_wrong_is_said_by_the_launcher_before_a_process_starts(folder, report):
    spoil(folder)
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "roll_batching.cli", "train", "--config", str(config), "--nproc", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and len(done.stderr) < 4000
    for words in SPOILT:
        assert words in done.stderr, f"{words!r} in {done.stderr}"
    assert [path.name for path in (folder / "runs" / "tiny").iterdir()] == [".lock"]
    report(done.stderr.strip().replace(str(folder), "..."))


CAPS = {
    "packed": ({"sequence_packing_args__max_packed_sequence_length_train": 3}, "sequence_packing_args.max_packed_seq"),
    "dynamic": (
        {"use_sequence_packing": False, "use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 3},
        "max_tokens_per_microbatch_in_train",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("mode", CAPS)
def test_a_text_that_no_micro_batch_takes_is_a_fault_of_the_caps_key(folder, mode):
    changes, key = CAPS[mode]
    job = settings(folder, **{f"actor_train__{name}": value for name, value in changes.items()})
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt has \d+ tokens") as caught:
        check_inputs(JobConfig.model_validate(job))
    assert f"more than the 2 allowed (actor_train.{key}" in str(caught.value)
    assert "remove the line, or raise actor_train." in str(caught.value)
    assert "of its 3 for the resp" in str(caught.value)
    assert "corpus.jsonl:1: the document has" in str(caught.value) and "more than the 3 allowed" in str(caught.value)
    assert "heldout.jsonl" not in str(caught.value), "evaluation samples, and trains nothing"
    job["actor_train"]["planning_args"] = {"oversize": "alone"}
    check_inputs(JobConfig.model_validate(job))


@pytest.mark.bad_input
def test_ranks_that_another_launcher_started_check_for_themselves(folder, monkeypatch):
    job = JobConfig.model_validate(settings(folder))
    monkeypatch.delenv(CHECKED, raising=False)
    assert check_inputs(job) == {CHECKED: load_inputs(job).fingerprint}
    spoil(folder)
    with pytest.raises(DataError) as caught:
        load_inputs(job)
    assert all(words in str(caught.value) for words in SPOILT)
    monkeypatch.setenv(CHECKED, "of other texts")
    with pytest.raises(DataError, match="have 7 faults"):
        load_inputs(job)


def test_ranks_do_not_repeat_the_launchers_check(folder, monkeypatch):
    """Seen by a tokenizer that counts: a launched rank encodes nothing while it loads."""
    from roll_batching.jobs.texts.tokenizers import CharTokenizer

    encoded: list[str] = []
    encode = CharTokenizer.encode
    monkeypatch.setattr(CharTokenizer, "encode", lambda self, text: (encoded.append(text), encode(self, text))[1])
    job = JobConfig.model_validate(settings(folder))
    monkeypatch.delenv(CHECKED, raising=False)
    variables = check_inputs(job)
    assert len(encoded) == 12 * 2 + 8 + 4
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    load_inputs(job)
    assert len(encoded) == 12 * 2 + 8 + 4


def test_many_lines_take_little_memory(folder):
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(200_000):
            file.write(f'{{"prompt": "a+{number % 1000}b+7=", "answer": "{number}", "level": 3}}\n')
    job = JobConfig.model_validate(settings(folder))
    check_inputs(
        JobConfig.model_validate(settings(folder, actor_train__data_args__file_name=str(folder / "heldout.jsonl")))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_inputs(job)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000, "KiB; read whole it takes 80,000"


def test_progress_is_shown_when_reading_takes_its_time(capsys):
    from roll_batching.jobs.observe.progress import ReadingProgress

    with ReadingProgress("checking", 4 * 10**9) as progress:
        progress.read(10**9)
        progress._next = time.monotonic()
        progress.read(10**9)
        progress.read(10**9)
    assert capsys.readouterr().err.splitlines() == ["checking: 50%, about 0 s left"]
