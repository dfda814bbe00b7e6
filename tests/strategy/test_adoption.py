"""Models that others built share prefixes and have packs of their own context-parallel sizes.

Right are the loss and the gradients of the same model, untouched, on each sample alone in one process. Megatron's own
layer spec, rotations and cores; `tests/te/test_adoption.py` has TransformerEngine's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategy.test_from_parts import _start
from tests.strategy.test_shared_prefixes import batch, losses
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_adoption:"
LIMIT = 5e-6
YARN = {
    "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "llama3": {"model_options": {"rope_scaling": True, "rope_scaling_factor": 4.0}},
    "partial": {"model_options": {"rotary_percent": 0.5}},
    "interleaved": {"rotary_interleaved": True},
    "yarn": {"positions": "yarn", "settings_after": YARN},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_load_balancing_type": "none"},
}
TREES = ("groups", "three levels", "duplicates, and samples that begin others")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_RANK = [{}, RECOMPUTE]
TWO_RANKS = [{"tp": 2}, {"pp": 2}, {"max_cp_size": 2}, {"max_cp_size": 2, **RECOMPUTE}]
FOUR_RANKS = [{"pp": 2, "max_cp_size": 2}, {"tp": 2, "max_cp_size": 2}, {"pp": 2, "vpp": 2, "max_cp_size": 2}]

ONE_SIZE = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "vpp": 2}]
"""On four ranks, with data parallelism where sizes leave it."""


def write_references(payload: tuple[str, list[str]]) -> None:
    """Loss and gradients of each kind and tree, by the untouched model."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.megatron_patches.layers import define_router_gemm
    from tests.support.own_model import build
    from tests.support.reference import gradients, policy_loss

    folder, kinds = payload
    _start()
    define_router_gemm()
    for kind in kinds:
        model_parallel_cuda_manual_seed(0)
        for layers in (2, 4):
            (model,), _ = build("stock", wrapped=False, layers=layers, **KINDS[kind])
            for tree in TREES:
                samples = batch(tree, torch.Generator().manual_seed(1))
                loss = policy_loss(model, samples, clip=(0.2, 0.28), kl=0.05, entropy=0.02)
                torch.save((float(loss), gradients(model, loss)), Path(folder) / f"{kind}-{layers}-{tree}.pt")


def compare(payload: tuple[str, list[str], list[dict[str, Any]]], core: str = "stock") -> list[str]:
    """Cases that differ, or save nothing."""
    from roll_batching.planning import BatchingSpec
    from roll_batching.planning.pack_times import Cluster
    from roll_batching.samples import distribute
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import MegatronTrainStrategy
    from roll_batching.strategy.model_state import StepSettings
    from tests.support.models import whole_gradients, worst_difference
    from tests.support.own_model import build

    folder, kinds, layouts = payload
    differing = []
    for layout in layouts:
        sizes = {name: size for name, size in layout.items() if name in ("tp", "pp", "vpp", "cp")}
        options = {name: value for name, value in layout.items() if name in RECOMPUTE}
        largest, layers = layout.get("max_cp_size", 1), 4 if layout.get("vpp") else 2
        for kind in kinds:
            _start(**sizes)
            chunks, optimizer = build(
                core, layers=layers, calculate_per_token_loss=True, variable_seq_lengths=True,
                **KINDS[kind], **options,
            )  # fmt: skip
            keys = [sorted(chunk.state_dict()) for chunk in chunks]
            spec = BatchingSpec(mode="packed", max_tokens=160)
            strategy = MegatronTrainStrategy.from_parts(
                chunks,
                optimizer,
                BatchingConfig(train=spec, infer=spec, share_prefixes=True),
                settings=StepSettings(max_cp_size=largest, cluster=Cluster(layer_floor=1e-6)),
                vocab_size=61,
                defer_head=True,
            )
            assert [sorted(chunk.state_dict()) for chunk in chunks] == keys
            for tree in TREES:
                whole, place = batch(tree, torch.Generator().manual_seed(1)), strategy.layout
                local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
                plan = strategy.plan(strategy.gather_table(local))
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                loss, _ = strategy.forward_backward(distribute(local, plan), plan, losses()["policy"])
                expected_loss, expected = torch.load(Path(folder) / f"{kind}-{layers}-{tree}.pt")
                gradient, name = worst_difference(whole_gradients(chunks, 61, place.tp_rank, False), expected)
                gap = abs(loss - expected_loss) / abs(expected_loss)
                case = f"{kind}, {layout}, {tree}"
                if not plan.shared.any():
                    differing.append(f"{case}: nothing is shared")
                if max(gap, gradient) > LIMIT:
                    differing.append(f"{case}: loss {gap:.1e}, gradient {gradient:.1e} of {name}")
    return differing


@pytest.fixture(scope="module")
def references() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, HERE + "write_references", (folder, list(KINDS)), timeout=400)
        yield folder


@pytest.mark.parametrize(
    ("ranks", "kinds", "layouts"),
    [
        (1, list(KINDS), ONE_RANK[:1]),
        (2, ["rope", "yarn"], TWO_RANKS[:3]),
        pytest.param(1, list(KINDS), ONE_RANK[1:], marks=pytest.mark.slow),
        pytest.param(2, [kind for kind in KINDS if kind != "experts"], TWO_RANKS, marks=pytest.mark.slow),
        pytest.param(2, ["experts"], TWO_RANKS[1:], marks=pytest.mark.slow),
        pytest.param(4, ["rope", "yarn"], FOUR_RANKS, marks=pytest.mark.slow),
        pytest.param(4, ["rope", "llama3"], ONE_SIZE, marks=pytest.mark.slow),
        # Experts under tensor parallelism need sequence parallelism, which Megatron's local norm refuses.
        pytest.param(4, ["experts"], FOUR_RANKS[::2], marks=pytest.mark.slow),
    ],
)
def test_a_stock_model_has_the_gradients_of_each_sample_alone(
    ranks: int, kinds: list[str], layouts: list[dict[str, Any]], references: str
) -> None:
    for differing in run_ranks(ranks, HERE + "compare", (references, kinds, layouts), timeout=900):
        assert not differing, "\n".join(differing)
