"""Jobs that train with Muon: learning and its control, resuming, a rehearsal's memory, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import load_config
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import run_straight_and_resumed, settings
from tests.strategy.test_muon import needs_muon
from tests.support.ranks import run_ranks
from tests.support.tiny_job import ARCHITECTURE, TOKENIZER, with_changes
from tests.tools.rehearsal.jobs import job_of
from tests.tools.rehearsal.test_images import compare_with_real_step

RUN = "tests.jobs.rl.jobs:run"
LAYOUT = "strategy_args__strategy_config__"
MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2}


def write(folder: Path, name: str, *, right: bool = True) -> str:
    draw = random.Random(5)
    lines = [
        {"prompt": f"{a}+{b}=", "response": f"#{a + b if right else draw.randrange(10, 99):02d}"}
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def job(folder: Path, name: str = "muon", *, right: bool = True, **changes: Any) -> dict[str, Any]:
    given = {
        "exp_name": name,
        "seed": 3,
        "output_dir": str(folder / "runs"),
        "task": "sft",
        "max_steps": 30,
        "eval_steps": 0,
        "eval_samples": 64,
        "sequence_length": 16,
        "tokenizer": dict(TOKENIZER),
        "actor_train": {
            "model_args": {"architecture": dict(ARCHITECTURE)},
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16, **MUON},
            "data_args": {"file_name": write(folder, name, right=right), "eval_file_name": write(folder, "held")},
            "use_sequence_packing": True,
            "sequence_packing_args": {"algorithm": "load_balance", "max_packed_sequence_length_train": 64},
        },
    }
    return with_changes(given, changes)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@needs_muon
def test_a_job_learns_and_answers_without_sense_teach_nothing(tmp_path: Path, report: Any) -> None:
    """Judged by the right answers; the control is trained on random ones."""
    losses = {}
    for name in ("learns", "control"):
        run_ranks(1, RUN, job(tmp_path, name, right=name == "learns"))
        rows = rows_of(tmp_path, name)
        losses[name] = rows[-1]["eval_loss"]
        assert all(row["lr"] == 1e-2 and 0 < row["grad_norm"] < 100 for row in rows)
    report(f"held-out loss under muon: {losses['learns']:.2f}; control {losses['control']:.2f}")
    assert losses["learns"] < 0.6 < 1.2 < losses["control"]


@needs_muon
@pytest.mark.slow
def test_a_resumed_job_goes_on_to_the_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "max_steps": 4, "save_steps": 2, "actor_train__model_args__dtype": "bf16",
        "actor_train__strategy_args": {"strategy_config": {"use_distributed_optimizer": True}},
    }  # fmt: skip
    run_straight_and_resumed(job, tmp_path, "sft-000002", **changes)
    assert rows_of(tmp_path, "straight")[2:] == rows_of(tmp_path, "resumed")[-2:]


@needs_muon
@pytest.mark.slow
@pytest.mark.rehearse
def test_a_rehearsal_counts_one_state_per_matrix(report: Any) -> None:
    compare_with_real_step("muon", with_changes(job_of(), {"actor_train__training_args__optimizer": "muon"}), 1, report)


# ---- what is refused


GATHERED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adapters": ({"model_args__lora_target": "all-linear"}, "muon.*whole weight matrices"),
    "frozen modules": ({"model_args__freeze_module_prefix": "embedding"}, "muon.*freeze_module_prefix"),
    "fp64": ({"model_args__dtype": "fp64"}, "muon.*model_args.dtype is fp64"),
    "fp16": ({"model_args__dtype": "fp16"}, "muon.*model_args.dtype is fp16"),
    "precision-aware": (
        {f"{LAYOUT}use_distributed_optimizer": True, f"{LAYOUT}use_precision_aware_optimizer": True},
        "use_precision_aware_optimizer: .*muon",
    ),
    "gathered parameters": (
        dict.fromkeys([f"{LAYOUT}{key}" for key in GATHERED], True),
        "overlap_param_gather: .*muon",
    ),
    "heads over ranks": (
        {"model_args__architecture__num_query_groups": 1, f"{LAYOUT}tensor_model_parallel_size": 2},
        "muon_split_qkv.*TP = 2 is above the 1 key-value heads",
    ),
    "gated attention": ({"model_args__architecture__attention_output_gate": True}, "muon_split_qkv.*gates"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_muon_does_not_go_with(case: str, tmp_path: Path, report: Any) -> None:
    changes, text = REFUSED[case]
    given = job(tmp_path, **{f"actor_train__{key}": value for key, value in changes.items()})
    with pytest.raises(ConfigFileError, match=text) as caught:
        config_from_dict(given)
    report(f"{case}: {caught.value}")
    given["actor_train"]["training_args"] = {"per_device_train_batch_size": 16}
    config_from_dict(given)


def test_a_warm_up_has_the_optimizer_of_the_policy(tmp_path: Path) -> None:
    changes = {"actor_train__training_args__optimizer": "muon"}
    with pytest.raises(ConfigFileError, match="warmup.training_args.optimizer: is adam, and actor_train's is muon"):
        config_from_dict(settings(tmp_path, **changes))
    config_from_dict(settings(tmp_path, **changes, warmup__training_args__optimizer="muon"))


def test_keys_of_muon_under_another_optimizer_are_told(tmp_path: Path) -> None:
    given = job(tmp_path, actor_train__training_args__optimizer="adam")
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(given))
    notices = {notice.path: notice.text for notice in load_config(file).notices}
    assert "optimizer is adam" in notices["actor_train.training_args.muon_extra_scale_factor"]


def test_a_placeholder_is_not_taken_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a version for another Megatron-Core. The message tells how to install the right one."""
    import sys

    from roll_batching.jobs.run.capabilities import check_capabilities

    for name in [name for name in sys.modules if name.partition(".")[0] == "emerging_optimizers"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "site" / "emerging_optimizers"
    (package / "orthogonalized_optimizers").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "999.9.9"\n')
    monkeypatch.syspath_prepend(str(package.parent))
    for version, fault in (
        (None, "cannot be imported"),
        ("0.1.0" if sys.version_info >= (3, 12) else "0.4.0", "and 0."),
    ):
        if version is not None:
            (package / "orthogonalized_optimizers" / "__init__.py").touch()
            (package / "package_info.py").write_text(f'__version__ = "{version}"\n')
        with pytest.raises(ConfigError, match=fault) as caught:
            check_capabilities(config_from_dict(job(tmp_path)), torch.device("cpu"))
        assert "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0." in str(caught.value)
        for name in [name for name in sys.modules if name.partition(".")[0] == "emerging_optimizers"]:
            monkeypatch.delitem(sys.modules, name)
