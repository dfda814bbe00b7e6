"""Abuses of KTO, router replay and dynamic sampling."""

from __future__ import annotations

from typing import Any

from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, Abuse, lines_of
from tests.campaigns.abuse.scenes import complete, not_begun

KTO: dict[str, Any] = {
    "task": "kto",
    "reward_function": None,
    "num_return_sequences_in_group": 1,
    "actor_train.data_args.file_name": "judged.jsonl",
    "sequence_length": 26,
}
"""Settings of a small job of task: kto."""
_JUDGED = [{"prompt": "ab=", "completion": "ab", "label": i % 2 == 0} for i in range(16)]


def _judged(name: str, change: dict[str, Any], *words: str, every: bool = False, **options: Any) -> Abuse:
    """Abuse of KTO with `change` in the last line of its data, or in every line."""
    rows: list[Any] = [{**row, **change} if every or row is _JUDGED[-1] else row for row in _JUDGED]
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    given = {"code": FAILED, "scene": not_begun, **options}
    return Abuse(
        name=f"kto: {name}", settings=KTO, files={"judged.jsonl": lines_of(rows)}, words=words, lines=4, **given
    )


KTO_ABUSES = [
    _judged("a label that is a text", {"label": "true"}, "judged.jsonl:16", "'label' is 'true'"),
    _judged("a label that is missing", {"label": None}, "judged.jsonl:16", "'label' is missing"),
    _judged(
        "desirable answers alone",
        {"label": True},
        "all 16 answers of judged.jsonl are desirable",
        "actor_train.data_args.label",
        every=True,
        code=DONE,
        scene=complete,
        warnings=1,
    ),
]

SAME = {"scoring.py": "def reward(completion):\n    return 0.5\n"}
SAMPLING = {"dynamic_sampling": True, "dynamic_sampling_max_batches": 3}

SAMPLINGS = [
    Abuse(
        name="dynamic sampling: all rewards are equal",
        code=FAILED,
        settings=SAMPLING,
        files=SAME,
        words=(
            "error: step 1 has 0 of 4 prompts whose rewards differ, after 3 generation batches",
            "the mean reward is 0.5",
            "dynamic_sampling_max_batches",
        ),
    ),
    Abuse(
        name="dynamic sampling: caps of 0, NaN and a text",
        code=REFUSED,
        settings={
            "dynamic_sampling": "sometimes",
            "dynamic_sampling_max_batches": 0,
            "dynamic_sampling_batch_size": float("nan"),
        },
        words=(
            "dynamic_sampling: expected true or false, got 'sometimes'",
            "dynamic_sampling_max_batches: is 0",
            "dynamic_sampling_batch_size: expected a finite number, got nan",
        ),
        lines=4,
        scene=not_begun,
    ),
]

ROUTERS = [
    Abuse(
        name=f"router replay: {mode} of a dense model",
        code=REFUSED,
        settings={"actor_train.router_replay": {"mode": mode}},
        words=(f"actor_train.router_replay.mode: is {mode}, but the model has no mixture of experts",),
        lines=2,
        scene=not_begun,
    )
    for mode in ("R2", "R3")
]

OBJECTIVES = [*KTO_ABUSES, *SAMPLINGS, *ROUTERS]
