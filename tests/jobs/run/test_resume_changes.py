"""A run that is resumed with another tokenizer, other data or settings: refused, or said; steps that are done, too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import supervised
from tests.jobs.streams.jobs import settings as of_texts
from tests.jobs.streams.jobs import write_data as write_texts
from tests.jobs.streams.test_streamed_job import streamed
from tests.support.ranks import run_ranks
from tests.support.tiny_job import VOCABULARY

HERE = "tests.jobs.run.test_resume_changes:"
PERMUTED = VOCABULARY[1:-2] + VOCABULARY[0] + VOCABULARY[-2:]


# ---- on ranks


def endings(jobs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What each job says on this rank: its warnings, or its error."""
    import logging

    from roll_batching.errors import RollBatchingError
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.job import run_job

    said: dict[str, list[str]] = {}

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[name].append(record.getMessage())

    logging.getLogger("roll_batching").addHandler(Kept())
    for name, job in jobs.items():
        said[name] = []
        try:
            run_job(config_from_dict(job))
        except RollBatchingError as error:
            said[name].append(f"{type(error).__name__}: {error}")
    return {name: "\n".join(words) for name, words in said.items()}


def reward_by_key(completion: Any, bonus: float = 0.0) -> float:
    """A reward that reads a key of the prompt's line."""
    return completion.tokens / 10 + completion.record["level"] + bonus


# ---- tests


