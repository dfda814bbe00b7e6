"""Steps whose packs have their own context-parallel sizes equal steps with one size: loss, gradients, log-probs.

The right result is that of the same samples on the same ranks without context parallelism, whose equality
`test_layouts` proves. Plans are random legal ones, beside those of the planner. `./scripts/test.sh -m layouts` runs the
whole matrix.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.strategy.test_shared_prefixes import LogitsLoss
from tests.strategy.test_trees_with_states import MODELS, SHAPE
from tests.support.exact import DTYPE, EXACT, OF_ROUTERS, dtype_for, limit_of
from tests.support.layouts import Layout
from tests.support.models import ARCHITECTURE, random_batch
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_cp_per_pack:"
CAP, LONGEST = 64, 120
SLOW = pytest.mark.slow

CORE = [Layout(dp=4, distopt=True, per_token=False), Layout(dp=2, pp=2, vpp=2)]
MORE = [
    Layout(dp=4),
    Layout(dp=2, pp=2),
    Layout(dp=2, tp=2, sp=True),
    Layout(dp=4, ep=2, moe=True),
]
MATRIX = [
    Layout(dp=8),
    Layout(dp=8, recompute=True, distopt=True),
    Layout(dp=4, pp=2),
    Layout(dp=4, pp=2, vpp=2, per_token=False),
    Layout(dp=4, tp=2, sp=True),
    Layout(dp=4, tp=2, distopt=True, tied=True),
    Layout(dp=2, pp=4),
    Layout(dp=2, tp=2, sp=True, pp=2, recompute=True),
    Layout(dp=8, ep=4, moe=True),
    Layout(dp=4, tp=2, sp=True, ep=2, moe=True, router=True),
    Layout(dp=4, pp=2, ep=2, moe=True, distopt=True),
    Layout(dp=4, pp=2, vpp=2, ep=2, moe=True),
]


def losses() -> dict[str, Any]:
    from roll_batching.losses import PolicyLoss, SFTLoss

    return {
        "policy": PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02),
        "sft": SFTLoss(),
        "sequences": PolicyLoss(ratio="sequence", aggregation="sequence_mean"),
        "logits": LogitsLoss(gather_cp=False),
        "gathered logits": LogitsLoss(gather_cp=True),
    }


def compare(payload: tuple[list[tuple[int, dict[str, Any]]], list[str], dict[str, Any]]) -> list[list[str]]:
    """For each layout, with its seed of a batch and a plan: the cases that differ, with how much."""
    layouts, names, architecture = payload
    found = []
    for index, (seed, layout) in enumerate(layouts):
        meet(index)
        found.append(_compare_layout(Layout(**layout), names, seed, architecture))
        part()
    return found


def _compare_layout(layout: Layout, names: list[str], seed: int, architecture: dict[str, Any]) -> list[str]:
    from roll_batching.planning import plan_step
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.losses.steps import gap, make_strategy, mine, refill
    from tests.support.blocks import random_block_plan
    from tests.support.models import whole_gradients

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if layout.moe else {}
    shape = {**ARCHITECTURE, "num_layers": max(2, layout.pp * layout.vpp), **experts, **architecture}
    training = {
        "overlap_grad_reduce": layout.distopt,
        "overlap_param_gather": layout.distopt,
    }
    megatron = layout.megatron() | training
    dtype = dtype_for(distributed_optimizer=layout.distopt)
    strategy = make_strategy(cap=4 * LONGEST, architecture=shape, megatron=megatron, dtype=dtype)

    def step(local: Any, plan: Any, loss: Any) -> tuple[Any, dict[str, Any]]:
        refill(strategy)
        result = strategy.train_step(distribute(local, plan), plan, loss)
        return result, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, layout.distopt)

    differing = []
    whole = random_batch(70 + seed, 17, LONGEST)
    local = mine(strategy, whole)
    table = gather_lengths(local)
    fixed = strategy.plan(table)
    sizes = {name: getattr(strategy.layout, name) for name in ("tp_size", "pp_size", "vpp_size", "ep_size")}
    plan = random_block_plan(
        table.lengths.tolist(),
        layout.dp,
        CAP,
        seed,
        in_columns=layout.moe or layout.vpp > 1,
        ids=table.ids,
        location=table.location,
        sequence_parallel=strategy.layout.sequence_parallel,
        **sizes,
    )
    assert len({mb.cp_size for rank in plan.micro_batches for mb in rank}) > 1
    for name in [*names, "planned"]:
        if name == "planned":
            plan, name = _with_sizes(strategy, layout.dp).plan(table), names[0]
            assert plan.report.predicted_seconds is not None
        loss = losses()[name]
        found, right = step(local, plan, loss), step(local, fixed, loss)
        loss_gap, *gaps = gap(found, right)
        if name == names[0]:
            gaps += _log_prob_gaps(strategy, local, plan, fixed)
            distributed, metric = distribute(local, plan), found[0].metrics
            assert metric.keys() == right[0].metrics.keys()
            gaps += [abs(metric[key] - right[0].metrics[key]) / max(abs(metric[key]), 1.0) for key in metric]
            evaluated = strategy.evaluate(distributed, plan, loss)["loss"]
            gaps.append(abs(evaluated - strategy.evaluate(distribute(local, fixed), fixed, loss)["loss"]))
        limit = EXACT
        if layout.distopt:
            constraints = replace(strategy.constraints(), max_tokens=2 * LONGEST)
            other = plan_step(table.lengths, constraints, ids=table.ids, location=table.location)
            limit = limit_of(max(gap(step(local, other, loss), right)))
        if max(gaps) > (max(limit, OF_ROUTERS) if layout.moe else limit) or loss_gap > limit:
            worst = f"loss {loss_gap:.1e}, gradients {gaps[0]:.1e}, others {max(gaps[1:], default=0):.1e}"
            differing.append(f"{layout} seed {seed} {name}: {worst}")
    assert collect(distribute(local, plan), plan, like=local).describe() == local.describe()
    return differing


def _with_sizes(strategy: Any, largest: int) -> Any:
    """The planner of a strategy whose packs have sizes up to `largest`."""
    state = strategy.state
    try:
        spec = replace(state.batching.train, max_tokens=CAP)
        strategy.state = replace(
            state,
            batching=replace(state.batching, train=spec),
            settings=replace(state.settings, max_cp_size=largest),
        )
        return strategy.planner
    finally:
        strategy.state = state


def _log_prob_gaps(strategy: Any, local: Any, plan: Any, fixed: Any) -> list[float]:
    from roll_batching.samples import collect, distribute

    first, second = (
        collect(strategy.compute_log_probs(distribute(local, one), one), one, like=local)["log_probs"]
        for one in (plan, fixed)
    )
    return ((first - second).abs() / second.abs().clamp(min=1)).tolist()


def _run(layouts: list[Layout], names: list[str], architecture: dict[str, Any] | None = None) -> None:
    """Compare all layouts, each with a different batch and plan."""
    differing = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [(seed, asdict(layout)) for seed, layout in enumerate(layouts) if layout.ranks == ranks]
        for found in run_ranks(ranks, HERE + "compare", (same, names, architecture or {}), timeout=900):
            differing += [line for lines in found for line in lines]
    assert not differing, "\n".join(differing)


def compare_with_prefixes(payload: tuple[int, dict[str, Any]]) -> list[str]:
    """Cases whose samples share prefixes in packs of several sizes that differ from the same without either."""
    from roll_batching.samples import collect, distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import gap, make_strategy, mine, step
    from tests.strategy.test_shared_prefixes import batch, kinds
    from tests.support.blocks import random_block_plan

    seeds, architecture = payload
    strategy = make_strategy(cap=400, dtype=DTYPE, architecture=ARCHITECTURE | architecture)
    differing = []
    for seed in range(seeds):
        for kind in kinds():
            whole = batch(kind, torch.Generator().manual_seed(seed))
            local = mine(strategy, whole)
            table = find_shared_prefixes(local, gather_lengths(local))
            plan = random_block_plan(
                table.lengths.tolist(),
                strategy.layout.dp_size,
                100,
                seed,
                ids=table.ids,
                location=table.location,
                prefixes=table.prefixes,
            )
            fixed = strategy.plan(gather_lengths(local))
            for name in ("policy", "logits"):
                loss = losses()[name]
                found, right = (step(strategy, whole, loss, one) for one in (plan, fixed))
                gaps = gap(found, right)
                if max(gaps) > EXACT:
                    differing.append(f"{kind}, seed {seed}, {name}: {gaps}")
            log_probs = _log_prob_gaps(strategy, local, plan, fixed)
            if max(log_probs) > EXACT:
                differing.append(f"{kind}, seed {seed}: log-probs {max(log_probs)}")
            shared = collect(distribute(local, plan), plan, like=local)
            assert torch.equal(shared["input_ids"], local["input_ids"])
    return differing


@pytest.mark.layouts
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packs_that_share_prefixes(seeds: int) -> None:
    _share(seeds, {})


def _share(seeds: int, architecture: dict[str, Any]) -> None:
    for found in run_ranks(4, HERE + "compare_with_prefixes", (seeds, architecture), timeout=600):
        assert not found, "\n".join(found)


@pytest.mark.layouts
@pytest.mark.parametrize("model", ["gated delta nets", *(pytest.param(name, marks=SLOW) for name in [*MODELS][1:])])
def test_recurrent_layers_have_as_many_ranks_as_a_pack(model: str) -> None:
    _run([Layout(dp=4)], ["policy"], MODELS[model] | SHAPE)
    _share(1, MODELS[model] | SHAPE)


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("model", MODELS)
def test_recurrent_layers_in_more_layouts(model: str) -> None:
    layouts = [Layout(dp=8, recompute=True), Layout(dp=4, pp=2, vpp=2, per_token=False)]
    if "more" not in model:  # its one group does not divide
        layouts += [Layout(dp=4, tp=2, sp=True)]
    _run(layouts, list(losses()), MODELS[model] | SHAPE)


def rubbish(_: None) -> list[str]:
    """Messages of errors that one rank's bad input raises."""
    from dataclasses import replace

    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import Plan, PlanConstraints
    from roll_batching.samples import SampleBatch, distribute, gather_lengths
    from tests.losses.steps import make_strategy, mine
    from tests.support.blocks import random_block_plan

    strategy = make_strategy(cap=4 * LONGEST)
    local = mine(strategy, random_batch(3, 12, LONGEST))
    table = gather_lengths(local)
    plan = random_block_plan(table.lengths.tolist(), 4, CAP, 1, ids=table.ids, location=table.location)
    placed = distribute(local, plan)
    rank = strategy.layout.dp_rank
    shared = [mb for mb in plan.micro_batches[rank] if mb.cp_size > 1]
    other = placed
    if rank == 1:  # a rank of a block has another token in a sample of the block
        row = int(placed.rows_of(plan.ids[shared[0].samples[:1]])[0])
        ids = placed["input_ids"].clone()
        ids[placed.offsets[row]] = (ids[placed.offsets[row]] + 1) % 61
        other = SampleBatch(placed.ids, placed.lengths, placed.fields | {"input_ids": ids}, placed.schema)
    table_of_blocks = plan.to_dict() | {"blocks": None}

    def of_another_rank_count() -> Any:
        whole = PlanConstraints(dp_size=2, max_tokens=400, max_cp_size=2)
        two = Plan.from_bins([[[0]], [[1]]], [5, 6], whole)
        return strategy.train_step(placed, two, SFTLoss())

    def with_settings(**changes: Any) -> Any:
        state = strategy.state
        try:
            strategy.state = replace(state, settings=replace(state.settings, **changes))
            return strategy.train_step(placed, plan, SFTLoss())
        finally:
            strategy.state = state

    messages = []
    for call in (
        lambda: strategy.train_step(other, plan, SFTLoss()),
        lambda: strategy.train_step(placed if rank != 2 else placed.select(torch.arange(1)), plan, SFTLoss()),
        of_another_rank_count,
        lambda: with_settings(max_cp_size=3),
        lambda: with_settings(max_cp_size=8),
        lambda: Plan.from_dict(table_of_blocks),
        lambda: Plan.from_dict(plan.to_dict() | {"blocks": {**plan.to_dict()["blocks"], "cp_sizes": [1.5]}}),
        lambda: Plan.from_dict(plan.to_dict() | {"blocks": {"first_ranks": []}}),
    ):
        try:
            call()
        except RollBatchingError as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    strategy.train_step(placed, plan, SFTLoss())  # no rank is left in a collective
    return messages


def test_bad_input_of_one_rank_is_an_error_on_all() -> None:
    wanted = [
        "ranks that compute a pack together have different samples of it",
        "samples",
        "dp_size=2",
        "max_cp_size=3 must be a power of two that divides the 4",
        "max_cp_size=8 must be a power of two that divides the 4",
        "micro-batches",
        "blocks.cp_sizes",
        "the blocks of this plan must have",
    ]
    for messages in run_ranks(4, HERE + "rubbish", None, timeout=300):
        for message, words in zip(messages, wanted, strict=True):
            assert words in message, (words, message)


def test_core_layouts() -> None:
    _run(CORE, ["policy", "logits"])


@pytest.mark.slow
@pytest.mark.layouts
def test_more_layouts() -> None:
    _run(MORE, ["policy", "logits"])


@pytest.mark.slow
@pytest.mark.layouts
def test_every_loss() -> None:
    _run([Layout(dp=4)], list(losses()))


@pytest.mark.slow
@pytest.mark.layouts
def test_the_whole_matrix() -> None:
    _run(MATRIX, ["policy", "sequences", "gathered logits"])
