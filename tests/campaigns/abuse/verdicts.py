"""Abuses of registered rewards: judge models, verifiable instructions, multiple choice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.runner import DONE, FAILED, Abuse, Lost, free_port, lines_of
from tests.campaigns.abuse.scenes import METRICS, faults_of
from tests.jobs.rewards.judge_server import JudgeServer

_PLACE = "http://judge"
WHERE = ("rank ", "reward function llm_judge failed on sample ")
PAGE = (200, "<html><body>502 Bad Gateway</body></html>")


def _judge(*answers: Any, steps: int = 0) -> Any:
    """Scene of a judge server that gives `answers`, or of none."""

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        with contextlib.ExitStack() as stack:
            url = f"http://127.0.0.1:{free_port()}/v1"
            if answers:
                url = stack.enter_context(JudgeServer(*answers)).url
            (home / "job.yaml").write_text((home / "job.yaml").read_text().replace(_PLACE, url))
            yield lambda: faults_of(home / METRICS, steps) if steps else ""

    return scene


def _judged(name: str, *answers: Any, words: tuple[str, ...], code: int = FAILED, **changes: Any) -> Abuse:
    given = {"url": _PLACE, "model": "judge", "retries": 0, "timeout": 2, **changes.pop("reward_args", {})}
    settings = {"reward_function": "llm_judge", "reward_args": given, **changes.pop("settings", {})}
    scene = _judge(*answers, steps=int(code == DONE))
    return Abuse(name=f"judge: {name}", code=code, settings=settings, words=words, scene=scene, **changes)


NUMBERED = {"pattern": "Score: ([0-9.]+)", "scale": 10}
PROMPTS = [f"{word}=" for word in ("abc", "bcd", "cde", "def") * 6]


def _ruled(name: str, reward: str, answer: Any, *words: str, code: int = FAILED, **options: Any) -> Abuse:
    """Abuse of the reward `reward` with `answer` in every line of the prompts."""
    rows = [{"prompt": prompt, "answer": answer} for prompt in PROMPTS]
    return Abuse(
        name=f"{reward}: {name}",
        code=code,
        settings={"reward_function": reward},
        files={"prompts.jsonl": lines_of(rows)},
        words=words,
        lines=7,  # the first five faults, and how many more
        **options,
    )


VERDICTS = [
    _judged("nobody listens", words=(*WHERE, "no answer from the judge at http://127.0.0.1:")),
    _judged("a web page", PAGE, words=(*WHERE, "sent no text at choices[0].message.content: <html>")),
    _judged("rubbish", "RUBBISH", words=(*WHERE, "no answer from the judge at ")),
    _judged("answers too slowly", "HANG", words=(*WHERE, "did not answer within 2 s")),
    _judged(
        "a score above the scale", "Score: 11", reward_args=NUMBERED, words=(*WHERE, "is not a number from 0 to 10")
    ),
    _judged("a verdict before more text", "YES\nThe response says: NO, give YES.", words=(*WHERE, "is not YES or NO")),
    _judged(
        "gone, with a reward for that", (500, "gone"), code=DONE, words=(), reward_args={"on_failure": 0.0}, warnings=16
    ),
    _ruled(
        "an unknown constraint", "ifeval", json.dumps({"func_name": "validate_rhymes"}), "validate_rhymes", "sample"
    ),
    _ruled(
        "an argument that is missing", "ifeval", json.dumps({"func_name": "validate_word_constraint"}), "sample", "N"
    ),
    _ruled("an answer that is no JSON", "ifeval", "{" * 5000, "sample", "JSON"),
    _ruled("an answer with all letters", "multiple_choice", "ABCD", "sample", "'ABCD', is not one capital letter"),
]
