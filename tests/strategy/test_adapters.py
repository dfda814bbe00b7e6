"""LoRA in every parallel layout equals plain torch: log-probs, gradients, three optimizer steps, the frozen model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategy.test_layouts import CAP, LIMIT, RATE, STEPS_LIMIT, _batches, _loss, architecture
from tests.support.adapters import ALL, ALPHA, RANK
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

STEPS = 3
SOME = ("q_proj", "v_proj", "up_proj")
CORE = [
    Layout(),
    Layout(tp=2, sp=True),
    Layout(tp=2),
    Layout(pp=2, recompute=True, tied=True),
    Layout(cp=2),
    Layout(dp=2, distopt=True),
    Layout(dp=2, ep=2, moe=True),
]
MORE = [
    Layout(recompute=True, tied=True),
    Layout(pp=2, vpp=2, recompute=True),
    Layout(tp=2, sp=True, pp=2, distopt=True),
    Layout(tp=2, sp=True, dp=2, ep=2, moe=True, distopt=True),
    Layout(cp=2, dp=2, distopt=True, recompute=True),
    Layout(pp=2, vpp=2, pattern="E|tt|t|tL"),
]
Case = tuple[int, bool, bool, tuple[str, ...]]
"""(layers, tied, moe, targets): what a model's numbers depend on."""


def _case(layout: Layout, targets: tuple[str, ...]) -> Case:
    return (
        layout.pattern.count("t") if layout.pattern else 2 * layout.pp * layout.vpp,
        layout.tied,
        layout.moe,
        targets,
    )


def _file(folder: str | Path, case: Case) -> Path:
    return Path(folder) / ("-".join(map(str, case[:3])) + "-" + "-".join(case[3]) + ".pt")


