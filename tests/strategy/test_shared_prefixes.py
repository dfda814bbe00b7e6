"""A step whose samples share prefixes is the same step: loss, gradients and log-probs, in every layout, by every loss.

The right result is that of the same samples planned without prefixes, whose equality `test_layouts` proves.
`./scripts/test.sh -m layouts` runs the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.strategy.test_layouts import CORE, MATRIX
from tests.support.exact import EXACT, OF_ROUTERS, dtype_for, limit_of
from tests.support.layouts import Layout
from tests.support.models import ARCHITECTURE
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_shared_prefixes:"
CAP = 320
VALUES = "values"
ONE_TREE = "one tree in one micro-batch"
"""Other data-parallel ranks compute fillers."""
LAYOUTS = [Layout(tp=2, sp=True), Layout(pp=2, vpp=2), Layout(cp=2), Layout(moe=True, dp=2, ep=2)]
MORE = [*CORE, Layout(tp=2, sp=True, recompute=True)]
SLOW = [pytest.mark.slow, pytest.mark.layouts]


def _tree(g: torch.Generator, sizes: list[Any]) -> list[torch.Tensor]:
    """Sequences of a tree: a number is a leaf of so many tokens, (tokens, branches) an inner node."""
    rows = []
    for size in sizes:
        own, branches = size if isinstance(size, tuple) else (size, None)
        start = torch.randint(0, 61, (own,), generator=g)
        rows += [start] if branches is None else [torch.cat([start, row]) for row in _tree(g, branches)]
    return rows


def kinds() -> dict[str, list[Any]]:
    """Trees of samples, by name."""
    return {
        "groups": [(40, [9, 20, 3, 14]), (25, [30, 5, 6, 11]), (60, [8, 8, 1, 2])],
        "ragged groups, a group of one, prompts of one token": [(33, [4, 9]), (18, [7]), (1, [12, 5]), (30, [2] * 5)],
        "three levels": [(24, [(20, [5, (17, [3, 9])]), (30, [8, 2]), 6]), (50, [4, 4])],
        "a group above the cap": [(90, [60, 55, 40, 70, 30, 65])],
        "branches one token apart": [(30, [(1, [2, (1, [1, (2, [3, 1])])]), 1, 6]), (20, [1, 1, 1, 2])],
        ONE_TREE: [(40, [9, (5, [2, 1]), 14])],
        "duplicates, and samples that begin others": [(30, [0, 5, 5, 1]), (20, [0, 0, (25, [0, 4])])],
    }


def batch(kind: str, g: torch.Generator) -> Any:
    """Samples of the trees in random order, with the fields of a PPO step; masks also count tokens of prompts."""
    from roll_batching.samples import SampleBatch

    rows = _tree(g, kinds()[kind])
    if kind.startswith("duplicates"):
        rows[2] = rows[1].clone()
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g).tolist()]

    def per_token(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return [make(len(row)) for row in rows]

    fields = {
        "input_ids": rows,
        "response_mask": per_token(lambda n: torch.rand(n, generator=g) < 0.7),
        "advantages": torch.randn(len(rows), generator=g),
        "old_log_probs": per_token(lambda n: -4.1 + 0.3 * torch.randn(n, generator=g)),
        "ref_log_probs": per_token(lambda n: -4.1 + 0.3 * torch.randn(n, generator=g)),
        "pair": torch.arange(len(rows)) // 2,
        "chosen": torch.arange(len(rows)) % 2 == 0,
        "returns": per_token(lambda n: torch.randn(n, generator=g)),
        "old_values": per_token(lambda n: torch.randn(n, generator=g)),
    }
    samples = dict.fromkeys(("advantages", "pair", "chosen"), "sample")
    schema = dict.fromkeys(fields, "next_token") | samples | {"input_ids": "token", "response_mask": "token"}
    return SampleBatch.from_lists(fields, schema, ids=[100 + 3 * i for i in range(len(rows))])


class LogitsLoss:
    """A user's loss of whole sequences with their logits."""

    masks = ("response_mask",)

    def __init__(self, gather_cp: bool) -> None:
        self.gather_cp = gather_cp

    def sequence_loss(self, view: Any) -> Any:
        from roll_batching.losses import LossOutput

        value = view.log_probs() * view["advantages"] + 0.01 * view.full_logits()[:, :7].float().tanh().mean(-1)
        return LossOutput(view.mean(-value), {})


