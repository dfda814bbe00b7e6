"""Every parallel layout gives the loss, the gradients and the steps of one process that shares no code with ours.

Losses of later steps of mixtures of experts are compared in fp64, with the gradients of each step. In fp32 the fifth
loss of one model is a sum of terms that cancel to -0.001, which one rank misses by 1.4e-4 of itself as well.
`./scripts/test.sh -m layouts` runs the whole matrix; a run without arguments keeps a part of it. One launch of
processes runs all layouts of a size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import (
    EXPERTS,
    MORE_EXPERTS,
    MORE_REPLICATED_KV_HEADS,
    MORE_UNEVEN,
    MOST_RANKS,
    REPLICATED_KV_HEADS,
    UNEVEN,
    Layout,
    pairwise,
    wanted_pairs,
)
from tests.support.layouts import _pairs as pairs_of
from tests.support.models import ARCHITECTURE, MODES
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.layouts

CAP = 64
STEPS = {"padded": 1, "dynamic": 1, "packed": 5}
"""Of each mode. Optimizers, schedules and weights do not depend on it: one mode goes on."""
RATE = 1e-3
LIMIT, STEPS_LIMIT = 1e-5, 1e-4
FP64_LIMIT, FP64_STEPS_LIMIT = 1e-6, 1e-5
"""Megatron's routers, their losses and the scale of these are computed in fp32 also there."""
DEEPEST = 8
Z_LOSS = 0.02
EXPERT_FIELDS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}

MATRIX = pairwise()
CORE = [
    Layout(tp=2, sp=True),
    Layout(pp=2, vpp=2),
    Layout(cp=2),
    Layout(dp=2, distopt=True),
    Layout(tp=2, sp=True, pp=2),
]


def _batches() -> list[Any]:
    from tests.support.models import random_batch

    return [random_batch(40 + step, 9, 40) for step in range(max(STEPS.values()))]


def _loss() -> Any:
    from roll_batching.losses import PolicyLoss

    return PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)


Variant = tuple[int, bool, bool, bool, int]
"""(layers, tied, moe, router, groups): what a model's numbers depend on."""


def variant_of(layout: Layout) -> Variant:
    """Two layers per chunk, where that is not deeper than `DEEPEST`: on a CPU their collectives are the time."""
    layers = layout.layers or (4 if layout.moe else min(2 * layout.pp * layout.vpp, DEEPEST))
    return layers, layout.tied, layout.moe, layout.router, layout.groups


def architecture(variant: Variant) -> dict[str, Any]:
    layers, tied, moe, router, groups = variant
    parts: dict[str, Any] = {"moe": EXPERT_FIELDS | {"z_loss_coeff": Z_LOSS if router else 0.0}} if moe else {}
    if groups:
        parts |= {"num_query_groups": groups, "qk_layernorm": True}
    return {**ARCHITECTURE, "num_layers": layers, "tie_word_embeddings": tied, **parts}


def _reference(folder: str | Path, variant: Variant) -> Path:
    return Path(folder) / f"reference-{'-'.join(map(str, variant))}.pt"


Steps = list[tuple[float, dict[str, torch.Tensor]]]
"""Loss and gradients of each step."""


def write_references(payload: tuple[str, list[Variant]]) -> None:
    """Results of five Adam steps in one process, by stock Megatron and torch; of mixtures also in fp64."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims

    folder, variants = payload
    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    for variant in variants:
        rows, steps = _reference_steps(variant, torch.float32)
        exact = _reference_steps(variant, torch.float64)[1] if variant[2] else None
        torch.save(([loss for loss, _ in steps], steps[0][1], rows, exact), _reference(folder, variant))


def _reference_steps(variant: Variant, dtype: torch.dtype) -> tuple[list[torch.Tensor], Steps]:
    """Log-probs of the first batch, and the steps."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from tests.support.models import fill
    from tests.support.reference import gradients, policy_loss, sequence_statistics, stock_model

    *_, moe, router, _ = variant
    options: dict[str, Any] = {}
    if moe:
        options = {
            "num_moe_experts": EXPERT_FIELDS["num_experts"],
            "moe_router_topk": EXPERT_FIELDS["router_topk"],
            "moe_ffn_hidden_size": EXPERT_FIELDS["ffn_hidden_size"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_z_loss_coeff": Z_LOSS if router else None,
            "calculate_per_token_loss": True,
        }
    model = stock_model(architecture(variant), params_dtype=dtype, **options).to(dtype)
    fill([model], ARCHITECTURE["vocab_size"])
    with torch.no_grad():
        rows = [sequence_statistics(model, tokens)[0] for tokens in _batches()[0].to_lists("input_ids")]
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    steps = []
    for batch in _batches():
        # Routers multiply by their tokens, and nobody divides here.
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / batch.num_tokens)
        loss = policy_loss(model, batch, clip=(0.2, 0.28), kl=0.05, entropy=0.02)
        steps.append((float(loss), gradients(model, loss)))
        adam.zero_grad()
        policy_loss(model, batch, clip=(0.2, 0.28), kl=0.05, entropy=0.02).backward()
        adam.step()
    return rows, steps


