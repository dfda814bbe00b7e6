"""A model of transformers, loaded in any layout, gives the same log-probs, tokens and training steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import tiny
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.models

LIMIT = 1e-5
NEW, MANY, STEPS, RATE = 4, 12, 3, 1e-3
LAYOUTS = [Layout(tp=2, sp=True), Layout(pp=2), Layout(pp=2, vpp=2), Layout(cp=2)]
EXPERT_LAYOUTS = [Layout(dp=2, ep=2, moe=True), Layout(tp=2, sp=True, moe=True)]


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[str], tuple[Path, Any]]]:
    """By name: a directory with the model, and the model."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, tuple[Path, Any]] = {}

        def model(name: str) -> tuple[Path, Any]:
            if name not in made:
                made[name] = Path(folder) / name, tiny.write_model(Path(folder) / name, name)
            return made[name]

        yield model


def _check(models: Any, cases: list[tuple[str, Layout, dict[str, Any]]], report: Callable[[str], None]) -> None:
    """All cases have as many ranks."""
    payload = [(str(models(name)[0]), layout, wanted) for name, layout, wanted in cases]
    everyone = run_ranks(cases[0][1].ranks, "tests.huggingface.ranks:answers", payload, timeout=600)
    for number, (name, layout, wanted) in enumerate(cases):
        model = models(name)[1]
        with torch.no_grad():
            expected = tiny.log_probs(model)
        for answers in everyone:
            mine = answers[number]
            own = range(mine["dp_rank"], len(expected), layout.dp)
            pairs = zip(mine["log_probs"], own, strict=True)
            gap = max(float((row - expected[i]).abs().max()) for row, i in pairs if len(row))
            report(f"{name:10} {layout!s:24} log-probs {gap:.1e}")
            assert gap < LIMIT, (name, layout)
            if "greedy" in wanted:
                with torch.no_grad():
                    tokens = tiny.greedy(model, wanted["greedy"])
                assert mine["greedy"] == [tokens[i] for i in own]
        if "steps" in wanted:
            losses = tiny.sft_losses(model, STEPS, RATE)
            gap = max(abs(a - b) for a, b in zip(everyone[0][number]["losses"], losses, strict=True))
            report(
                f"{name:10} {layout!s:24} {STEPS} steps of AdamW {gap:.1e} (losses {losses[0]:.3f} to {losses[-1]:.3f})"
            )
            assert gap < LIMIT and losses[-1] < losses[0]


EVERYTHING = {"greedy": NEW, "steps": STEPS, "rate": RATE}


def test_one_rank(models: Any, report: Callable[[str], None]) -> None:
    _check(models, [(name, Layout(), EVERYTHING) for name in tiny.MODELS], report)


@pytest.mark.slow
def test_longer_responses(models: Any, report: Callable[[str], None]) -> None:
    _check(models, [(name, Layout(), {"greedy": MANY}) for name in tiny.MODELS], report)


TRAINED = {"steps": STEPS, "rate": RATE}


def test_layouts(models: Any, report: Callable[[str], None]) -> None:
    """The family with norms of its own, and the one with biases and tied embeddings."""
    _check(models, [("qwen3", layout, TRAINED) for layout in LAYOUTS] + [("qwen2", Layout(pp=2), TRAINED)], report)


def test_uneven_pipelines(models: Any, report: Callable[[str], None]) -> None:
    """The second one samples, too, each token through both stages."""
    virtual = Layout(pp=2, vpp=2, layers=4, pattern="Ett|t|t|L")
    ends = Layout(pp=2, layers=4, first=1)
    _check(models, [("qwen3", virtual, TRAINED), ("qwen2", ends, {**TRAINED, "greedy": NEW})], report)


@pytest.mark.slow
def test_all_families_in_all_layouts(models: Any, report: Callable[[str], None]) -> None:
    """Two chunks per stage stand for plain stages as well."""
    layouts = [layout for layout in LAYOUTS if layout != Layout(pp=2)]
    _check(models, [(name, layout, TRAINED) for name in tiny.DENSE for layout in layouts], report)


def test_windows(models: Any, report: Callable[[str], None]) -> None:
    """In half of the layers, and over chunks of sequences on two ranks."""
    _check(models, [("qwen2_window", layout, TRAINED) for layout in (Layout(cp=2), Layout(pp=2))], report)


def test_two_ropes_and_norms_behind_layers(models: Any, report: Callable[[str], None]) -> None:
    """With and without sequence parallelism: the weights of norms are on all ranks."""
    _check(models, [("gemma3", layout, TRAINED) for layout in (*LAYOUTS, Layout(tp=2))], report)


