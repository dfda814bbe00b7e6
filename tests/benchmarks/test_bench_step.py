"""`benchmarks/bench_step.py`: its samples, its modes' settings, and what `--check` holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import bench_step as bench


def test_the_samples_are_those_of_trls_document() -> None:
    load = bench.WORKLOADS["trl"]
    r = np.random.default_rng(0)
    answers = np.clip(r.lognormal(np.log(700), 0.9, 256), 16, 4096)
    answers[r.random(256) < 0.1] = 4096
    prompts = np.clip(r.lognormal(np.log(256), 0.43, 256), 16, 1024)
    assert load.lengths(0).tolist() == [int(a) + int(p) for a, p in zip(answers, prompts, strict=True)]
    assert len(load.lengths(-1)) == 16 and (load.cap, load.longest) == (16384, 5120)


def test_sequences_of_one_length_have_the_same_tokens_and_the_same_pairs() -> None:
    load = bench.WORKLOADS["trl"]
    real, equal = load.lengths(0).astype(float), load.lengths(0, "equal_length").astype(float)
    assert len(set(equal)) == 1
    assert equal.sum() == pytest.approx(real.sum(), rel=0.01)
    assert (equal**2).sum() == pytest.approx((real**2).sum(), rel=0.01)


def test_every_mode_is_planned_as_it_says() -> None:
    from roll_batching.planning import PlanConstraints, plan_step

    load, tokens = bench.WORKLOADS["trl"], {}
    for mode in bench.MODES:
        spec = bench.worker_config(load, mode).batching().train
        constraints = PlanConstraints(
            dp_size=1, **{name: getattr(spec, name) for name in type(spec).__dataclass_fields__}
        )
        plan = plan_step(load.lengths(0, mode), constraints)
        tokens[mode] = plan.report.computed_tokens
        rows = {len(mb.samples) for mb in plan.micro_batches[0]}
        if mode == "padded":
            assert max(rows) == 3 and {mb.padded_length for mb in plan.micro_batches[0]} == {5120}
        if mode == "padded_micro":
            assert rows == {8}
        if mode == "packed_peer":
            assert all((mb.slots % 2 == 0).all() for mb in plan.micro_batches[0])
    assert (
        tokens["packed"] == int(load.lengths(0).sum()) < tokens["dynamic"] < tokens["padded_micro"] < tokens["padded"]
    )


def test_what_check_asks(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"padded": 10, "padded_micro": 15, "dynamic": 24, "packed": 31, "packed_peer": 20, "equal_length": 33}

    def result(mode: str, **changes: float) -> dict[str, Any]:
        host = {"plan_seconds_per_step": 0.01, "pack_seconds_per_step": 0.01, "unpack_seconds_per_step": 0.001}
        return {"mode": mode, "tokens_per_second": speeds[mode], "seconds_per_step": 10.0, **host, **changes}

    assert bench.check([result(mode) for mode in speeds]) and "NO" not in capsys.readouterr().out
    assert not bench.check([result(mode, pack_seconds_per_step=0.2) for mode in speeds])
    assert "| plan, pack and unpack in a packed step | at most 1.00% | 2.11% | NO |" in capsys.readouterr().out
    speeds["packed"] = 27
    assert not bench.check([result(mode) for mode in speeds])
    assert capsys.readouterr().out.count("NO") == 3
