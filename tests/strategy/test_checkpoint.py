"""Checkpoints: written in one layout, read in another; refused with words; never half taken for whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import without_manifest
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
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
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
        for kind in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for g, group in enumerate(getattr(part, kind, [])):
                found |= {f"{k}.main.{g}.{i}": p.detach().clone() for i, p in enumerate(group)}
    return found


def save_and_go_on(case: dict[str, Any]) -> Any:
    strategy = strategy_of({"fill": True, **case})
    steps(strategy, 0, 3)
    strategy.state = replace(strategy.state, training=replace(strategy.state.training, skipped_steps=2))
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
    "shared keys": {"architecture": {"num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True}},
}
CHAINS: dict[str, list[Layout]] = {
    "dense": [
        Layout(tp=2),
        Layout(pp=2),
        Layout(pp=2, vpp=2),
        Layout(tp=2, sp=True),
        Layout(cp=2),
        Layout(dp=2),
        Layout(pp=2, layers=4, first=1),
        Layout(tp=2, pp=2, vpp=2),
        Layout(pp=4, layers=4, pattern="E|tt|tt|L"),
        Layout(pp=2, dp=2, distopt=True, layers=4, first=3),
    ],
    "tied": [Layout(tp=2), Layout(pp=2, vpp=2), Layout(pp=2, vpp=2, layers=4, pattern="Ett|t|t|L")],
    "experts": [Layout(tp=2, sp=True), Layout(dp=2), Layout(pp=2)],
    "bf16": [Layout(tp=2), Layout(pp=2, vpp=2)],
    "shared keys": [Layout(pp=2), Layout(tp=4)],
}
FIRST_LOSS, LATER_LOSS = 1e-6, 1e-4


def _case(kind: str, **more: Any) -> dict[str, Any]:
    return {**KINDS[kind], **more}


def start(folder: str) -> Any:
    """On one rank: every kind trained, saved and trained on."""
    return {kind: save_and_go_on(_case(kind, path=f"{folder}/{kind}-0")) for kind in KINDS}


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
    return {kind: load_and_go_on(_case(kind, path=f"{folder}/{kind}-{len(CHAINS[kind])}")) for kind in KINDS}


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
            name = str(layout).rsplit(" ", 1)[0]
            report(f"{kind:8} {name:14} next loss {gaps[0]:.1e}, the one after {gaps[1]:.1e}")
            assert [x[2] for x in found] == [x[2] for x in expected], "the schedule goes on"
            if kind != "bf16":
                assert gaps[0] < FIRST_LOSS and gaps[1] < LATER_LOSS, f"{kind} {layout}: {gaps}"
            else:
                assert max(gaps) < 1e-2


# ---- other ways in


def other_uses(folder: str) -> None:
    """On one rank: a frozen model, weights alone, a model that the caller built, a checkpoint before the first step."""
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import random_batch

    for kind in ("dense", "bf16"):
        path = f"{folder}/{kind}"
        first = strategy_of(_case(kind, fill=True))
        steps(first, 0, 3)
        first.save(path)

        batch = random_batch(7, 6, 24)
        frozen = strategy_of(_case(kind, seed=99), train=False)
        plan = frozen.plan(gather_lengths(batch), forward=True)
        frozen.load(path)
        assert torch.equal(
            frozen.compute_log_probs(batch, plan)["log_probs"], first.compute_log_probs(batch, plan)["log_probs"]
        )

        fresh = strategy_of(_case(kind, seed=99))
        fresh.load(path, optimizer=False)
        assert fresh.optimizer.param_groups[0]["lr"] == 1e-2
        for part in fresh.optimizer.chained_optimizers:
            for low, high in zip(
                getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
            ):
                assert not part.optimizer.state
                assert all(torch.equal(a.float(), b) for a, b in zip(low, high, strict=True)), "main weights follow"
        with torch.no_grad():
            found = {n: p for n, p in fresh.chunks[0].named_parameters()}
            assert all(torch.equal(p, found[n]) for n, p in first.chunks[0].named_parameters())

        other = strategy_of(_case(kind, seed=99))
        adopted = MegatronTrainStrategy.from_parts(
            other.chunks,
            other.optimizer,
            other.batching,
            scheduler=other.scheduler,
            scheduler_unit="steps",
            defer_head=True,
            vocab_size=61,
        )
        adopted.load(path)
        adopted.save(path + "-adopted")
        again = strategy_of(_case(kind, seed=98))
        again.load(path + "-adopted")
        assert steps(again, 3, 5) == steps(adopted, 3, 5) == steps(first, 3, 5)

        untouched = strategy_of(_case(kind, fill=True))
        untouched.save(path + "-before")
        late = strategy_of(_case(kind, seed=99))
        late.load(path + "-before")
        assert steps(late, 0, 2) == steps(untouched, 0, 2)


def test_frozen_models_weights_alone_and_models_of_the_caller(tmp_path):
    run_ranks(1, HERE + "other_uses", str(tmp_path))


# ---- what goes wrong


def die_in_the_second_save(path: str) -> None:
    from roll_batching.strategy.checkpoint import write_state
    from roll_batching.strategy.checkpoint_folder import atomic_folder

    strategy = strategy_of({"fill": True, "layout": Layout(tp=2).megatron()})
    steps(strategy, 0, 2)
    strategy.save(path)
    steps(strategy, 2, 3)
    with atomic_folder(path, strategy.layout.host_group) as folder:
        write_state(strategy.state, folder).finish()
        if strategy.layout.tp_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def same_as_before_it(path: str) -> bool:
    strategy = strategy_of({"fill": True, "layout": Layout(tp=2).megatron()})
    steps(strategy, 0, 2)
    before = bits(strategy)
    steps(strategy, 2, 3)
    strategy.load(path)
    after = bits(strategy)
    strategy.save(path)  # over what lies there, and over what the killed process left
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_process_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "state"
    outcomes = run_ranks(2, HERE + "die_in_the_second_save", str(path), check=False, timeout=60, grace=2)
    assert outcomes[1].returncode == -signal.SIGKILL and outcomes[0].returncode != 0, outcomes[1].output
    assert (tmp_path / "state.partial" / "strategy.json").is_file(), "it had come far"
    assert run_ranks(2, HERE + "same_as_before_it", str(path)) == [True, True]
    assert [place.name for place in tmp_path.iterdir()] == ["state"]


def refusals(folder: str) -> dict[str, str]:
    """What each wrong call ends with on this rank; none changes anything."""
    import sys

    import torch.distributed as dist

    from roll_batching.errors import RankError

    home = Path(folder)
    strategy = strategy_of({"fill": True, "layout": Layout(tp=2).megatron()})
    steps(strategy, 0, 1)
    before = bits(strategy)
    strategy.save(home / "whole")
    frozen = strategy_of({"layout": Layout(tp=2).megatron()}, train=False)
    frozen.save(home / "weights")
    wide = strategy_of({"layout": Layout(tp=2).megatron(), "architecture": {"ffn_hidden_size": 32, "num_layers": 2}})
    turned = strategy_of({"layout": Layout(tp=2).megatron(), "architecture": {"rotary_base": 500000.0}})
    if dist.get_rank() == 0:
        (home / "empty").mkdir()
        (home / "empty" / "note").write_text("not a checkpoint")
        shutil.copytree(home / "whole", home / "nameless")
        record = json.loads((without_manifest(home / "nameless") / "strategy.json").read_text())
        (home / "nameless" / "strategy.json").write_text(json.dumps({**record, "architecture": None}))
    dist.barrier()
    said: dict[str, str] = {}

    def refused(name: str, act: Any) -> None:
        try:
            act()
        except RankError as error:
            said[name] = str(error)

    refused("no checkpoint at the path", lambda: strategy.load(home / "nowhere"))
    refused("another folder", lambda: strategy.load(home / "empty"))
    refused("rank 1 reads another one", lambda: strategy.load(home / ("whole", "nameless")[dist.get_rank()]))
    refused("weights only, optimizer wanted", lambda: strategy.load(home / "weights"))
    refused("another shape", lambda: wide.load(home / "nameless"))
    refused("another model of the same shape", lambda: turned.load(home / "whole"))
    refused("a folder in the way", lambda: strategy.save(home / "empty"))
    psutil = sys.modules.pop("psutil", None)
    sys.modules["psutil"] = None  # type: ignore[assignment]
    refused("psutil is missing", lambda: strategy.save(home / "more"))
    sys.modules["psutil"] = psutil  # type: ignore[assignment]
    unchanged = bits(strategy)
    assert all(torch.equal(before[name], unchanged[name]) for name in before)
    return said


REFUSED = {
    "no checkpoint at the path": "there is no checkpoint",
    "another folder": "it has no strategy.json",
    "rank 1 reads another one": "ranks differ in the file strategy.json",
    "weights only, optimizer wanted": "load it with optimizer=False",
    "another shape": "decoder.layers.mlp.linear_fc1.weight is [4, 48, 16] there and [2, 64, 16] here",
    "another model of the same shape": "rotary_base is",
    "a folder in the way": "exists and is no checkpoint",
    "psutil is missing": "pip install psutil",
}


@pytest.mark.bad_input
def test_refused_on_all_ranks(tmp_path, report):
    first, second = run_ranks(2, HERE + "refusals", str(tmp_path))
    assert first == second and first.keys() == REFUSED.keys(), first.keys() ^ REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in first[name], first[name]
        report(f"{name}: {first[name]}")
    assert not (tmp_path / "more").exists()
