"""KTO as a job: its reference point, layouts, learning and its control, resuming, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import run_straight_and_resumed
from tests.support.ranks import run_ranks
from tests.support.tiny_job import ARCHITECTURE, TOKENIZER, with_changes

RUN, REFUSAL = "tests.jobs.rl.jobs:run", "tests.jobs.rl.jobs:refusal"


def write(folder: Path, name: str = "judged", count: int = 24, *, flip: bool = False) -> str:
    """Sums whose answers are right (desirable) or 99; with `flip` verdicts are drawn at random."""
    lines, draw = [], random.Random(5)
    for i in range(count):
        right = i % 2 == 0
        answer = f"#{i % 9 + i % 7 + 2:02d}" if right else "#99"
        label = draw.random() < 0.5 if flip else right
        lines.append({"prompt": f"a+{i % 9 + 1}b+{i % 7 + 1}=", "completion": answer, "label": label})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def job(folder: Path, name: str = "kto", file: str = "", **changes: Any) -> dict[str, Any]:
    file = file or write(folder)
    given = {
        "exp_name": name,
        "seed": 3,
        "output_dir": str(folder / "runs"),
        "task": "kto",
        "max_steps": 4,
        "eval_steps": 0,
        "eval_samples": 8,
        "sequence_length": 24,
        "tokenizer": dict(TOKENIZER),
        "loss_args": {"beta": 0.3, "undesirable_weight": 1.5},
        "actor_train": {
            "model_args": {"architecture": dict(ARCHITECTURE)},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8},
            "data_args": {"file_name": file, "eval_file_name": file},
            "use_sequence_packing": True,
            "sequence_packing_args": {"algorithm": "load_balance", "max_packed_sequence_length_train": 64},
        },
    }
    return with_changes(given, changes)


def rows_of(folder: Path, name: str = "kto") -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def test_the_loss_begins_at_a_half_and_desirable_answers_gain(tmp_path: Path, report) -> None:
    run_ranks(1, RUN, job(tmp_path, max_steps=30, actor_train__training_args__learning_rate=3e-3))
    rows = rows_of(tmp_path)
    # Policy and reference are equal: sigmoid(0) for all, weights 1 and 1.5, as many of each kind on average.
    assert rows[0]["reference_point"] == 0 and 0.5 <= rows[0]["loss"] <= 0.75
    assert rows[0]["desirable_reward"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["eval_loss"] == pytest.approx(0.625, abs=1e-4)
    assert rows[-1]["eval_loss"] < 0.4
    gap = rows[-1]["eval_desirable_reward"] - rows[-1]["eval_undesirable_reward"]
    report(f"held-out loss 0.625 -> {rows[-1]['eval_loss']:.3f}, gap of rewards {gap:.2f}")
    assert gap > 3


def test_verdicts_without_sense_teach_nothing(tmp_path: Path, report) -> None:
    """The control: verdicts that do not depend on the answer; judged by the true ones."""
    held, file = write(tmp_path, "true"), write(tmp_path, "flipped", 240, flip=True)
    changes = {"actor_train__training_args__learning_rate": 3e-3, "actor_train__data_args__eval_file_name": held}
    run_ranks(1, RUN, job(tmp_path, "control", file, max_steps=30, **changes))
    row = rows_of(tmp_path, "control")[-1]
    gap = row["eval_desirable_reward"] - row["eval_undesirable_reward"]
    report(f"control: gap of rewards {gap:.2f}")
    assert gap < 1.5, "with true verdicts it is above 5"


MODES: dict[str, dict[str, Any]] = {
    "padded": {"actor_train__use_sequence_packing": False},
    "dynamic": {
        "actor_train__use_sequence_packing": False,
        "actor_train__use_dynamic_batching": True,
        "actor_train__max_tokens_per_microbatch_in_train": 64,
        "actor_train__max_tokens_per_microbatch_in_infer": 64,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "DP2": {},
}
GAINING = {
    "loss_args": {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.2},
    "actor_train__training_args__learning_rate": 4e-3,
}
"""Settings under which other answers gain too, so that the reference point is above 0."""
COMPARED = ("loss", "grad_norm", "reference_point", "desirable_reward", "undesirable_reward", "tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Weights that are equal in all layouts."""
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder, "qwen3")
    return folder


