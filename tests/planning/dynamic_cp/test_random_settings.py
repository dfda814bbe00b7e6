"""Random layouts and lengths: legal, repeatable plans that are never slower than the best single size."""

from __future__ import annotations

import pytest

from benchmarks.dynamic_cp.random_settings import KINDS, draw_setting, plan_twice


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_random_settings(kind: int) -> None:
    for seed in range(kind, 6 * len(KINDS), len(KINDS)):
        setting = draw_setting(seed, most_ranks=24, most_sequences=120)
        assert setting.kind == KINDS[kind]
        plan, _ = plan_twice(setting)
        assert plan.blocks is not None and plan.blocks.step_time > 0
        assert not plan.blocks.fixed_step_time or plan.blocks.step_time <= plan.blocks.fixed_step_time, setting
        constraints = setting.constraints
        if constraints.meets_at_every_index or constraints.interleaved:
            assert len({len(packs) for packs in plan.blocks.lists}) == 1
