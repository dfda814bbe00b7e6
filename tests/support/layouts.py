"""Parallel layouts to prove equal: every pair of settings that can stand together stands together in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHOICES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "cp": (1, 2, 4),
    "dp": (1, 2),
    "distopt": (False, True),
    "recompute": (False, True),
    "tied": (False, True),
    "per_token": (True, False),
    "dtype": ("fp32", "bf16"),
}

MOST_RANKS = 8
"""Processes of one layout; PP 4 with CP 4 needs 16 and is tried once, by name."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One parallel layout and the settings beside it."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    distopt: bool = False
    recompute: bool = False
    recompute_experts: bool = False
    """Layers with experts alone."""
    tied: bool = False
    per_token: bool = True
    dtype: str = "fp32"
    moe: bool = False
    router: bool = False
    """With the routers' z-loss, which with `per_token` depends on nothing but the tokens."""
    layers: int = 0
    """Decoder layers of the model; 0: two per chunk."""
    first: int | None = None
    """Of them in the first stage."""
    last: int | None = None
    embedding: bool = False
    """Counted as a layer."""
    loss: bool = False
    """Counted as a layer."""
    groups: int = 0
    """Key-value heads of a model with norms of queries and keys; 0: two, without norms."""
    slices: int = 1
    """Of a pack of mean cost."""
    overlap: bool = False
    """Gradients are reduced while the last backward pass runs, and parameters gathered while the forward runs."""
    divide: str | None = None
    """What context-parallel ranks divide in recurrent layers; None: the default."""
    pattern: str | None = None
    """`pipeline_model_parallel_layout`, with `vpp` chunks per stage."""

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def is_possible(self) -> bool:
        """What Megatron itself allows."""
        return (not self.sp or self.tp > 1) and (self.vpp == 1 or self.pp > 1)

    def __str__(self) -> str:
        sizes = " ".join(
            f"{k}{getattr(self, k)}" for k in ("tp", "pp", "vpp", "cp", "dp", "ep", "slices") if getattr(self, k) > 1
        )
        names = (
            "sp",
            "distopt",
            "recompute",
            "recompute_experts",
            "tied",
            "moe",
            "router",
            "first",
            "last",
            "embedding",
            "loss",
            "groups",
            "divide",
            "pattern",
            "overlap",
        )
        flags = [
            k if getattr(self, k) is True else f"{k} {getattr(self, k)}"
            for k in names
            if getattr(self, k) not in (None, False)
        ]
        scaling = [] if self.per_token else ["micro-batch-mean"]
        return " ".join([sizes or "one rank", *flags, *scaling, self.dtype])

    def megatron(self) -> dict[str, Any]:
        """`strategy_config` of this layout."""
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "use_distributed_optimizer": self.distopt,
            "recompute_granularity": "full" if self.recompute else "selective" if self.recompute_experts else None,
            "recompute_modules": ["moe"] if self.recompute_experts else None,
            "calculate_per_token_loss": self.per_token,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "account_for_embedding_in_pipeline_split": self.embedding,
            "account_for_loss_in_pipeline_split": self.loss,
            "pipeline_model_parallel_layout": self.pattern,
            "pipeline_slices": self.slices,
            "recurrent_context_parallel": self.divide or "auto",
            "overlap_grad_reduce": self.overlap,
            "overlap_param_gather": self.overlap and self.distopt,
        }


def _pairs(layout: Layout) -> set[tuple[str, Any, str, Any]]:
    return {(a, getattr(layout, a), b, getattr(layout, b)) for a, b in itertools.combinations(CHOICES, 2)}


def _all() -> Iterator[Layout]:
    for values in itertools.product(*CHOICES.values()):
        layout = Layout(**dict(zip(CHOICES, values, strict=True)))
        if layout.is_possible and layout.ranks <= MOST_RANKS:
            yield layout


def wanted_pairs() -> set[tuple[str, Any, str, Any]]:
    """Pairs of settings that stand together in at least one possible layout."""
    return set().union(*(_pairs(layout) for layout in _all()))


