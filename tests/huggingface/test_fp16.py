"""Models of directories in fp16: log-probs beside transformers in fp32, training, and what is written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.huggingface import tiny
from tests.huggingface.test_export import check_equal
from tests.support.ranks import run_ranks

FAMILIES = ("qwen3", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt_oss", "gemma3")
STEPS = 6
MEDIAN = 3e-3
"""Median difference of log-probs near -4; that of qwen3_next in bf16 is 1.2e-2. A token whose expert changes by
rounding has a larger one."""


def in_fp16(directory: str) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.huggingface.ranks import role

    config = role(directory)
    model = config.model_args.model_copy(update={"dtype": "fp16"})
    strategy = MegatronTrainStrategy(config.model_copy(update={"model_args": model}))
    strategy.initialize()
    return strategy


def trained(folder: str) -> dict[str, Any]:
    """By family: log-probs, losses of steps of training, and steps skipped."""
    from tests.huggingface.ranks import log_probs, sft_losses

    found = {}
    for name in FAMILIES:
        strategy = in_fp16(f"{folder}/{name}")
        strategy.export(f"{folder}/{name}-written")
        found[name] = (log_probs(strategy), sft_losses(strategy, STEPS, 1e-3), strategy.skipped_steps)
    return found


def test_families_compute_train_and_are_written_in_fp16(tmp_path: Path, report: Any) -> None:
    models = {name: tiny.write_model(tmp_path / name, name, torch.float16) for name in FAMILIES}
    for name in FAMILIES:
        tiny.write_tokenizer(tmp_path / name)
    (found,) = run_ranks(1, "tests.huggingface.test_fp16:trained", str(tmp_path))
    for name, (log_probs, losses, skipped) in found.items():
        gaps = (torch.cat(log_probs) - torch.cat(tiny.log_probs(models[name])).detach()).abs()
        gap, median = float(gaps.max()), float(gaps.median())
        report(f"{name} in fp16: log-probs differ by {gap:.1e}, median {median:.1e}; {skipped} steps skipped")
        assert median < MEDIAN, name
        assert losses[-1] < losses[0] and skipped < STEPS, name
        check_equal(tmp_path / f"{name}-written", tmp_path / name)


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path, "qwen3", torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    (outcome,) = run_ranks(1, "tests.huggingface.test_fp16:in_fp16", str(tmp_path), check=False)
    assert "model.norm.weight has values beyond fp16: set model_args.dtype to bf16 or fp32" in outcome.output