Found = dict[str, dict[str, Any]]


def compare(payload: tuple[str, list[dict[str, Any]]]) -> list[Found]:
    """For each layout and mode: differences from the reference, relative ones."""
    folder, layouts = payload
    found = []
    for index, layout in enumerate(layouts):
        meet(index)
        found.append(_compare_layout(folder, Layout(**layout)))
        part()
    return found


def _forward_gaps(strategy: Any, whole: Any, rows: list[torch.Tensor], loss: float) -> tuple[float, float]:
    """(log-probs of this rank's samples in their own order, the evaluated loss) against the reference."""
    from roll_batching.samples import collect, distribute, gather_lengths

    place = strategy.layout
    local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
    plan = strategy.plan(gather_lengths(local), forward=True)
    placed = distribute(local, plan)
    found = collect(strategy.compute_log_probs(placed, plan), plan).to_lists("log_probs")
    expected = torch.cat([rows[i] for i in range(place.dp_rank, len(whole), place.dp_size)])
    gap = (torch.cat([row[:-1] for row in found]) - expected).norm() / expected.norm()
    evaluated = strategy.evaluate(placed, plan, _loss())["loss"]
    return float(gap), abs(evaluated - loss) / abs(loss)


def _compare_layout(folder: str, layout: Layout) -> Found:
    expected_losses, expected, rows, exact = torch.load(_reference(folder, variant_of(layout)))
    # Megatron's distributed optimizer has no fp64.
    exact = None if layout.distopt or layout.dtype != "fp32" else exact
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    strategy = _strategy(layout, layout.dtype)
    found: Found = {}
    modes = MODES if layout.slices == 1 else ("packed",)
    for mode in modes:
        _start(strategy, layout, mode, layout.dtype)
        log_probs, evaluated = _forward_gaps(strategy, _batches()[0], rows, expected_losses[0])
        gaps, gradient, name, norm_gap = [], 0.0, "", 0.0
        for step, whole in enumerate(_batches()[: 1 if exact else STEPS[mode]]):
            result = _step(strategy, whole)
            gaps.append(abs(result.loss - expected_losses[step]) / abs(expected_losses[step]))
            if step == 0:
                norm_gap = abs(result.grad_norm - norm) / norm
                gradient, name = _gradient_gap(strategy, layout, expected)
        found[mode] = {
            "gradient": gradient,
            "parameter": name,
            "grad_norm": norm_gap,
            "log_probs": log_probs,
            "evaluate": evaluated,
            "loss": gaps[0],
            "steps": max(gaps),
        }
    if exact:
        strategy = _strategy(layout, "fp64")
        for mode in modes:
            _start(strategy, layout, mode, "fp64")
            found[mode] |= {"steps": 0.0, "fp64_gradients": 0.0}
            for (loss, gradients), whole in list(zip(exact, _batches(), strict=True))[: STEPS[mode]]:
                gap = abs(_step(strategy, whole).loss - loss) / abs(loss)
                found[mode]["steps"] = max(found[mode]["steps"], gap)
                gap, _ = _gradient_gap(strategy, layout, gradients)
                found[mode]["fp64_gradients"] = max(found[mode]["fp64_gradients"], gap)
    return found


def _config(layout: Layout, mode: str, dtype: str) -> Any:
    from tests.support.models import worker_config

    shape = architecture(variant_of(layout))
    return worker_config(mode, CAP, architecture=shape, megatron=layout.megatron(), dtype=dtype)


def _strategy(layout: Layout, dtype: str) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(_config(layout, "packed", dtype))
    strategy.initialize()
    return strategy


def _start(strategy: Any, layout: Layout, mode: str, dtype: str) -> None:
    """Initial weights, and a new optimizer."""
    from roll_batching.settings import TrainingArgs
    from tests.support.models import fill

    strategy.state = replace(strategy.state, batching=_config(layout, mode, dtype).batching())
    fill(strategy.chunks, ARCHITECTURE["vocab_size"], strategy.layout.tp_rank, strategy.layout.tp_size)
    strategy.start_phase(TrainingArgs(learning_rate=RATE, max_grad_norm=0.0))