def losses() -> dict[str, Any]:
    from roll_batching.losses import DPOLoss, PolicyLoss, SFTLoss, ValueLoss

    return {
        "policy": PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02),
        "sft": SFTLoss(),
        "sequences": PolicyLoss(ratio="sequence", aggregation="sequence_mean"),
        "logits": LogitsLoss(gather_cp=False),
        "gathered logits": LogitsLoss(gather_cp=True),
        "dpo": DPOLoss(),
        VALUES: ValueLoss(clip=0.3),
    }


def make_model(*, critic: bool, **options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    config = worker_config("packed", CAP, **options)
    model_args = config.model_args.model_copy(update={"value_head": critic})
    strategy = MegatronTrainStrategy(config.model_copy(update={"model_args": model_args}))
    strategy.initialize()
    return strategy


class Gaps(NamedTuple):
    """Relative differences with and without sharing, and the limit."""

    case: str
    loss: float
    gradients: float
    outputs: float
    limit: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.outputs)


def compare(payload: tuple[list[dict[str, Any]], list[tuple[str, str]], dict[str, Any]]) -> list[Gaps]:
    """The gaps of all cases in all layouts."""
    layouts, cases, architecture = payload
    gaps = []
    for index, layout in enumerate(layouts):
        meet(index)
        gaps += _compare_layout(Layout(**layout), cases, architecture)
        part()
    return gaps


