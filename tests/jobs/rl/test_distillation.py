"""Distillation as a job: it learns, its control does not, resuming is exact, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import run_straight_and_resumed, settings, write_data
from tests.support.ranks import run_ranks
from tests.support.tiny_job import with_changes

RUN, REFUSAL = "tests.jobs.rl.jobs:run", "tests.jobs.rl.jobs:refusal"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    for name, model in (("student", "qwen3"), ("teacher", "llama3")):
        tiny.write_model(tmp_path / name, model)
        tiny.write_tokenizer(tmp_path / name)
    return tmp_path


def job(folder: Path, name: str = "distilled", **changes: Any) -> dict[str, Any]:
    """Eight prompts a step, one response each, no reward, two optimizer steps; the teacher packs with its own cap."""
    given = settings(folder, pretrain=str(folder / "student"), exp_name=name, task="distill", logits_topk=8)
    for key in ("tokenizer", "warmup", "adv_estimator", "reward_function"):
        del given[key]
    given["actor_train"]["model_args"] = {}
    given |= {"num_return_sequences_in_group": 1, "rollout_batch_size": 8, "response_length": 12, "max_steps": 3}
    given["actor_train"]["training_args"] = {"learning_rate": 3e-3, "per_device_train_batch_size": 4}
    given["teacher"] = {
        "model_args": {"model_name_or_path": str(folder / "teacher")},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_forward": 160},
    }
    return with_changes(given, changes)


def rows_of(folder: Path, name: str = "distilled") -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in {*TIMES, "teacher_seconds"}} for row in rows]


def test_the_divergence_falls_without_rewards_or_groups(folder: Path, report) -> None:
    run_ranks(1, RUN, job(folder, max_steps=12, num_return_sequences_in_group=2, rollout_batch_size=4))
    rows = rows_of(folder)
    divergence = [row["divergence"] for row in rows]
    report(f"divergence {divergence[0]:.3f} -> {divergence[-1]:.3f}")
    assert divergence[-1] < 0.5 * divergence[0]
    assert all(row["reward"] is None and "reward_std" not in row for row in rows)
    assert 0 < rows[0]["teacher_mass"] <= 1


LAYOUTS = {
    "student TP2 SP, teacher PP2": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
    ),
    "student DP2, teacher CP2": ({}, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_student_and_teacher_change_nothing(name: str, folder: Path) -> None:
    """Greedy responses, so that all layouts train on the same tokens."""
    student, teacher = LAYOUTS[name]
    greedy = {"actor_infer": {"generating_args": {"do_sample": False}}}
    run_ranks(1, RUN, job(folder, "one", **greedy, actor_train__training_args__per_device_train_batch_size=8))
    changes = {
        "actor_train__strategy_args__strategy_config": student,
        "teacher__strategy_args": {"strategy_name": "megatron_infer", "strategy_config": teacher},
        "actor_train__training_args__per_device_train_batch_size": 8 if student else 4,
    }
    run_ranks(2, RUN, job(folder, "two", **greedy, **changes))
    for one, two in zip(rows_of(folder, "one"), rows_of(folder, "two"), strict=True):
        for key in ("loss", "grad_norm", "divergence", "teacher_mass", "tokens"):
            assert two[key] == pytest.approx(one[key], rel=2e-4), key


@pytest.mark.slow
def test_resumed_to_the_bit_on_two_ranks(folder: Path) -> None:
    options = {"save_steps": 1, "is_offload_states": True, "kd_objective": "mixed_kl"}
    options["actor_train__strategy_args__strategy_config"] = {"use_distributed_optimizer": True}
    run_straight_and_resumed(job, folder, "rl-000001", **options)
    moved = {"offload_bytes", "offload_seconds"}
    straight, resumed = rows_of(folder, "straight"), rows_of(folder, "resumed")
    assert [{k: v for k, v in row.items() if k not in moved} for row in resumed] == [
        {k: v for k, v in row.items() if k not in moved} for row in straight
    ]


@pytest.mark.slow
def test_another_teacher_under_the_same_path_is_named_on_resuming(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(1, RUN, job(folder, save_steps=1, max_steps=1))
    resumed = job(folder, resume_from_checkpoint=True, max_steps=2)
    (same,) = run_ranks(1, RUN, resumed, check=False)
    file = folder / "teacher" / "model.safetensors"
    save_file({name: 2 * values for name, values in load_file(file).items()}, file, metadata={"format": "pt"})
    (other,) = run_ranks(1, RUN, resumed, check=False)
    assert "the teacher's files" not in same.output
    assert "continues with changes since it was saved: the teacher's files model.safetensors" in other.output


def test_texts_are_distilled_too(folder: Path) -> None:
    """task: sft with loss_function: distill: the teacher's distributions over given answers, and their likelihood."""
    lines = [json.dumps({"prompt": f"a+{i}", "response": f"#{i % 10}b"}) for i in range(16)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    given = job(
        folder, task="sft", loss_function="distill", distill_loss_weight=0.85, sequence_length=16, max_steps=10,
        actor_train__data_args={key: str(folder / "texts.jsonl") for key in ("file_name", "eval_file_name")},
    )  # fmt: skip
    for key in ("rollout_batch_size", "num_return_sequences_in_group", "prompt_length", "response_length"):
        del given[key]
    run_ranks(1, RUN, given)
    rows = rows_of(folder)
    assert rows[-1]["eval_divergence"] < 0.5 * rows[0]["eval_divergence"]
    assert rows[-1]["eval_sft_loss"] < rows[0]["eval_sft_loss"]
    assert rows[0]["loss"] == pytest.approx(0.85 * rows[0]["divergence"] + 0.15 * rows[0]["sft_loss"], rel=1e-5)


@pytest.mark.bad_input
def test_a_teacher_with_nan_weights_ends_the_job_on_all_ranks(folder: Path, report) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "teacher" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    found = run_ranks(2, REFUSAL, job(folder))
    assert len(set(found)) == 1 and "model.norm" in found[0].replace("final_layernorm", "model.norm")
    assert "not finite" in found[0] or "nan" in found[0]
    report(found[0])


@pytest.mark.bad_input
def test_a_teacher_with_other_tokens_under_the_ids_is_refused(folder: Path, report) -> None:
    file = folder / "teacher" / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(described))
    (text,) = run_ranks(1, REFUSAL, job(folder))
    assert text.startswith("ConfigError") and "choose a teacher with the same tokenizer" in text
    report(text)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no teacher": ({"teacher": None}, "teacher", "needs the role `teacher`"),
    "no model": ({"teacher": {}}, "teacher.model_args.model_name_or_path", "is missing"),
    "k above the vocabulary": ({"logits_topk": 62}, "logits_topk", "above the vocabulary of 61"),
    "a negative k": ({"logits_topk": -1}, "logits_topk", "at least 0"),
    "older weights sample": ({"async_generation_ratio": 1}, "async_generation_ratio", "older weights"),
    "an engine as the teacher": (
        {"teacher__strategy_args": {"strategy_name": "vllm"}},
        "teacher.strategy_args.strategy_name",
        "cannot serve the teacher",
    ),
    "other devices": (
        {"teacher__device_mapping": [2, 3], "actor_train__device_mapping": [0, 1]},
        "teacher.device_mapping",
        "shares its devices for now",
    ),
    "a size that does not divide": (
        {
            "actor_train__device_mapping": [0, 1],
            "teacher__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 3}},
        },
        "teacher",
        "3",
    ),
    "another loss": ({"loss_function": "gpg"}, "loss_function", "gpg reads advantages"),
    "a loss of its own": ({"loss_function": "a:B"}, "loss_function", "has the loss distill"),
    "another task": ({"task": "grpo", "loss_function": "distill"}, "loss_function", "which rollouts do not have"),
    "a mixture over the vocabulary": (
        {"zero_outside_topk": True, "kd_objective": "js_divergence"},
        "zero_outside_topk",
        "not js_divergence",
    ),
    "a temperature over the vocabulary": (
        {"zero_outside_topk": True, "kd_temperature": 2.0},
        "zero_outside_topk",
        "has no temperature",
    ),
    "its own tokens as targets": ({"distill_loss_weight": 0.5}, "distill_loss_weight", "its own tokens"),
    "shared prefixes": (
        {"actor_train__sequence_packing_args__share_prefixes": True},
        "actor_train.sequence_packing_args.share_prefixes",
        "at its own positions",
    ),
    "a critic": ({"critic": {}}, "critic", "reads no rewards"),
    "advantages": ({"whiten_advantages": True}, "whiten_advantages", "does not have"),
    "no objective": ({"kd_objective": "kl"}, "kd_objective", "forward_kl"),
    "no number": ({"kd_temperature": float("nan")}, "kd_temperature", "finite"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_a_teacher_that_cannot_be_is_refused_with_its_key(name: str, folder: Path, report) -> None:
    changes, path, words = REFUSED[name]
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job(folder, **changes))
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    assert any(key.startswith(path) and words in text for key, text in found.items()), found
    report(f"{name}: {found}")


