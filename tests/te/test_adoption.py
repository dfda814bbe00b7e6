"""Models with TransformerEngine's attention that others built share prefixes and have sizes per pack.

Megatron's wrapper and TransformerEngine's module are the real ones; only the innermost kernel is torch's. Right are the
results of Megatron's local attention on each sample alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.strategy import test_adoption as local
from tests.support.ranks import run_ranks
from tests.te.engine import needs_engine

pytestmark = [pytest.mark.te, needs_engine]

KINDS = ["rope", "yarn", "partial", "interleaved"]
WITH_CONTEXT = ["rope", "partial"]
"""Megatron builds YaRN's table under context parallelism with pinned memory, which needs a driver."""
CASES: list[tuple[int, list[str], list[dict[str, Any]]]] = [
    (1, KINDS, local.ONE_RANK),
    (2, ["rope", "yarn"], local.TWO_RANKS),
    (2, WITH_CONTEXT, [{"cp": 2}, {"cp": 2, **local.RECOMPUTE}]),
    (4, ["rope", "yarn"], local.FOUR_RANKS),
    (4, WITH_CONTEXT, [{"cp": 2, "pp": 2}]),
]


def compare(payload: tuple[str, list[str], list[dict[str, Any]]]) -> list[str]:
    from roll_batching.distributed.parallel_layout import start_processes
    from tests.te.engine import as_if_on_an_h100
    from tests.te.plain_kernels import plain_kernels

    start_processes()  # the CPU: before anybody is told otherwise
    with as_if_on_an_h100(), plain_kernels():
        return local.compare(payload, "engine")


@pytest.mark.parametrize(("ranks", "kinds", "layouts"), CASES)
def test_the_engine_s_attention_has_the_gradients_of_each_sample_alone(
    ranks: int, kinds: list[str], layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_ranks(1, "tests.strategy.test_adoption:write_references", (str(tmp_path), kinds), timeout=400)
    for differing in run_ranks(ranks, "tests.te.test_adoption:compare", (str(tmp_path), kinds, layouts), timeout=900):
        assert not differing, "\n".join(differing)