def _compare_layout(layout: Layout, cases: list[tuple[str, str]], architecture: dict[str, Any]) -> list[Gaps]:
    from roll_batching.planning import plan_step
    from roll_batching.samples import collect, distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import gap, mine, refill
    from tests.support.models import whole_gradients

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if layout.moe else {}
    shape = {**ARCHITECTURE, "num_layers": max(2, layout.pp * layout.vpp), **experts, **architecture}
    is_critic = {name for _, name in cases} == {VALUES}
    output = VALUES if is_critic else "log_probs"
    dtype = dtype_for(distributed_optimizer=layout.distopt)
    strategy = make_model(critic=is_critic, architecture=shape, megatron=layout.megatron(), dtype=dtype)
    refill(strategy)

    def step(local: Any, plan: Any, loss: Any) -> tuple[Any, dict[str, Any]]:
        refill(strategy)
        result = strategy.train_step(distribute(local, plan), plan, loss)
        return result, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, layout.distopt)

    gaps = []
    for kind, name in cases:
        whole = batch(kind, torch.Generator().manual_seed(3))
        local, loss = mine(strategy, whole), losses()[name]
        table = gather_lengths(local)
        shared = find_shared_prefixes(local, table)
        groups = {}
        if name == "dpo":
            place = {sample: i for i, sample in enumerate(whole.ids.tolist())}
            groups = {"group_ids": [place[sample] // 2 for sample in table.ids.tolist()]}
        if kind == ONE_TREE:
            groups = {"group_ids": [0] * len(table)}
        with_prefixes, without = strategy.plan(shared, **groups), strategy.plan(table, **groups)
        assert with_prefixes.report.shared_tokens > 0 or name == "dpo", (kind, name)
        assert with_prefixes.report.computed_tokens <= without.report.computed_tokens, (kind, name)
        if kind == ONE_TREE and layout.dp > 1:
            assert any(mb.is_filler for of_rank in with_prefixes.micro_batches for mb in of_rank)
        found, right = step(local, with_prefixes, loss), step(local, without, loss)
        loss_gap, gradient_gap = gap(found, right)
        outputs = 0.0
        for masks in (("response_mask",), None):
            passes = (
                collect(strategy.forward(distribute(local, plan), plan, (output,), masks=masks), plan, like=local)
                for plan in (with_prefixes, without)
            )
            first, second = (values[output] for values in passes)
            outputs = max([outputs, *((first - second).abs() / second.abs().clamp(min=1)).tolist()])
        limit = EXACT
        if layout.distopt:
            constraints = replace(strategy.constraints(), max_tokens=CAP // 2)
            other = plan_step(table.lengths, constraints, ids=table.ids, location=table.location, **groups)
            limit = limit_of(max(gap(step(local, other, loss), right)))
        gaps.append(Gaps(f"{layout} {kind} {name}", loss_gap, gradient_gap, outputs, limit))
    return gaps


def gaps_of(layouts: list[Layout], cases: list[tuple[str, str]], architecture: dict[str, Any]) -> list[Gaps]:
    """The gaps of all cases in all layouts, on all ranks."""
    gaps = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [asdict(layout) for layout in layouts if layout.ranks == ranks]
        for of_rank in run_ranks(ranks, HERE + "compare", (same, cases, architecture), timeout=900):
            gaps += of_rank
    return gaps


def _run(layouts: list[Layout], cases: list[tuple[str, str]], architecture: dict[str, Any] | None = None) -> None:
    differing = [
        gap
        for gap in gaps_of(layouts, cases, architecture or {})
        if max(gap.loss, gap.outputs) > gap.limit or gap.gradients > (OF_ROUTERS if " moe" in gap.case else gap.limit)
    ]
    assert not differing, "\n".join(map(str, differing))


def test_every_kind_of_tree_and_loss_on_one_rank() -> None:
    _run([Layout()], [(kind, name) for kind in kinds() for name in losses() if name != VALUES])


OF_A_CRITIC = [Layout(), Layout(tp=2, sp=True), Layout(pp=2)]


@pytest.mark.parametrize("layouts", [[Layout(cp=2)], pytest.param(OF_A_CRITIC, marks=SLOW)], ids=["cp2", "more"])
def test_values_of_a_critic(layouts: list[Layout]) -> None:
    _run(layouts, [(kind, VALUES) for kind in kinds()])


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=SLOW)], ids=["core", "more"])
def test_core_layouts(layouts: list[Layout]) -> None:
    _run(layouts, [("groups", "policy"), ("three levels", "logits"), ("a group above the cap", "sft")])


WINDOWS = {"sliding_window": 16, "window_layers": [1, 0]}
MODELS: dict[str, tuple[dict[str, Any], list[Layout]]] = {
    "sliding windows": (WINDOWS, [Layout(), Layout(cp=2), Layout(tp=2, sp=True)]),
    "two RoPE bases and norms behind layers": (
        WINDOWS | {"rotary_local_base": 300.0, "sandwich_norms": True, "scaled_embedding": True},
        [Layout(), Layout(cp=2), Layout(tp=2, sp=True)],
    ),
    "attention sinks": (WINDOWS | {"attention_sinks": True}, [Layout(), Layout(cp=2)]),
    "multi-latent attention": (
        {
            "num_query_groups": 4,
            "multi_latent_attention": {
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_head_dim": 16,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 12,
            },
        },
        [Layout(), Layout(cp=2), Layout(tp=2, sp=True)],
    ),
}
"""Models whose attention is another one, with layouts."""


@pytest.mark.parametrize("model", MODELS)
def test_models_with_other_attention(model: str) -> None:
    _run([Layout(cp=2)], [("groups", "policy"), ("a group above the cap", "policy")], MODELS[model][0])


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("model", MODELS)
def test_models_with_other_attention_in_more_layouts(model: str) -> None:
    architecture, layouts = MODELS[model]
    _run(layouts, [(kind, "policy") for kind in kinds()], architecture)


@pytest.mark.slow
@pytest.mark.layouts
def test_the_whole_matrix() -> None:
    layouts = [replace(layout, dtype="fp32") for layout in MATRIX if layout not in CORE]
    _run(layouts, [("groups", "policy"), ("three levels", "dpo"), ("a group above the cap", "gathered logits")])