def edited(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.bad_input
def test_another_vocabulary_and_steps_that_cannot_be_are_refused_on_every_rank(tmp_path, report):
    write_data(tmp_path)
    run_ranks(2, "tests.jobs.rl.jobs:run", supervised(tmp_path, "base", warmup__training_args__max_steps=4))
    places = tmp_path / "runs" / "base" / "checkpoints"
    last = places / "warmup-000004"
    (tmp_path / "vocabulary.txt").write_text(VOCABULARY.replace("x", "X"))

    def job(**changes: Any) -> dict[str, Any]:
        given = {"resume_from_checkpoint": str(last), "warmup__training_args__max_steps": 4, **changes}
        return supervised(tmp_path, "base", **given)

    def counted(name: str, step: Any) -> str:
        path = shutil.copytree(last, tmp_path / name)
        own = json.loads((path / "job.json").read_text()) | {"step": step}
        (path / "job.json").write_text(json.dumps(own))
        return str(path)

    of_file = {"type": "char", "vocabulary_file": str(tmp_path / "vocabulary.txt"), "eos_token": "$", "pad_token": "."}
    changed = r"job\.json (was changed after it was written|has [\d,]+ bytes)"
    cases = {
        "permuted": (job(tokenizer__vocabulary=PERMUTED), "was trained with another vocabulary"),
        "another file": (job(tokenizer=of_file), "was trained with another vocabulary"),
        "a million": (
            job(resume_from_checkpoint=counted("million", 10**6)),
            "step 1,000,000 of warmup, which has 4",
        ),
        "a million in a name": (
            job(resume_from_checkpoint=counted("warmup-000003", 10**6)),
            r"says step 1,000,000 of warmup, and its folder is warmup-000003",
        ),
        "less than there is": (
            job(warmup__training_args__max_steps=2),
            r"at step 4 of warmup, which has 2 steps here: raise warmup\.training_args\.max_steps",
        ),
        "one more": (job(resume_from_checkpoint=counted("more", 3)), changed),
        "no number": (job(resume_from_checkpoint=counted("text", "4")), "is malformed: it has step '4'"),
        "true": (job(resume_from_checkpoint=counted("true", True)), "is malformed: it has step True"),
        "negative": (job(resume_from_checkpoint=counted("negative", -1)), "is malformed: it has step -1"),
    }
    before = (places.parent / "metrics.jsonl").read_bytes()
    first, second = run_ranks(2, HERE + "endings", {name: one for name, (one, _) in cases.items()})
    for name, (_, expected) in cases.items():
        report(f"{name}: {first[name]}".replace(str(tmp_path), "..."))
        assert re.search(expected, first[name]) and re.search(expected, second[name]), f"{name}: {first[name]}"
    assert (places.parent / "metrics.jsonl").read_bytes() == before and last.is_dir()
    (outcome,) = run_ranks(1, "tests.jobs.rl.jobs:run", job(resume_from_checkpoint=True), check=False)
    assert outcome.returncode == 0 and "warmup is complete: all of its 4 steps" in outcome.output, outcome.output
    assert "To train on, raise warmup.training_args.max_steps, or max_steps for the phase rl" in outcome.output
    rl = job(resume_from_checkpoint=True, max_steps=1, reward_function="tests.jobs.rl.jobs:length")
    (outcome,) = run_ranks(1, "tests.jobs.rl.jobs:run", rl, check=False)
    assert outcome.returncode == 0 and "done before. The phase rl follows" in outcome.output, outcome.output
    assert "raise" not in outcome.output, "there is nothing to raise"


@pytest.mark.config
@pytest.mark.parametrize(
    ("changes", "phase", "key"),
    [
        ({}, "warmup", "warmup.training_args.max_steps"),
        ({"warmup__training_args": {}, "warmup__num_train_epochs": 1.0}, "warmup", "warmup.num_train_epochs"),
        ({}, "rl", "max_steps"),
    ],
)
def test_the_key_that_lengthens_a_phase(tmp_path, changes, phase, key):
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.objectives.from_config import steps_key

    assert steps_key(config_from_dict(settings(tmp_path, **changes)), phase) == key


@pytest.mark.config
def test_the_key_that_lengthens_fine_tuning(tmp_path):
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.objectives.from_config import steps_key

    assert steps_key(config_from_dict(of_texts(tmp_path, "sft")), "sft") == "max_steps"
    epochs = of_texts(tmp_path, "dpo") | {"num_train_epochs": 1.0}
    epochs.pop("max_steps")
    assert steps_key(config_from_dict(epochs), "dpo") == "num_train_epochs"
    assert steps_key(config_from_dict(streamed(tmp_path, task="sft", steps=4)), "sft") == "train.max_num_steps"


def grpo(folder: Path, **changes: Any) -> dict[str, Any]:
    return settings(
        folder,
        **{
            "save_steps": 1,
            "warmup": None,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "reference": {},
            "reward_function": HERE + "reward_by_key",
            "reward_args": {"bonus": 0.5},
            **changes,
        },
    )


@pytest.mark.slow
def test_changed_keys_of_data_rewards_and_settings_are_said_once(tmp_path, report):
    """GRPO with a reference, written while training goes on; the second change is an edited reward."""
    write_data(tmp_path)
    job = grpo(tmp_path, async_save=True, actor_train__strategy_args__strategy_config__use_distributed_optimizer=True)
    run_ranks(2, HERE + "endings", {"it": job})
    again = job | {"resume_from_checkpoint": True, "max_steps": 3}
    edited(tmp_path / "prompts.jsonl", lambda line: line.update(level=line["level"] + 1))
    changed = again | {"reward_args": {"bonus": 0.25}, "max_steps": 4}
    first, second = run_ranks(2, HERE + "endings", {"data": again, "settings": changed})
    report(first["data"].replace(str(tmp_path), "..."))
    assert (
        "the run continues with changes since it was saved: prompts (some lines, or keys beside their texts); max_steps"
        in (first["data"])
    )
    assert "since it was saved: max_steps, reward_args.bonus" in first["settings"], first
    assert "since it was saved" not in second["data"] + second["settings"], "said by one rank"
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    listed = json.loads((checkpoints / "rl-000004" / "manifest.json").read_text())["files"]
    assert {"job.json", "random-00001.pt", "strategy.json", "reference/manifest.json"} <= listed.keys()
    # A file of the job's own, and one of the reference's.
    for name in ("random-00001.pt", "reference"):
        whole, broken = checkpoints / "rl-000004", checkpoints / "rl-000005"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, tmp_path / name / "it")
        target = tmp_path / name / "it"
        if name == "reference":
            next((target / name).glob("*.distcp")).write_bytes(b"")
        else:
            raw = (target / name).read_bytes()
            (target / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        resumed = changed | {"resume_from_checkpoint": str(target), "max_steps": 5}
        said = run_ranks(2, HERE + "endings", {"it": resumed})[1]["it"]
        assert re.search(rf"{name}.* (was changed after it was written|is cut off)", said), said


@pytest.mark.slow
@pytest.mark.streams
@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("stream", [False, True])
def test_jobs_of_texts_and_pairs_too(tmp_path, task, stream):
    write_texts(tmp_path)
    given: dict[str, Any] = {"save_steps": 2, "async_save": True}
    job = streamed(tmp_path, task=task, steps=4, **given) if stream else of_texts(tmp_path, task, **given)
    assert run_ranks(2, HERE + "endings", {"it": job})[0]["it"].count("Error") == 0
    more = streamed(tmp_path, task=task, steps=5, **given) if stream else job | {"max_steps": 5}
    again = more | {"resume_from_checkpoint": True}
    permuted = again | {"tokenizer": job["tokenizer"] | {"vocabulary": PERMUTED}}
    edited(tmp_path / f"{task}.jsonl", lambda line: line.update(source="another"))
    first, second = run_ranks(2, HERE + "endings", {"permuted": permuted, "data": again})
    assert "was trained with another vocabulary" in first["permuted"] and "another vocabulary" in second["permuted"]
    assert "since it was saved: learnt texts (some lines" in first["data"] and "Error" not in first["data"], first
