"""Under context parallelism a rank keeps only its share of keys and values for the backward."""

from __future__ import annotations

import gc
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from roll_batching.packing import PackLayout, packed_params
from roll_batching.packing.attention_backend import attention_backend
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class _Storages(TorchDispatchMode):
    """Storages created in the block that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        return out

    def here(self) -> list[Any]:
        return [storage for reference in self.alive.values() if (storage := reference()) is not None]


def _core(backend: Any, heads: int, groups: int, dim: int, cp_group: Any, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=heads * dim, num_attention_heads=heads, num_query_groups=groups, kv_channels=dim,
        attention_dropout=0.0, **options,
    )  # fmt: skip
    return backend.build_core(None, config=config, layer_number=1, pg_collection=types.SimpleNamespace(cp=cp_group))


def _one_sequence(tokens: int, cp: int) -> PackLayout:
    return PackLayout(lengths=np.array([tokens]), segments=np.array([tokens]), cp_size=cp)


def _marked(shape: tuple[int, ...], marks: tuple[float, float], seed: int) -> torch.Tensor:
    """Numbers that are one of two: whoever holds nothing else holds these tensors' elements."""
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(draws, *map(torch.tensor, marks)).requires_grad_()


def _bytes(storages: list[Any]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)


def kept(heads: int) -> tuple[float, float, float, int, int]:
    """Keys and values kept of this rank's share, before and between two backward passes, gradients' worst gap to the
    plain way, buckets, bytes that outlive a forward pass without a backward one."""
    dist.init_process_group("gloo")
    cp, rank = dist.get_world_size(), dist.get_rank()
    groups, dim, backend = 2, 8, attention_backend("dense", "cpu")
    # Spans of several sizes: several buckets, not as many on every rank.
    lengths = np.array([4, 1, 9, 2]) * 2 * cp
    layout = PackLayout(lengths=lengths, segments=lengths, cp_size=cp)
    params = packed_params(layout, rank, CPU, attention=backend)
    tokens = layout.tokens // cp
    query = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    marks = (3.0, 5.0)
    key, value = (_marked((tokens, groups, dim), marks, 10 * rank + seed) for seed in (1, 2))
    upstream = torch.randn(tokens, heads * dim, generator=torch.Generator().manual_seed(rank))
    inputs = (query, key, value)

    def run(**options: Any) -> tuple[torch.Tensor, Any]:
        core = _core(backend, heads, groups, dim, dist.group.WORLD, **options)
        return core(*inputs, None, packed_seq_params=params)

    with _Storages() as given_up:
        run()
    with _Storages() as finished:
        torch.autograd.grad(run(), inputs, upstream)
    gc.collect()
    # gloo's threads hold what they sent for a moment longer.
    _wait_until(lambda: _bytes(given_up.here()) == _bytes(finished.here()))
    left = _bytes(given_up.here()) - _bytes(finished.here())
    with _Storages() as storages:
        out = run()

    def bytes_of_marks() -> int:
        total = 0
        for storage in storages.here():
            held = torch.empty(0).set_(storage)
            total += storage.nbytes() if bool(((held == marks[0]) | (held == marks[1])).all()) else 0
        return total

    def kept_shares() -> float:
        _wait_until(lambda: bytes_of_marks() <= 1.1 * share)
        return bytes_of_marks() / share

    share = 2 * key.numel() * key.element_size()
    during = kept_shares()
    found = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    between = kept_shares()
    again = torch.autograd.grad(out, inputs, upstream)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain = torch.autograd.grad(run(**recomputed), inputs, upstream)
    gap = max(float((a - b).abs().max()) for a, b in zip((*found, *again), plain * 2, strict=True))
    return during, between, gap, len(params.attention.buckets), left


@pytest.mark.parametrize(("cp", "heads"), [(2, 2), (4, 2), (2, 6)])
def test_a_rank_keeps_its_own_keys_and_values(cp: int, heads: int) -> None:
    for during, between, gap, buckets, left in run_ranks(cp, "tests.packing.test_collectives:kept", heads):
        assert buckets > 1
        assert 1.0 <= during <= 1.1
        assert between == during  # a second backward pass through the same graph starts anew
        assert gap == 0.0
        assert left == 0, "a pass that ended in an error holds memory for ever"


def kept_at_128k(cp: int) -> float:
    """Keys and values kept per layer of Llama-3-8B's shape over this rank's share: on tensors that have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=cp)
    heads, groups, dim, tokens = 32, 8, 128, 131_072
    layout = _one_sequence(tokens, cp)
    backend = attention_backend("varlen", "cuda")
    params = packed_params(layout, 1, CPU, attention=backend)
    core = _core(backend, heads, groups, dim, dist.group.WORLD)
    with FakeTensorMode(allow_non_fake_inputs=True), _Storages() as storages:
        query, key, value = (
            torch.empty(tokens // cp, width, dim, dtype=torch.bfloat16, requires_grad=True)
            for width in (heads, groups, groups)
        )
        inputs = {x.untyped_storage()._cdata for x in (query, key, value)}
        out = core(query, key, value, None, packed_seq_params=params)
        held = [x for x in storages.here() if x._cdata not in inputs and x._cdata != out.untyped_storage()._cdata]
        log_sum_exp = heads * (tokens // cp) * 4
        total = sum(x.nbytes() for x in held) - log_sum_exp
        out.sum().backward()
        assert key.grad.shape == key.shape
        return total / (2 * key.numel() * key.element_size())


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_llama_3_8b_at_128k(cp: int) -> None:
    (share,) = run_ranks(1, "tests.packing.test_collectives:kept_at_128k", cp)
    assert 1.0 <= share <= 1.1
