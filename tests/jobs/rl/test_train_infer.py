"""Jobs with `train_infer_correction`: without a mismatch nothing changes, and filters reach the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

RUN = "tests.jobs.rl.jobs:run"
WIDE = {"ratio_low": 0.9, "ratio_high": 1.1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def rows(folder: Path, name: str, world: int = 1, **changes: Any) -> list[dict[str, Any]]:
    base = {"warmup": None, "eval_samples": 0, "reward_function": "tests.jobs.rl.jobs:length", "exp_name": name}
    run_ranks(world, RUN, settings(folder, **base, **changes))
    return [row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["phase"] == "rl"]


def test_without_a_mismatch_the_job_trains_as_without_a_correction(folder: Path, report: Any) -> None:
    """The model in training samples, so that both log-probs are of one model, by other kernels."""
    weight = {"weight_type": "sequence", "upper_bound": 1.5, "batch_normalize": True}
    section = {"is_weight": weight, "filters": [{"agg_type": "sequence", **WIDE}, {"agg_type": "token", **WIDE}]}
    plain, corrected = rows(folder, "plain"), rows(folder, "corrected", train_infer_correction=section)
    for one, other in zip(plain, corrected, strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
        assert other["train_infer_ratio"] == pytest.approx(1, abs=1e-5)
        assert 0 <= other["train_infer_kl"] < 1e-9 and other["train_infer_weight"] == pytest.approx(1, abs=1e-4)
        assert other["train_infer_masked"] == other["train_infer_clipped"] == 0
    report(f"largest ratio {max(row['train_infer_ratio_max'] for row in corrected):.7f}")


def test_a_step_without_tokens_is_skipped_and_counted(folder: Path) -> None:
    section = {"filters": [{"agg_type": "geometric", "ratio_high": 0.5}]}
    (first, last) = rows(folder, "filtered", train_infer_correction=section)
    assert first["train_infer_masked"] == last["train_infer_masked"] == 1
    assert last["skipped_steps"] > 0 and first["grad_norm"] == 0