@pytest.mark.bad_input
def test_a_teacher_of_another_vocabulary_size_is_refused(folder: Path) -> None:
    file = folder / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 64}))
    with pytest.raises(ConfigFileError, match="a vocabulary of 64 tokens, the student 61"):
        config_from_dict(job(folder))


@pytest.mark.bad_input
def test_a_missing_directory_is_refused_before_anything_starts(folder: Path) -> None:
    config = config_from_dict(job(folder, teacher__model_args__model_name_or_path=str(folder / "nobody")))
    with pytest.raises(ConfigFileError, match="teacher.model_args.model_name_or_path"):
        config.check_runnable()


@pytest.mark.config
def test_a_teacher_that_nothing_reads_has_a_notice(folder: Path) -> None:
    notices = {n.path: n.text for n in config_from_dict(job(folder, task="grpo", kd_objective="reverse_kl")).notices}
    assert "is not built: the loss policy does not read it" in notices["teacher"]
    assert "policy does not read it" in notices["kd_objective"]
    quiet = {notice.path for notice in config_from_dict(job(folder)).notices}
    assert not {path for path in quiet if path.startswith("teacher")} and "loss_function" not in quiet


@pytest.mark.config
def test_keys_that_distillation_does_not_read_have_a_notice(folder: Path) -> None:
    unread = {"gamma": 0.9, "reward_clip": 2.0, "norm_mean_type": "batch", "init_kl_coef": 0.3, "lambd": 0.9}
    config = config_from_dict(job(folder, **unread, actor_train__router_replay={"mode": "R2"}))
    notices = {notice.path: notice.text for notice in config.notices}
    assert {*unread, "actor_train.router_replay", "actor_train.data_args.eval_file_name"} <= notices.keys()
    assert all("task is distill" in notices[key] for key in unread)
    again = {notice.path for notice in config_from_dict(config_from_dict(job(folder)).to_dict()).notices}
    assert not again & {"adv_estimator", "gamma", "reward_clip", "norm_mean_type", "init_kl_coef"}


@pytest.mark.config
def test_what_a_teacher_takes_from_actor_train(folder: Path) -> None:
    config = config_from_dict(job(folder, actor_train__model_args__dtype="fp32"))
    teacher = config.teacher
    assert teacher is not None and teacher.model_args.dtype == "fp32"
    assert teacher.model_args.model_name_or_path == str(folder / "teacher")
    assert teacher.model_args.architecture != config.actor_train.model_args.architecture
    assert teacher.batching().infer.max_tokens == 160
    assert config_from_dict(config.to_dict()).teacher == teacher
