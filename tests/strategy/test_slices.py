"""Packs cut into slices train as whole packs, and as one process with stock Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs.rl.jobs import run_straight_and_resumed, settings, write_data
from tests.jobs.rl.test_kto import rows_of
from tests.strategy.test_layouts import _run as compare_with_one_rank
from tests.strategy.test_shared_prefixes import batch, losses, make_model
from tests.support.exact import EXACT, OF_ROUTERS
from tests.support.layouts import Layout
from tests.support.models import ARCHITECTURE
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_slices:"
SLOW = [pytest.mark.slow, pytest.mark.layouts]
CORE = [
    Layout(pp=2, slices=4, recompute=True, tied=True),
    Layout(cp=2, slices=3),
    Layout(dp=2, distopt=True, overlap=True, slices=4),
]
MORE = [
    Layout(slices=5),
    Layout(pp=2, slices=8, per_token=False, first=1, layers=4),
    Layout(tp=2, sp=True, slices=3),
    Layout(dp=2, distopt=True, slices=4),
    Layout(dp=2, ep=2, moe=True, slices=3),
    Layout(pp=4, slices=4),
    Layout(pp=2, cp=2, slices=3),
    Layout(pp=2, tp=2, sp=True, slices=3, tied=True),
    Layout(pp=2, tp=2, slices=4, recompute=True),
    Layout(pp=2, dp=2, distopt=True, slices=4),
    Layout(pp=2, dp=2, distopt=True, overlap=True, slices=3),
    Layout(pp=2, dp=2, overlap=True, tied=True, slices=2),
    Layout(dp=2, overlap=True, tied=True, slices=3),
    Layout(pp=2, dp=2, ep=2, moe=True, slices=3),
    Layout(pp=4, tp=2, sp=True, slices=6),
]
"""Against one rank: losses of five steps, gradients, log-probs."""


def test_layouts(tmp_path: Path, report: Callable[[str], None]) -> None:
    compare_with_one_rank(CORE, tmp_path, report)


@pytest.mark.slow
@pytest.mark.layouts
def test_more_layouts(tmp_path: Path, report: Callable[[str], None]) -> None:
    compare_with_one_rank(MORE, tmp_path, report)


def randomly_cut(plan: Any, random: np.random.Generator) -> Any:
    """The plan with 1 to 23 slices a pack, 23 of the first, cut anywhere; as many at an index on all ranks."""
    from roll_batching.planning import Plan
    from roll_batching.planning.plan_arrays import PackSlices

    unit = plan.constraints.micro_batch_alignment
    units = (plan.tokens // unit).reshape(plan.constraints.dp_size, -1)
    wanted = np.append(23, random.integers(1, 24, units.shape[1] - 1))
    counts = np.minimum(wanted, units.min(axis=0))
    cuts = [
        np.sort(random.choice(np.arange(1, most), count - 1, replace=False)) * unit
        for most, count in zip(units.reshape(-1), np.tile(counts, len(units)), strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(of_pack) for of_pack in cuts])])
    slices = PackSlices(offsets, np.concatenate(cuts).astype(np.int64), np.ones(len(cuts) + offsets[-1], np.int64))
    return Plan.from_dict((cut := replace(plan, slices=slices)).to_dict() | {"fingerprint": cut.fingerprint})


Case = tuple[str, str, bool]
"""(kind of tree, loss, whether prefixes are shared)"""


def compare(payload: tuple[list[dict[str, Any]], list[Case], dict[str, Any]]) -> list[str]:
    """The cases that differ from whole packs by layout, with how much, and the number of cases."""
    layouts, cases, architecture = payload
    found = []
    for index, layout in enumerate(layouts):
        meet(index)
        found += _compare_layout(Layout(**layout), cases, architecture)
        part()
    return found


def _compare_layout(layout: Layout, cases: list[Case], architecture: dict[str, Any]) -> list[str]:
    from roll_batching.samples import collect, distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import gap, mine, refill
    from tests.support.models import whole_gradients

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if layout.moe else {}
    shape = {**ARCHITECTURE, "num_layers": max(2, layout.pp), **experts, **architecture}
    is_critic, random = cases[0][1] == "values", np.random.default_rng(7)
    strategy = make_model(critic=is_critic, architecture=shape, megatron=layout.megatron(), dtype="fp64")

    def step(local: Any, plan: Any, loss: Any) -> tuple[Any, dict[str, Any], Any]:
        refill(strategy)
        placed = distribute(local, plan)
        outputs = collect(strategy.forward(placed, plan, ("values" if is_critic else "log_probs",)), plan, like=local)
        result = strategy.train_step(placed, plan, loss)
        return result, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, False), outputs

    differing = []
    for kind, name, is_shared in cases:
        whole = batch(kind, torch.Generator().manual_seed(3))
        local, loss = mine(strategy, whole), losses()[name]
        table = gather_lengths(local)
        groups = {}
        if name == "dpo":
            place = {sample: i for i, sample in enumerate(whole.ids.tolist())}
            groups = {"group_ids": [place[sample] // 2 for sample in table.ids.tolist()]}
        plan = strategy.plan(find_shared_prefixes(local, table) if is_shared else table, **groups)
        cut = randomly_cut(plan, random)
        assert cut.slices.counts[0] > 3 and cut != plan
        *right, expected = step(local, plan, loss)
        *found, outputs = step(local, cut, loss)
        loss_gap, gradient_gap = gap(tuple(found), tuple(right))
        output_gap = max(float((outputs[n] - expected[n]).abs().max()) for n in outputs.schema)
        limit = OF_ROUTERS if layout.moe else EXACT
        if max(loss_gap, output_gap, gradient_gap) > limit:
            differing.append(f"{layout} {kind} {name} {is_shared}: {loss_gap:.1e} {gradient_gap:.1e} {output_gap:.1e}")
    return differing


def _run(layouts: list[Layout], cases: list[Case], architecture: dict[str, Any] | None = None) -> None:
    differing = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [asdict(layout) for layout in layouts if layout.ranks == ranks]
        for found in run_ranks(ranks, f"{HERE}compare", (same, cases, architecture or {}), timeout=900):
            differing += found
    assert not differing, "\n".join(differing)


CASES: list[Case] = [
    ("groups", "policy", False),
    ("groups", "policy", True),
    ("ragged groups, a group of one, prompts of one token", "sequences", True),
    ("three levels", "logits", False),
    ("duplicates, and samples that begin others", "gathered logits", True),
    ("groups", "dpo", False),
]


def test_random_cuts_losses_and_shared_prefixes() -> None:
    _run([Layout(pp=2)], CASES)


@pytest.mark.slow
@pytest.mark.layouts
def test_random_cuts_in_more_layouts() -> None:
    _run(
        [
            Layout(),
            Layout(cp=2),
            Layout(tp=2, sp=True),
            Layout(pp=2, recompute=True),
            Layout(pp=2, cp=2),
            Layout(pp=2, tp=2, sp=True, recompute=True),
            Layout(pp=2, dp=2, ep=2, moe=True),
            Layout(pp=4),
        ],
        CASES,
    )


LATENT = {
    "num_query_groups": ARCHITECTURE["num_attention_heads"],
    "multi_latent_attention": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
    },
}


@pytest.mark.parametrize(
    "architecture", [LATENT, {"sliding_window": 11}, {"attention_sinks": True}], ids=["latent", "window", "sinks"]
)
@pytest.mark.slow
@pytest.mark.layouts
def test_other_attention(architecture: dict[str, Any]) -> None:
    _run([Layout(pp=2), Layout(pp=2, recompute=True), Layout(cp=2)], CASES[:2], architecture)


@pytest.mark.slow
@pytest.mark.layouts
def test_values_of_a_critic() -> None:
    _run([Layout(pp=2), Layout(pp=2, tp=2, sp=True)], [("groups", "values", shared) for shared in (False, True)])


def train_long(layouts: list[dict[str, Any]]) -> list[tuple[float, float, float, int]]:
    """By layout, gaps of loss, gradients and log-probs between samples in slices of the cap and whole ones, and the
    most slices.
    """
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.losses.steps import gap, mine, refill
    from tests.support.models import whole_gradients

    found = []
    for index, values in enumerate(layouts):
        meet(index)
        layout, cap = Layout(**values), 24
        caps = {f"max_packed_sequence_length_{kind}": cap for kind in ("train", "forward")}
        strategy = make_model(
            critic=False,
            architecture=ARCHITECTURE,
            megatron=layout.megatron(),
            dtype="fp64",
            sequence_packing_args=caps,
            planning_args={"oversize": "slice"},
        )
        local = mine(strategy, batch("groups", torch.Generator().manual_seed(5)))
        plan = strategy.plan(gather_lengths(local))
        whole = replace(plan, slices=None, constraints=plan.constraints.without_slices)
        assert plan.tokens.max() > 2 * cap

        def step(
            plan: Any, strategy: Any = strategy, local: Any = local, layout: Layout = layout
        ) -> tuple[Any, Any, Any]:
            refill(strategy)
            placed = distribute(local, plan)
            outputs = collect(strategy.forward(placed, plan, ("log_probs",)), plan, like=local)
            result = strategy.train_step(placed, plan, losses()["policy"])
            return result, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, False), outputs

        *cut, outputs = step(plan)
        *right, expected = step(whole)
        log_probs = float((outputs["log_probs"] - expected["log_probs"]).abs().max())
        found.append((*gap(tuple(cut), tuple(right)), log_probs, int(plan.slices.counts.max())))
        part()
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(recompute=True)],
        pytest.param(
            [Layout(pp=2, recompute=True), Layout(cp=2, recompute=True), Layout(dp=2, recompute=True)], marks=SLOW
        ),
        pytest.param([Layout(pp=2, tp=2, sp=True, recompute=True, slices=2)], marks=SLOW),
    ],
)
def test_samples_above_the_cap_in_slices(layouts: list[Layout]) -> None:
    for found in run_ranks(layouts[0].ranks, f"{HERE}train_long", [asdict(layout) for layout in layouts]):
        for *gaps, most in found:
            assert max(gaps) < EXACT and most > 2


def repeat(count: int) -> list[float]:
    """Losses of one step of whole packs and of `count` steps whose packs are cut at random."""
    from roll_batching.samples import distribute, gather_lengths
    from tests.losses.steps import mine, refill

    layout, random = Layout(pp=4, slices=4), np.random.default_rng(11)
    shape = {**ARCHITECTURE, "num_layers": 4}
    strategy = make_model(critic=False, architecture=shape, megatron=layout.megatron(), dtype="fp64")
    local = mine(strategy, batch("groups", torch.Generator().manual_seed(3)))
    plan = replace(strategy.plan(gather_lengths(local)), slices=None)
    placed, found = distribute(local, plan), []
    for number in range(count + 1):
        refill(strategy)
        cut = randomly_cut(plan, random) if number else plan
        found.append(strategy.train_step(placed, cut, losses()["policy"]).loss)
    return found


@pytest.mark.slow
@pytest.mark.layouts
def test_two_hundred_steps_end_and_agree() -> None:
    for whole, *cut in run_ranks(4, f"{HERE}repeat", 200, timeout=900):
        assert len(cut) == 200 and max(abs(loss - whole) for loss in cut) < EXACT


def sliced_job(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    layout = {"pipeline_model_parallel_size": 2, "pipeline_slices": 3}
    return settings(
        folder,
        exp_name=name,
        warmup=None,
        reward_function="tests.jobs.rl.jobs:length",
        actor_train__strategy_args__strategy_config=layout,
        **changes,
    )


def test_resumed_to_the_bit(tmp_path: Path) -> None:
    write_data(tmp_path)
    run_straight_and_resumed(sliced_job, tmp_path, "rl-000001", save_steps=1)
    assert rows_of(tmp_path, "resumed") == rows_of(tmp_path, "straight")


class Failing:
    """A loss that raises for one pack."""

    masks = ("response_mask",)
    needs = ("log_probs",)

    def token_loss(self, tokens: Any) -> Any:
        raise ValueError("my mistake")


def trouble(_: None) -> dict[str, str]:
    """What is said of models that cannot be cut, of a loss that raises, and of a step after it."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from roll_batching.strategy.model_state import StepSettings
    from tests.losses.steps import mine
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.models import random_batch
    from tests.support.own_model import build

    said: dict[str, str] = {}

    def note(name: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except RollBatchingError as error:
            said[name] = str(error)
            return None
        said[name] = "accepted"
        return result

    def adopt(core: str, slices: Any, mode: str = "packed", **options: Any) -> Any:
        settings = StepSettings(pipeline_slices=slices)
        return MegatronTrainStrategy.from_parts(
            *build(core, **options), _batching(mode), vocab_size=61, settings=settings
        )

    _start(pp=2)
    note("stock", lambda: adopt("stock", 4))
    note("unpacked", lambda: adopt("packed", 4, "dynamic", rotate="core"))
    stages, long = {"pipeline_model_parallel_size": 2}, {"oversize": "slice"}
    note("kept activations", lambda: make_model(critic=False, megatron=stages, planning_args=long))
    note("its own rotation", lambda: adopt("packed", 4))
    whole = random_batch(41, 9, 40)
    falling_back = note("auto", lambda: adopt("packed", "auto"))
    local = mine(falling_back, whole)
    said["auto"] += f", slices {falling_back.plan(gather_lengths(local)).slices}"
    strategy = note("cut", lambda: adopt("packed", 4, rotate="core"))
    plan = strategy.plan(gather_lengths(local))
    placed = distribute(local, plan)
    note("another's plan", lambda: falling_back.train_step(placed, plan, losses()["policy"]))
    note("a failing loss", lambda: strategy.train_step(placed, plan, Failing()))
    right = strategy.train_step(placed, plan, losses()["policy"])
    said["after it"] = f"{right.loss:.12f} {int(plan.slices.counts.max())}"
    return said


@pytest.mark.bad_input
def test_what_cannot_be_cut_and_a_loss_that_raises() -> None:
    first, last = run_ranks(2, f"{HERE}trouble")
    assert first == last
    for name in ("stock", "its own rotation"):
        assert first[name].startswith("pipeline_slices=4, but") and "choose dense, varlen or flash_attn" in first[name]
    assert "passes are dynamic, and packs alone are cut: set use_sequence_packing" in first["unpacked"]
    assert "oversize is slice, but a pack is forward as a whole before its first backward" in first["kept activations"]
    assert first["auto"] == "accepted, slices None" and first["cut"] == "accepted"
    assert "packs of the plan are cut into slices, but the attention" in first["another's plan"]
    assert "ValueError: my mistake" in first["a failing loss"] and "test_slices.py" in first["a failing loss"]
    assert first["after it"] != "nan" and int(first["after it"].split()[1]) > 1