def started(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    given = job(folder, pretrain=str(model), export_model=False, **(GAINING | changes))
    given["actor_train"]["model_args"] = {}
    return given


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kto")
    run_ranks(1, RUN, started(folder, model))
    rows = rows_of(folder)
    assert max(row["reference_point"] for row in rows) > 0.001, "the reference point has an influence"
    return rows


@pytest.mark.equality
@pytest.mark.parametrize("mode", MODES)
def test_padded_and_dynamic_are_packed(mode: str, model: Path, packed: list[dict[str, Any]], tmp_path: Path) -> None:
    run_ranks(1, RUN, started(tmp_path, model, **MODES[mode]))
    compare(rows_of(tmp_path), packed)


@pytest.mark.layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_one_rank(name: str, model: Path, packed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The reference point is over the whole step: it does not depend on how samples are spread."""
    rows = 4 if name == "DP2" else 8
    changes: dict[str, Any] = {"actor_train__training_args__per_device_train_batch_size": rows}
    changes["actor_train__strategy_args__strategy_config"] = LAYOUTS[name]
    run_ranks(2, RUN, started(tmp_path, model, **changes))
    compare(rows_of(tmp_path), packed)


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for key in COMPARED:
            assert one[key] == pytest.approx(other[key], rel=2e-4, abs=2e-5), key


@pytest.mark.slow
def test_resumed_to_the_bit_on_two_ranks(tmp_path: Path) -> None:
    changes = {"save_steps": 1, "actor_train__training_args__per_device_train_batch_size": 4}
    run_straight_and_resumed(job, tmp_path, "kto-000002", **changes)
    assert rows_of(tmp_path, "resumed") == rows_of(tmp_path, "straight")


def mismatch_of(rank: tuple[int, int]) -> list[tuple[int, list[int], list[bool]]]:
    from roll_batching.jobs.steps.planned_steps import Encoder
    from roll_batching.jobs.texts.texts import Judged
    from roll_batching.jobs.texts.tokenizers import CharTokenizer

    tokenizer = CharTokenizer(TOKENIZER["vocabulary"], "$", ".")
    items = [Judged("a" * (i + 1), "b" * (5 - i), True) for i in range(5)]
    batch = Encoder(tokenizer=tokenizer, max_length=8, judged=True).encode_mismatched(items, *rank)
    assert batch is not None
    columns = [batch.to_lists(name) for name in ("input_ids", "response_mask")]
    return [(i, row.tolist(), mask.tolist()) for i, row, mask in zip(batch.ids.tolist(), *columns, strict=True)]


def test_every_prompt_has_the_answer_before_it_whatever_the_shares() -> None:
    whole = mismatch_of((0, 1))
    assert whole == [one for rank in range(3) for one in mismatch_of((rank, 3))]
    assert whole == [one for rank in range(6) for one in mismatch_of((rank, 6))], "a rank has none"
    letters = [
        "".join(TOKENIZER["vocabulary"][token] for token, of in zip(row, mask, strict=True) if of)
        for _, row, mask in whole
    ]
    # The answers of 5 - i letters and the end token, cut so that prompt and answer have 8 tokens.
    assert letters == ["b$", "bbbbb$", "bbbb$", "bbb$", "bb$"]
    assert max(len(row) for _, row, _ in whole) <= 8


@pytest.mark.loss
def test_the_loss_is_trls() -> None:
    """TRL's kto_loss written out in numpy: 1 - sigmoid(+-beta (r - z)), weighted by verdict, the mean of responses."""
    from roll_batching.losses import KTOLoss
    from tests.losses.formulas import batch, leaves, run

    beta, desirable, undesirable, point = 0.1, 1.2, 0.7, 0.3
    data = batch()
    fields = {"desirable": data["chosen"], "reference_point": torch.full((len(data),), point, dtype=torch.float64)}
    data = data.with_fields(fields, dict.fromkeys(fields, "sample"))
    log_probs, losses = leaves(data).detach()[:, 0].numpy(), []
    rows = zip(data.offsets.tolist(), data.to_lists("ref_log_probs"), data.to_lists("response_mask"), strict=False)
    for number, (start, reference, mask) in enumerate(rows):
        counted = mask.numpy()[1:].astype(bool)  # row i predicts token i + 1
        if not counted.any():
            continue
        policy = log_probs[start : start + len(mask)][:-1]
        reward = float((policy - reference.numpy()[:-1])[counted].sum())
        is_desirable = bool(data["chosen"][number])
        sign, weight = (1, desirable) if is_desirable else (-1, undesirable)
        losses.append(weight * (1 - 1 / (1 + np.exp(-sign * beta * (reward - point)))))
    loss = KTOLoss(beta=beta, desirable_weight=desirable, undesirable_weight=undesirable)
    value, _, metrics = run(loss, data)
    assert value == pytest.approx(np.mean(losses), rel=1e-12) and metrics["reference_point"] == pytest.approx(point)


@pytest.mark.bad_input
def test_lines_without_a_verdict_are_named(tmp_path: Path, report) -> None:
    file = Path(write(tmp_path, count=6))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[1]["label"]
    lines[2]["label"], lines[3]["label"], lines[4]["completion"] = "yes", 1, 5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (text,) = run_ranks(1, REFUSAL, job(tmp_path, file=str(file)))
    assert text.startswith("DataError")
    for words in ("judged.jsonl:2", "'label' is missing", "judged.jsonl:3", "'label' is 'yes'", "judged.jsonl:5"):
        assert words in text, text
    report(text)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "steps of one answer": (
        {
            "actor_train__training_args__per_device_train_batch_size": 1,
            "actor_train__device_mapping": [0],
        },
        "actor_train.training_args.per_device_train_batch_size",
        "one answer",
    ),
    "a stream": (
        {"train": {"train_policy": {"enable_dp_load_balancing": True}, "max_num_steps": 2}},
        "train",
        "leave it out",
    ),
    "a strength of 0": ({"loss_args": {"beta": 0}}, "loss_args.beta", "greater than 0"),
    "a negative weight": (
        {"loss_args": {"desirable_weight": -1}},
        "loss_args.desirable_weight",
        "greater than or equal to 0",
    ),
    "another loss": ({"loss_function": "dpo", "loss_args": {}}, "loss_function", "dpo reads pair"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_key(name: str, tmp_path: Path) -> None:
    changes, path, words = REFUSED[name]
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job(tmp_path, **changes))
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    assert any(key.startswith(path) and words in text for key, text in found.items()), found


@pytest.mark.config
def test_keys_and_notices(tmp_path: Path) -> None:
    config = config_from_dict(job(tmp_path))
    data = config.actor_train.data_args
    assert (config.loss_function, data.response, data.label) == ("kto", "completion", "label")
    assert config.reference is not None and not config.notices
    notices = {n.path: n.text for n in config_from_dict(job(tmp_path, actor_train__data_args__chosen="a")).notices}
    assert notices["actor_train.data_args.chosen"].endswith("task is kto, which has no pairs")
    sft = job(tmp_path, task="sft", loss_args={}, actor_train__data_args__label="a")
    assert "actor_train.data_args.label" in {notice.path for notice in config_from_dict(sft).notices}