def _step(strategy: Any, whole: Any) -> Any:
    """The result of an optimizer step."""
    from roll_batching.samples import distribute, gather_lengths

    local = whole.select(torch.arange(strategy.layout.dp_rank, len(whole), strategy.layout.dp_size))
    plan = strategy.plan(gather_lengths(local))
    return strategy.train_step(distribute(local, plan), plan, _loss())


def _gradient_gap(strategy: Any, layout: Layout, expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient from the reference or from its replicas, and the parameter."""
    from tests.support.models import whole_gradients, worst_difference

    found = whole_gradients(strategy.chunks, ARCHITECTURE["vocab_size"], strategy.layout.tp_rank, layout.distopt)
    gap, name = worst_difference(found, expected)
    return max(gap, found["spread"]), name


def _check(layout: Layout, found: dict[str, Any], report: Callable[[str], None]) -> list[str]:
    """Lines for the report, and what is beyond a limit."""
    beyond = []
    for mode, gap in found.items():
        line = (
            f"{layout!s:52} {mode:8} gradient {gap['gradient']:.1e} ({gap['parameter']}), "
            f"norm {gap['grad_norm']:.1e}, loss {gap['loss']:.1e}, "
            f"{STEPS[mode]} steps {gap['steps']:.1e}, log-probs {gap['log_probs']:.1e}"
        )
        exact = "fp64_gradients" in gap
        if exact:
            line += f", in fp64 gradients of {STEPS[mode]} steps {gap['fp64_gradients']:.1e}"
        report(line)
        if layout.dtype == "bf16":
            fine = gap["gradient"] <= 2 * found["padded"]["gradient"] and gap["gradient"] < 0.3
        else:
            first = max(gap[name] for name in ("gradient", "grad_norm", "loss", "log_probs", "evaluate"))
            fine = first < LIMIT and gap["steps"] < (FP64_STEPS_LIMIT if exact else STEPS_LIMIT)
            fine = fine and gap.get("fp64_gradients", 0.0) < FP64_LIMIT
        if not fine:
            beyond.append(line)
    return beyond


def _run(layouts: list[Layout], references: Path, report: Callable[[str], None]) -> None:
    missing = {variant_of(layout) for layout in layouts if not _reference(references, variant_of(layout)).exists()}
    run_ranks(1, "tests.strategy.test_layouts:write_references", (str(references), sorted(missing)), timeout=300)
    beyond = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [layout for layout in layouts if layout.ranks == ranks]
        payload = (str(references), [asdict(layout) for layout in same])
        outcome = run_ranks(ranks, "tests.strategy.test_layouts:compare", payload, timeout=900)[0]
        for layout, found in zip(same, outcome, strict=True):
            beyond += _check(layout, found, report)
    assert not beyond, "\n".join(beyond)


@pytest.fixture(scope="module")
def references() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_every_pair_of_settings_is_covered() -> None:
    covered = set().union(*map(pairs_of, MATRIX))
    assert covered == wanted_pairs()
    assert len(set(MATRIX)) == len(MATRIX)
    assert max(layout.ranks for layout in MATRIX) <= MOST_RANKS


def test_core_layouts(references: Path, report: Callable[[str], None]) -> None:
    _run(CORE, references, report)


@pytest.mark.slow
def test_the_whole_matrix(references: Path, report: Callable[[str], None]) -> None:
    _run([layout for layout in MATRIX if layout not in CORE], references, report)


@pytest.mark.slow
def test_pipeline_of_four_with_context_of_four(references: Path, report: Callable[[str], None]) -> None:
    _run([Layout(pp=4, cp=4)], references, report)


def test_experts(references: Path, report: Callable[[str], None]) -> None:
    _run(EXPERTS, references, report)


@pytest.mark.slow
def test_experts_in_more_layouts(references: Path, report: Callable[[str], None]) -> None:
    _run(MORE_EXPERTS, references, report)


def test_uneven_pipelines(references: Path, report: Callable[[str], None]) -> None:
    _run(UNEVEN, references, report)


@pytest.mark.slow
def test_more_uneven_pipelines(references: Path, report: Callable[[str], None]) -> None:
    _run(MORE_UNEVEN, references, report)


def test_replicated_kv_heads(references: Path, report: Callable[[str], None]) -> None:
    """With more tensor-parallel ranks than key-value heads."""
    _run(REPLICATED_KV_HEADS, references, report)


@pytest.mark.slow
def test_replicated_kv_heads_in_more_layouts(references: Path, report: Callable[[str], None]) -> None:
    _run(MORE_REPLICATED_KV_HEADS, references, report)
