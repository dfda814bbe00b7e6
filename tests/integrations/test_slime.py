"""slime's schedules over our planner keep slime's contract."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from roll_batching.planning.cost_model import FIXED_TOKENS


def test_slime_schedules_keep_its_contract(host):
    ours = host("slime")
    generator = np.random.default_rng(2)
    for dp, cp, vpp, group in ((1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 2, 4)):
        lengths = generator.integers(1, 900, 130).tolist()
        lengths[7] = 1300  # above the cap: alone
        rollouts = [number // 3 for number in range(130)]
        args = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=1000 // cp, pipeline_model_parallel_size=1
        )
        sizes = {"dp_size": dp, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}
        parts, indices, counts, batches = ours.build_dp_schedule(
            args, sizes, lengths, global_batch_size=20, rollout_indices=rollouts
        )
        assert batches == [20, 20] and all(count % (group if vpp > 1 else 1) == 0 for count in counts)
        assert sorted(sum(parts, [])) == list(range(120))  # 44 rollouts: the last four are left out
        for of_rank, of_batches in zip(parts, indices, strict=True):
            assert sum(of_batches, []) == list(range(len(of_rank))) and len(of_batches) == sum(counts)
            for step in (0, 1):
                own = of_batches[sum(counts[:step]) : sum(counts[: step + 1])]
                assert {rollouts[of_rank[i]] // 20 for one in own for i in one} == {step}
            for one in of_batches:
                tokens = sum(lengths[of_rank[i]] for i in one)
                assert tokens <= 1000 or len(one) == 1
    args.use_dynamic_batch_size = False
    assert ours.build_dp_schedule(args, sizes, lengths, global_batch_size=20, rollout_indices=rollouts) == "slime"
    assert ours.cost_of(args).quadratic == 1 and ours.cost_of(args).linear == 1500
    assert ours.cost_of(args).fixed == 1500 * FIXED_TOKENS
    assert ours.constraints_of(args, sizes).objective == "auto"
    args.expert_model_parallel_size = 8
    assert ours.constraints_of(args, sizes).objective == "lockstep"
