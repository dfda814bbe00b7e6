"""Megatron-LM's packing schedulers over our planner: their contract, and no slower a step than theirs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import IntegrationError
from roll_batching.planning import LinearQuadraticCost

CONFIG = SimpleNamespace(
    num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    gated_linear_unit=True, num_moe_experts=None, moe_layer_freq=1, multi_latent_attention=False, mtp_num_layers=None,
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
    expert_model_parallel_size=1,
)  # fmt: skip
CAP = 4096


@pytest.fixture
def host() -> Any:
    """Our module, with Megatron's functions given back at the end."""
    module = importlib.import_module("roll_batching.integrations.megatron_lm")
    module.patch()
    yield module
    module.unpatch()


def schedule(host: Any, name: str, lengths: np.ndarray, *sizes: Any, ours: bool = True) -> list[list[list[int]]]:
    data_schedule = importlib.import_module("megatron.core.datasets.data_schedule")
    (host.patch if ours else host.unpatch)()
    scheduler = getattr(data_schedule, name)(CAP, *sizes)
    token = host._planned_for.set(CONFIG)
    try:
        groups: list[list[list[int]]] = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())))
    finally:
        host._planned_for.reset(token)
    return groups


@pytest.mark.parametrize(("cp", "dp", "group"), [(1, 4, None), (2, 4, None), (1, 2, 4)])
def test_packs_of_one_size_keep_megatron_s_contract_and_level_ranks(host: Any, cp: int, dp: int, group: Any) -> None:
    lengths = np.minimum(np.random.default_rng(cp + dp).lognormal(6.3, 0.9, 160).astype(int) + 8, CAP)
    slowest = {}
    for ours in (True, False):
        groups = schedule(host, "DpBalancedScheduler", lengths, cp, dp, group, ours=ours)
        assert len(groups) % (group or 1) == 0 and all(len(ranks) == cp * dp for ranks in groups)
        assert all(ids == ranks[rank - rank % cp] and ids for ranks in groups for rank, ids in enumerate(ranks))
        assert sorted(i for ranks in groups for ids in ranks[::cp] for i in ids) == list(range(160))
        assert all(lengths[ids].sum() <= CAP * cp for ranks in groups for ids in ranks)
        cost = LinearQuadraticCost(linear=24576, quadratic=1)
        table = np.array([[cost.linear * lengths[i].sum() + (lengths[i] ** 2).sum() for i in r[::cp]] for r in groups])
        slowest[ours] = table.sum(axis=0).max() / table.sum(axis=0).mean()
    assert slowest[True] < 1.01 and slowest[True] < slowest[False]


def test_packs_have_sizes_of_their_own(host: Any) -> None:
    if not host._HAS_SIZES:
        pytest.skip("this Megatron has no default_dynamic_cp")
    lengths = np.minimum(np.random.default_rng(3).lognormal(7, 1.2, 200).astype(int) // 16 * 16 + 16, 8 * CAP)
    times = {}
    for ours in (True, False):
        groups = schedule(host, "DefaultDynamicCPScheduler", lengths, 8, 1, None, ours=ours)
        total = 0
        for ranks in groups:
            packs = {tuple(ids): ranks.count(ids) for ids in ranks}
            assert all(packs) and all(lengths[list(ids)].sum() <= CAP * size for ids, size in packs.items())
            for ids, size in packs.items():
                first = ranks.index(list(ids))
                assert ranks[first : first + size] == [list(ids)] * size and first % size == 0
            total += max((36864 * lengths[list(i)].sum() + (lengths[list(i)] ** 2).sum()) / n for i, n in packs.items())
        assert sorted(i for ranks in groups for i in {j for ids in ranks for j in ids}) == list(range(200))
        times[ours] = total
    assert times[True] < times[False], times


def test_what_plans_do_not_keep_to_is_refused_by_name(host: Any) -> None:
    scheduler = SimpleNamespace(max_num_seqs=4)
    with pytest.raises(IntegrationError, match="thd_max_packed_sequences.*leave it out"):
        host.one_size(scheduler, [(0, 5)])
    scheduler = SimpleNamespace(min_cp_size=2)
    with pytest.raises(IntegrationError, match="min_dynamic_context_parallel_size=2.*leave it 1"):
        host.size_per_pack(scheduler, [(0, 5)])