def test_experts(models: Any, report: Callable[[str], None]) -> None:
    names = ("qwen3_moe", "deepseek_v3")
    cases = [(name, layout, TRAINED) for name in names for layout in EXPERT_LAYOUTS]
    cases += [("gpt_oss", EXPERT_LAYOUTS[0], TRAINED), ("minimax_m2", EXPERT_LAYOUTS[1], TRAINED)]
    _check(models, cases, report)


def test_gated_delta_nets(models: Any, report: Callable[[str], None]) -> None:
    """Their heads are divided over context-parallel ranks, too."""
    layouts = (Layout(cp=2), *EXPERT_LAYOUTS)
    cases = [("qwen3_next", layout, TRAINED) for layout in layouts]
    _check(models, [*cases, ("qwen3_next", Layout(pp=2), {**TRAINED, "greedy": 2})], report)


@pytest.mark.slow
def test_gated_delta_nets_under_tensor_and_context_parallelism(models: Any, report: Callable[[str], None]) -> None:
    _check(models, [("qwen3_next", Layout(tp=2, sp=True, cp=2, moe=True), TRAINED)], report)


def test_text_models_beside_vision_encoders(models: Any, report: Callable[[str], None]) -> None:
    cases = [("qwen3_5_vision", Layout(tp=2)), ("gemma3_vision", Layout(pp=2))]
    _check(models, [(name, layout, TRAINED) for name, layout in cases], report)
    _check(models, [("qwen3_5_moe_vision", layout, TRAINED) for layout in EXPERT_LAYOUTS], report)


@pytest.mark.slow
def test_more_context_parallel_ranks_than_heads_of_gated_delta_nets(models: Any, report: Callable[[str], None]) -> None:
    _check(models, [("qwen3_next", Layout(cp=8), TRAINED)], report)


@pytest.mark.slow
def test_all_experts(models: Any, report: Callable[[str], None]) -> None:
    """Weights of a family are divided by tensor and expert parallelism, its kinds of layers by stages and contexts."""
    everywhere = (Layout(pp=2, vpp=2), Layout(cp=2))
    cases = [(name, layout, TRAINED) for name in tiny.EXPERTS for layout in everywhere]
    cases += [(name, EXPERT_LAYOUTS[0], TRAINED) for name in tiny.UNSHARDED]
    _check(models, cases, report)
    both = Layout(tp=2, sp=True, dp=2, ep=2, moe=True)
    _check(models, [(name, both, TRAINED) for name in tiny.EXPERTS if name not in tiny.UNSHARDED], report)


@pytest.mark.bad_input
def test_biases_of_experts_are_refused_under_tensor_parallelism(models: Any) -> None:
    case = ("gpt_oss", EXPERT_LAYOUTS[1], {})
    with pytest.raises(AssertionError, match="adds the biases of experts on every tensor-parallel rank"):
        _check(models, [case], print)


FLASH, FLASH_4 = (f"tests.support.own_attention:{name}OnTheCpu" for name in ("Flash", "FlashFour"))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((FLASH, name) for name in ("qwen2_window", "gemma3", "deepseek_v3")),
        *((FLASH_4, name) for name in ("gemma3", "deepseek_v3", "gpt_oss")),
    ],
)
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2)], ids=str)
def test_kernels_of_variable_length_get_windows_sinks_and_head_dimensions(
    backend: str, name: str, layout: Layout, models: Any, report: Callable[[str], None]
) -> None:
    """Through stand-ins for flash-attn's functions on the CPU, which have what its documentation says."""
    folder, model = models(name)
    with torch.no_grad():
        expected = tiny.log_probs(model)
    for rows in run_ranks(
        layout.ranks, "tests.huggingface.ranks:log_probs_by", (str(folder), layout, backend, "packed")
    ):
        gap = max(float((row - right).abs().max()) for row, right in zip(rows, expected, strict=True) if len(row))
        report(f"{name} {layout}, {backend.rpartition(':')[2]}: log-probs {gap:.1e}")
        assert gap < LIMIT


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2", "deepseek_v3", "gpt_oss", "gemma3", "qwen3_next"])
def test_padded_is_packed(name: str, models: Any, report: Callable[[str], None]) -> None:
    folder, _ = models(name)
    rows = {}
    for mode in ("packed", "padded"):
        (rows[mode],) = run_ranks(1, "tests.huggingface.ranks:log_probs_by", (str(folder), Layout(), "dense", mode))
    pairs = zip(rows["packed"], rows["padded"], strict=True)
    gap = max(float((one - other).abs().max()) for one, other in pairs if len(one))
    report(f"{name}: packed and padded log-probs differ by {gap:.1e}")
    assert gap < LIMIT
