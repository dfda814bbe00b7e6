"""Checkpoints: written in one layout, read in another; refused with words; never half taken for whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_checkpoint:"
ARCHITECTURE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 128,
}
# ---- on ranks


def strategy_of(case: dict[str, Any], *, train: bool = True) -> Any:
    """An initialised strategy with weights that depend on their global name only."""
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import fill, worker_config

    config = worker_config(
        "packed",
        64,
        architecture={**ARCHITECTURE, **case.get("architecture", {})},
        megatron=case.get("layout"),
        training={"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 20, **case.get("training", {})},
        dtype=case.get("dtype", "fp32"),
    )
    strategy = (MegatronTrainStrategy if train else MegatronInferStrategy)(config, seed=case.get("seed", 1))
    strategy.initialize()
    if case.get("fill"):
        fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
        if train:
            strategy.optimizer.reload_model_params()
    return strategy


def steps(strategy: Any, first: int, last: int) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, lr) of steps first..last-1, each on a batch of its own."""
    from roll_batching.data import distribute, gather_lengths
    from roll_batching.losses import SFTLoss
    from tests.support.models import random_batch

    done = []
    for step in range(first, last):
        batch = random_batch(step, 6, 24)
        home = batch.select(list(range(strategy.layout.dp_rank, 6, strategy.layout.dp_size)))
        plan = strategy.plan(gather_lengths(home))
        result = strategy.train_step(distribute(home, plan), plan, SFTLoss())
        done.append((result.loss, result.grad_norm, result.lr))
    return done


def bits(strategy: Any) -> dict[str, Any]:
    """Copies of all weights and optimizer tensors of this rank."""
    found = {f"{i}.{n}": p.detach().clone() for i, c in enumerate(strategy.chunks) for n, p in c.named_parameters()}
    for k, part in enumerate(getattr(strategy.optimizer, "chained_optimizers", [strategy.optimizer])):
        state = part.optimizer.state_dict()["state"]
        found |= {f"{k}.{i}.{n}": t.detach().clone() for i, one in state.items() for n, t in one.items()}
        for g, group in enumerate(getattr(part, "fp32_from_float16_groups", [])):
            found |= {f"{k}.main.{g}.{i}": p.detach().clone() for i, p in enumerate(group)}
    return found


def save_and_go_on(case: dict[str, Any]) -> Any:
    strategy = strategy_of({"fill": True, **case})
    steps(strategy, 0, 3)
    strategy.skipped_steps = 2
    strategy.save(case["path"])
    return bits(strategy), steps(strategy, 3, 5)


def load_and_go_on(case: dict[str, Any]) -> Any:
    strategy = strategy_of({"seed": 99, **case})
    strategy.load(case["path"])
    assert strategy.skipped_steps == 2
    return bits(strategy), steps(strategy, 3, 5)


# ---- tests


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"architecture": {"tie_word_embeddings": True, "qk_layernorm": True, "add_qkv_bias": True}},
    "experts": {"architecture": {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 12}}},
    "bf16": {"dtype": "bf16"},
}
CHAINS: dict[str, list[Layout]] = {
    "dense": [
        Layout(tp=2),
        Layout(pp=2),
        Layout(pp=2, vpp=2),
        Layout(tp=2, sp=True),
        Layout(cp=2),
        Layout(dp=2),
        Layout(tp=2, pp=2, vpp=2),
    ],
    "tied": [Layout(tp=2), Layout(pp=2, vpp=2), Layout(tp=2, pp=2)],
    "experts": [Layout(tp=2, sp=True), Layout(dp=2), Layout(pp=2)],
    "bf16": [Layout(tp=2), Layout(pp=2, vpp=2)],
}
FIRST_LOSS, LATER_LOSS = 1e-6, 1e-4


def kinds() -> list[str]:
    """Those that the installed Megatron can train: without TransformerEngine, 0.16 has no experts."""
    from megatron.core.transformer.moe import moe_utils

    return [kind for kind in KINDS if kind != "experts" or hasattr(moe_utils, "te_general_gemm")]


def _case(kind: str, **more: Any) -> dict[str, Any]:
    return {**KINDS[kind], **more}


def start(folder: str) -> Any:
    """On one rank: every kind trained, saved and trained on."""
    return {kind: save_and_go_on(_case(kind, path=f"{folder}/{kind}-0")) for kind in kinds()}


def hop(payload: tuple[str, list[tuple[str, int, dict[str, Any]]]]) -> Any:
    """On the ranks of some layouts: each loads what the one before it saved, saves it again, and trains on."""
    from megatron.core import parallel_state

    folder, hops = payload
    found = {}
    for kind, number, fields in hops:
        layout = Layout(**fields)
        strategy = strategy_of(_case(kind, layout=layout.megatron(), seed=99))
        strategy.load(f"{folder}/{kind}-{number}")
        strategy.save(f"{folder}/{kind}-{number + 1}")
        found[kind, str(layout)] = steps(strategy, 3, 5)
        parallel_state.destroy_model_parallel()
    return found


def come_back(folder: str) -> Any:
    """On one rank: what the last layout of every chain saved."""
    return {kind: load_and_go_on(_case(kind, path=f"{folder}/{kind}-{len(CHAINS[kind])}")) for kind in kinds()}


def test_saved_in_one_layout_and_loaded_in_another(tmp_path, report):
    """The chain ends where it began, so the tensors are equal to the bit; between, the next steps are the same."""
    (before,) = run_ranks(1, HERE + "start", str(tmp_path))
    went_on: dict[Any, Any] = {}
    for ranks in (2, 4):
        hops = [
            (kind, number, asdict(layout))
            for kind in before
            for number, layout in enumerate(CHAINS[kind])
            if layout.ranks == ranks
        ]
        went_on |= run_ranks(ranks, HERE + "hop", (str(tmp_path), hops))[0]
    (after,) = run_ranks(1, HERE + "come_back", str(tmp_path))
    for kind, (tensors, expected) in before.items():
        back, again = after[kind]
        assert tensors.keys() == back.keys()
        differing = [name for name in tensors if not torch.equal(tensors[name], back[name])]
        assert not differing, f"{kind}: {differing}"
        assert again == expected, f"{kind}: one rank goes on to the bit"
        for layout in CHAINS[kind]:
            found = went_on[kind, str(layout)]
            gaps = [abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(found, expected, strict=True)]
            report(f"{kind:8} {layout!s:24} next loss {gaps[0]:.1e}, the one after {gaps[1]:.1e}")
            assert [x[2] for x in found] == [x[2] for x in expected], "the schedule goes on"
            if kind != "bf16":
                assert gaps[0] < FIRST_LOSS and gaps[1] < LATER_LOSS, f"{kind} {layout}: {gaps}"
            else:
                assert max(gaps) < 1e-2