def write_references(payload: tuple[str, list[Case]]) -> None:
    """Log-probs with and without adapters, gradients, and losses and adapters of three steps of torch's AdamW."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.adapters import PlainLora
    from tests.support.reference import policy_loss, sequence_statistics, stock_model

    folder, cases = payload
    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    for case in cases:
        layers, tied, moe, targets = case
        options: dict[str, Any] = {}
        if moe:
            options = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
            options |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
        model = PlainLora(stock_model(architecture((layers, tied, moe, False, 0)), **options), targets)
        texts = _batches()[0].to_lists("input_ids")
        with torch.no_grad():
            rows = [sequence_statistics(model, tokens)[0] for tokens in texts]
            model.on = False
            base = [sequence_statistics(model, tokens)[0] for tokens in texts]
            model.on = True
        names, leaves = list(model.matrices), list(model.matrices.values())
        adam = torch.optim.AdamW(leaves, lr=RATE, weight_decay=0.0)
        losses, first = [], {}
        for batch in _batches()[:STEPS]:
            loss = policy_loss(model, batch, clip=(0.2, 0.28), kl=0.05, entropy=0.02)
            losses.append(float(loss))
            adam.zero_grad()
            loss.backward()
            first = first or {name: leaf.grad.clone() for name, leaf in zip(names, leaves, strict=True)}
            adam.step()
        after = {name: leaf.detach() for name, leaf in model.matrices.items()}
        torch.save((losses, first, rows, base, after), _file(folder, case))


def settings(layout: Layout, mode: str, targets: tuple[str, ...]) -> Any:
    """A training role with adapters."""
    from tests.support.models import worker_config

    layers, tied, moe, _ = _case(layout, targets)
    role = worker_config(
        mode,
        CAP,
        architecture=architecture((layers, tied, moe, False, 0)),
        megatron=layout.megatron(),
        dtype=layout.dtype,
    )
    keys = {"lora_target": targets, "lora_rank": RANK, "lora_alpha": ALPHA}
    return role.model_copy(update={"model_args": role.model_args.model_copy(update=keys)})


def compare(payload: tuple[str, tuple[str, ...], list[dict[str, Any]]]) -> list[dict[str, dict[str, float]]]:
    """For each layout and mode: relative differences from the reference."""

    folder, targets, layouts = payload
    found = []
    for index, values in enumerate(layouts):
        meet(index)
        found.append(_compare_layout(folder, Layout(**values), targets))
        part()
    return found


def _compare_layout(folder: str, layout: Layout, targets: tuple[str, ...]) -> dict[str, dict[str, float]]:
    from roll_batching.modeling.adapters import adapters_off
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.adapters import adapter_values
    from tests.support.models import fill, whole_gradients, worst_difference

    losses, expected, rows, base, after = torch.load(_file(folder, _case(layout, targets)))
    strategy = MegatronTrainStrategy(settings(layout, "packed", targets))
    strategy.initialize()
    place, found = strategy.layout, {}
    for mode in ("padded", "packed"):
        strategy.state = replace(strategy.state, batching=settings(layout, mode, targets).batching())
        fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
        frozen = {n: p.clone() for c in strategy.chunks for n, p in c.named_parameters() if not p.requires_grad}
        strategy.start_phase(TrainingArgs(learning_rate=RATE, max_grad_norm=0.0))
        gaps = {"log_probs": _log_prob_gap(strategy, rows)}
        with adapters_off(strategy.chunks):
            gaps["base"] = _log_prob_gap(strategy, base)
        for step, whole in enumerate(_batches()[:STEPS]):
            local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
            plan = strategy.plan(gather_lengths(local))
            result = strategy.train_step(distribute(local, plan), plan, _loss())
            gaps["steps"] = max(gaps.get("steps", 0.0), abs(result.loss - losses[step]) / abs(losses[step]))
            if step == 0:
                norm = float(torch.stack([one.norm() for one in expected.values()]).norm())
                gaps["norm"] = abs(result.grad_norm - norm) / norm
                gradient = whole_gradients(strategy.chunks, 61, place.tp_rank, layout.distopt)
                gaps["gradient"] = max(worst_difference(gradient, expected)[0], gradient["spread"])
        strategy.gather_parameters()
        gaps["adapters"] = worst_difference(adapter_values(strategy.chunks, place.tp_rank), after)[0]
        changed = {n: p for c in strategy.chunks for n, p in c.named_parameters() if n in frozen}
        gaps["frozen"] = float(any(not torch.equal(p, frozen[n]) for n, p in changed.items()))
        found[mode] = gaps
    return found


def _log_prob_gap(strategy: Any, rows: list[torch.Tensor]) -> float:
    from roll_batching.samples import collect, distribute, gather_lengths

    whole, place = _batches()[0], strategy.layout
    members = torch.arange(place.dp_rank, len(whole), place.dp_size)
    local = whole.select(members)
    plan = strategy.plan(gather_lengths(local), forward=True)
    found = collect(strategy.compute_log_probs(distribute(local, plan), plan), plan).to_lists("log_probs")
    expected = torch.cat([rows[i] for i in members.tolist()])
    return float((torch.cat([row[:-1] for row in found]) - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def references() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _run(layouts: list[Layout], targets: tuple[str, ...], folder: Path, report: Callable[[str], None]) -> None:
    missing = {_case(one, targets) for one in layouts if not _file(folder, _case(one, targets)).exists()}
    run_ranks(1, "tests.strategy.test_adapters:write_references", (str(folder), sorted(missing)), timeout=400)
    beyond = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [layout for layout in layouts if layout.ranks == ranks]
        payload = (str(folder), targets, [asdict(layout) for layout in same])
        outcome = run_ranks(ranks, "tests.strategy.test_adapters:compare", payload, timeout=900)
        for rank, of_rank in enumerate(outcome):
            for layout, found in zip(same, of_rank, strict=True):
                for mode, gaps in found.items():
                    line = f"{layout!s:40} rank {rank} {mode:7} " + ", ".join(f"{k} {v:.1e}" for k, v in gaps.items())
                    report(line)
                    exact = max(gaps[name] for name in ("log_probs", "base", "gradient", "norm"))
                    if not (
                        exact < LIMIT and max(gaps["steps"], gaps["adapters"]) < STEPS_LIMIT and not gaps["frozen"]
                    ):
                        beyond.append(line)
    assert not beyond, "\n".join(beyond)


def test_core_layouts(references: Path, report: Callable[[str], None]) -> None:
    _run(CORE, ALL, references, report)


@pytest.mark.slow
def test_more_layouts(references: Path, report: Callable[[str], None]) -> None:
    _run(MORE, ALL, references, report)


@pytest.mark.slow
def test_some_projections(references: Path, report: Callable[[str], None]) -> None:
    _run([Layout(tp=2, sp=True), Layout(tp=2, sp=True, dp=2, ep=2, moe=True)], SOME, references, report)
