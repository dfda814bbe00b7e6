"""A model with a value head: values, gradients and three optimizer steps in every layout are those of one process.

The reference is stock Megatron attention, one unpacked sequence at a time, with a plain torch layer as the head.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategy.test_layouts import architecture, variant_of
from tests.support.layouts import Layout
from tests.support.models import MODES, worker_config
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_values:"
CAP = 64
STEPS = {"padded": 1, "dynamic": 1, "packed": 3}
"""Of each mode, on which optimizers and weights do not depend."""
RATE = 1e-3
CLIP = 0.3
LIMIT, STEPS_LIMIT = 1e-5, 1e-4

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sp=True, tied=True),
    Layout(pp=2, tied=True),
    Layout(cp=2),
    Layout(dp=2, distopt=True),
    Layout(dp=2, per_token=False),
]
LARGER = [
    Layout(pp=2, vpp=2),
    Layout(tp=2, sp=True, pp=2),
    Layout(tp=2, sp=True, cp=2, recompute=True),
    Layout(pp=2, vpp=2, dp=2, distopt=True),
    Layout(pp=2, layers=4, first=1, dp=2),
    Layout(moe=True, router=True, dp=2, ep=2),
]


def _batches() -> list[Any]:
    from tests.support.models import random_batch

    batches = []
    for step in range(max(STEPS.values())):
        batch = random_batch(70 + step, 9, 40)
        g = torch.Generator().manual_seed(step)
        fields = {name: torch.randn(batch.num_tokens, generator=g) for name in ("returns", "old_values")}
        batches.append(batch.with_fields(fields, dict.fromkeys(fields, "next_token")))
    return batches


class PlainHead(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, width))

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden @ self.weight.T, None


def _values_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    length = len(tokens)
    hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
    return model(tokens[None], torch.arange(length)[None], hidden_from)[0, :, 0]


def _value_loss(model: Any, batch: Any) -> torch.Tensor:
    """1/2 max((V - R)^2, (clip(V) - R)^2), the mean over all counted tokens; written out."""
    total, count = torch.zeros(()), 0
    columns = [batch.to_lists(name) for name in ("input_ids", "response_mask", "returns", "old_values")]
    for tokens, response, returns, old in zip(*columns, strict=True):
        mask = response[1:].bool()
        values, returns, old = _values_of(model, tokens)[:-1], returns[:-1], old[:-1]
        clipped = torch.min(torch.max(values, old - CLIP), old + CLIP)
        total = total + torch.max((values - returns) ** 2, (clipped - returns) ** 2)[mask].sum() / 2
        count += int(mask.sum())
    return total / count


def _reference_path(folder: str | Path, variant: Any) -> Path:
    return Path(folder) / f"values-{'-'.join(map(str, variant))}.pt"


def write_references(payload: tuple[str, list[Any]]) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.strategy.test_layouts import EXPERT_FIELDS, Z_LOSS
    from tests.support.models import fill
    from tests.support.reference import gradients, stock_model

    folder, variants = payload
    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    for variant in variants:
        options: dict[str, Any] = {}
        if variant[2]:
            options = {
                "num_moe_experts": EXPERT_FIELDS["num_experts"],
                "moe_router_topk": EXPERT_FIELDS["router_topk"],
                "moe_ffn_hidden_size": EXPERT_FIELDS["ffn_hidden_size"],
                "moe_router_load_balancing_type": "none",
                "moe_token_dispatcher_type": "alltoall",
                "moe_z_loss_coeff": Z_LOSS,
                "calculate_per_token_loss": True,
            }
        shape = architecture(variant) | {"tie_word_embeddings": False}  # the head is no embedding
        model = stock_model(shape, **options)
        model.output_layer = PlainHead(shape["hidden_size"])
        fill([model], shape["vocab_size"])
        first = _batches()[0]
        with torch.no_grad():
            values = [_values_of(model, tokens)[:-1] for tokens in first.to_lists("input_ids")]
        adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        losses, whole = [], {}
        for batch in _batches():
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / batch.num_tokens)
            loss = _value_loss(model, batch)
            losses.append(float(loss))
            whole = whole or gradients(model, loss)
            adam.zero_grad()
            _value_loss(model, batch).backward()
            adam.step()
        torch.save((losses, whole, values), _reference_path(folder, variant))


def _critic(layout: Layout, mode: str = "packed") -> Any:
    shape = architecture(variant_of(layout))
    config = worker_config(mode, CAP, architecture=shape, megatron=layout.megatron(), dtype=layout.dtype)
    model_args = config.model_args.model_copy(update={"value_head": True})
    return config.model_copy(update={"model_args": model_args})


def compare(payload: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:

    folder, layouts = payload
    found = []
    for index, layout in enumerate(layouts):
        meet(index)
        found.append(_compare_layout(folder, Layout(**layout)))
        part()
    return found


def _compare_layout(folder: str, layout: Layout) -> dict[str, Any]:
    from roll_batching.losses import ValueLoss
    from roll_batching.samples import collect, distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, whole_gradients, worst_difference

    expected_losses, expected, expected_values = torch.load(_reference_path(folder, variant_of(layout)))
    strategy, loss = MegatronTrainStrategy(_critic(layout)), ValueLoss(clip=CLIP)
    strategy.initialize()
    place, found = strategy.layout, {}
    for mode in MODES:
        strategy.state = replace(strategy.state, batching=_critic(layout, mode).batching())
        fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
        strategy.start_phase(TrainingArgs(learning_rate=RATE, max_grad_norm=0.0))
        losses, gap, name, spread, values_gap = [], 0.0, "", 0.0, 0.0
        for step, whole in enumerate(_batches()[: STEPS[mode]]):
            local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
            plan = strategy.plan(gather_lengths(local))
            if step == 0:
                forward = strategy.plan(gather_lengths(local), forward=True)
                results = strategy.forward(distribute(local, forward), forward, needs=("values",))
                rows = collect(results, forward, like=local).to_lists("values")
                theirs = torch.cat([expected_values[i] for i in range(place.dp_rank, len(whole), place.dp_size)])
                values_gap = float((torch.cat([row[:-1] for row in rows]) - theirs).norm() / theirs.norm())
            losses.append(strategy.train_step(distribute(local, plan), plan, loss).loss)
            if step == 0:
                gradient = whole_gradients(strategy.chunks, 61, place.tp_rank, layout.distopt)
                gap, name = worst_difference(gradient, expected)
                spread = gradient["spread"]
        steps = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=False))
        found[mode] = {"values": values_gap, "gradient": max(gap, spread), "where": name, "steps": steps}
    return found


@pytest.fixture(scope="module")
def references():
    with tempfile.TemporaryDirectory() as folder:
        variants = sorted({variant_of(layout) for layout in LAYOUTS + LARGER})
        run_ranks(1, HERE + "write_references", (folder, variants))
        yield folder


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_gradients_and_steps_are_the_reference_s(ranks: int, references: str, report) -> None:
    layouts = [layout for layout in LAYOUTS + LARGER if layout.ranks == ranks]
    found = run_ranks(ranks, HERE + "compare", (references, [asdict(one) for one in layouts]), timeout=400)
    for layout, by_mode in zip(layouts, found[0], strict=True):
        for mode, gap in by_mode.items():
            report(
                f"{layout!s:40} {mode:8} values {gap['values']:.1e}, gradient {gap['gradient']:.1e} ({gap['where']}), "
                f"{STEPS[mode]} steps {gap['steps']:.1e}"
            )
    for of_rank in found:
        for by_mode in of_rank:
            for gap in by_mode.values():
                assert gap["values"] < LIMIT and gap["gradient"] < LIMIT and gap["steps"] < STEPS_LIMIT