def pairwise() -> list[Layout]:
    """A deterministic greedy cover of all pairs by few, small layouts, and the plainest ones."""
    # Among equals the first wins: few ranks, and fp32, whose comparison is the sharper one.
    candidates = sorted(_all(), key=lambda layout: (layout.ranks, layout.dtype != "fp32", str(layout)))
    missing = wanted_pairs()
    chosen: list[Layout] = []
    seen = [(layout, _pairs(layout)) for layout in candidates]
    while missing:
        # Small layouts first: a rank more must buy new pairs.
        best, covered = max(seen, key=lambda item: len(item[1] & missing) / (2 + item[0].ranks))
        chosen.append(best)
        missing -= covered
    singles = [
        Layout(tp=2),
        Layout(tp=2, sp=True),
        Layout(pp=2),
        Layout(pp=4),
        Layout(pp=2, vpp=2),
        Layout(pp=4, vpp=2),
        Layout(cp=2),
        Layout(cp=4),
        Layout(dp=2, distopt=True),
        Layout(tp=2, sp=True, pp=2),
        Layout(pp=2, vpp=2, cp=2),
        Layout(tp=2, cp=2),
    ]
    return chosen + [layout for layout in singles if layout not in chosen]


EXPERTS = [
    Layout(moe=True, router=True, dp=2, ep=2),
    Layout(moe=True, router=True, tp=2, sp=True),
]
"""For every run of the tests."""
MORE_EXPERTS = [
    Layout(moe=True, router=True, pp=2, vpp=2),
    Layout(moe=True, router=True),
    Layout(moe=True, dp=2, distopt=True),
    Layout(moe=True, router=True, cp=2, ep=2),
    Layout(moe=True, per_token=False, pp=2, dp=2, ep=2),
    Layout(moe=True, router=True, tp=2, sp=True, pp=2),
    Layout(moe=True, router=True, tp=2, sp=True, pp=2, dp=2, ep=2),
    Layout(moe=True, router=True, tp=2, sp=True, cp=2, ep=2, recompute=True),
    Layout(moe=True, per_token=False, tp=2, sp=True, dp=2, ep=2, distopt=True),
    Layout(moe=True, router=True, pp=2, vpp=2, cp=2, ep=2),
    Layout(moe=True, router=True, dp=4, ep=2, distopt=True),
]
"""What users run: tensor with sequence parallelism (tensor-parallel experts among them), stages, experts over ranks."""

UNEVEN = [
    Layout(pp=2, layers=4, first=1),
    Layout(pp=2, vpp=2, layers=5, pattern="Et|tt|t|tL"),
]
"""For every run of the tests."""
MORE_UNEVEN = [
    Layout(tp=2, sp=True, pp=2, layers=4, last=1, tied=True),
    Layout(pp=4, layers=6, embedding=True, loss=True),
    Layout(pp=2, dp=2, layers=4, first=3, distopt=True, recompute=True),
    Layout(pp=2, dp=2, layers=5, pattern="Et|ttttL", tied=True, distopt=True, per_token=False),
    Layout(pp=4, layers=5, first=1, last=2),
    Layout(pp=4, layers=2, embedding=True, loss=True),  # a stage with the embedding alone, one with the head alone
    Layout(pp=4, layers=2, embedding=True, loss=True, tied=True, recompute=True),
    Layout(pp=2, vpp=2, layers=4, pattern="E|tt|tt|L"),
    Layout(pp=2, vpp=2, layers=4, pattern="Ett|t|t|L", recompute=True),
    Layout(pp=2, vpp=2, layers=6, first=2, cp=2),
    Layout(pp=2, vpp=2, layers=6, embedding=True, loss=True, dp=2),
    Layout(pp=4, vpp=2, layers=8, pattern="Et|t|tt|t|t|t|t|L"),
    Layout(tp=2, sp=True, pp=4, layers=6, embedding=True, loss=True),
    Layout(tp=2, sp=True, pp=2, vpp=2, layers=5, pattern="Et|tt|t|tL", recompute=True),
    Layout(moe=True, router=True, pp=2, dp=2, ep=2, layers=4, first=1),
    Layout(pp=2, layers=4, last=1, dtype="bf16"),
]
"""With data, context, tensor and expert parallelism, and stages and chunks without decoder layers."""

REPLICATED_KV_HEADS = [
    Layout(tp=2, sp=True, groups=1),
    Layout(tp=4, groups=2),
]
"""Key-value heads that tensor-parallel ranks share, for every run of the tests."""
MORE_REPLICATED_KV_HEADS = [
    Layout(tp=4, sp=True, groups=1),
    Layout(tp=4, sp=True, groups=2, tied=True, recompute=True),
    Layout(tp=2, sp=True, pp=2, vpp=2, groups=1),
    Layout(tp=2, cp=2, groups=1),
    Layout(tp=4, sp=True, cp=2, groups=2),
    Layout(tp=4, sp=True, pp=2, groups=2, layers=4, pattern="Et|tttL"),
    Layout(tp=2, sp=True, dp=2, groups=1, distopt=True),
    Layout(tp=2, sp=True, dp=2, ep=2, groups=1, moe=True, router=True),
    Layout(tp=4, sp=True, groups=2, dtype="bf16"),
]
