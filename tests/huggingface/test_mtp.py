"""Heads of multi-token prediction, loaded from model directories: losses, steps and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import mtp
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

LIMIT = 1e-5
STEPS, RATE = 3, 1e-3
SGD_LIMIT, SGD_RATE = 2e-6, 0.1
EP, TP = Layout(dp=2, ep=2, moe=True), Layout(tp=2, sp=True, moe=True)


def _check(folder: Path, cases: list[tuple[str, Layout]], report: Any, sgd: bool = False) -> None:
    """Losses of the model and its head over steps of AdamW or SGD are those of transformers and torch."""
    models = {name: mtp.write_model(folder / name, name) for name, _ in cases}
    rate, limit = (SGD_RATE, SGD_LIMIT) if sgd else (RATE, LIMIT)
    payload = [(str(folder / name), layout, STEPS, rate, None, sgd) for name, layout in cases]
    everyone = run_ranks(cases[0][1].ranks, "tests.huggingface.mtp:trained", payload, timeout=600)
    expected = {name: mtp.sft_losses(*model, STEPS, rate, sgd) for name, model in models.items()}
    for number, (name, layout) in enumerate(cases):
        for found in everyone:
            pairs = zip(sum(found[number], ()), sum(expected[name], ()), strict=True)
            gap = max(abs(one - other) for one, other in pairs)
            report(f"{name:12} {layout!s:28} losses of {STEPS} steps {gap:.1e} ({expected[name]})")
            assert gap < limit, (name, layout)


def test_heads_of_deepseek_v3_and_glm(tmp_path: Path, report: Any) -> None:
    _check(tmp_path, [("deepseek_v3", Layout()), ("glm4_moe", Layout())], report)


@pytest.mark.slow
def test_layouts(tmp_path: Path, report: Any) -> None:
    """With SGD, which notices the scale of gradients, and does not enlarge the rounding of small ones as Adam does."""
    layouts = [EP, TP, Layout(pp=2), Layout(cp=2)]
    names = ("deepseek_v3", "glm4_moe", "qwen3_next")
    _check(tmp_path, [(name, layout) for name in names for layout in layouts], report, sgd=True)


@pytest.mark.slow
def test_heads_of_qwen(tmp_path: Path, report: Any) -> None:
    _check(tmp_path, [(name, Layout()) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")], report)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_read_and_written_to_the_bit(tmp_path: Path, report: Any) -> None:
    """Untrained, in two layouts; after a step the head's copies of embedding and output layer are the model's."""
    mtp.write_model(tmp_path / "model", "deepseek_v3", torch.bfloat16)
    first = _tensors(tmp_path / "model")
    payload = [
        (str(tmp_path / "model"), Layout(pp=2), 0, RATE, str(tmp_path / "stages"), False),
        (str(tmp_path / "model"), TP, 1, RATE, str(tmp_path / "trained"), False),
    ]
    run_ranks(2, "tests.huggingface.mtp:trained", payload, timeout=300)
    same = _tensors(tmp_path / "stages")
    assert same.keys() == first.keys() and all(torch.equal(same[name], first[name]) for name in first)
    after = _tensors(tmp_path / "trained")
    assert after.keys() == first.keys()
    # In bf16 the step is too small for the weights of norms, which are near 1, and no gradient reaches expert biases.
    kept = ("norm", "correction_bias")
    heads = [name for name in first if name.startswith("model.layers.4.") and not any(part in name for part in kept)]
    moved = [name for name in heads if not torch.equal(after[name], first[name])]
    report(f"{len(first)} tensors equal to the bit; a step moves {len(moved)} of the head's {len(heads)}")
    assert moved == heads
    assert torch.equal(after["model.layers.4.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["model.layers.4.shared_head.head.weight"], after["lm_head.weight"])
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.bad_input
def test_directories_without_heads_are_refused(tmp_path: Path) -> None:
    from tests.huggingface import tiny

    tiny.write_model(tmp_path / "none", "glm4_moe")
    (message,) = run_ranks(1, "tests.huggingface.mtp:refused", (str(tmp_path / "none"), 1))
    assert "model.layers.4.eh_proj.weight" in message and "mtp_num_layers: 1 asks for heads" in message
    tiny.write_model(tmp_path / "llama", "llama3")
    (message,) = run_ranks(1, "tests.huggingface.mtp:refused", (str(tmp_path / "llama"), 1))
    assert "LlamaForCausalLM has no heads of multi-token prediction" in message
