"""Jobs whose models this machine cannot compute or save are refused before a rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.launch.commands import trained

LAYOUT = "actor_train__strategy_args__strategy_config__"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({LAYOUT + "transformer_impl": "transformer_engine"}, "compute on CUDA, not on cpu"),
    "attention": ({LAYOUT + "attention_backend": "varlen"}, "varlen runs on cuda, not on cpu"),
    "recompute": (
        {LAYOUT + "recompute_granularity": "selective", LAYOUT + "recompute_modules": ["layernorm"]},
        "['layernorm'] needs TransformerEngine, which is not installed",
    ),
    "optimizer": (
        {
            LAYOUT + "use_distributed_optimizer": True,
            LAYOUT + "use_precision_aware_optimizer": True,
            "save_steps": 1,
        },
        "the optimizer state of use_precision_aware_optimizer is not saved",
    ),
    "critic": (
        {"adv_estimator": "gae", "critic__strategy_args__strategy_config__attention_backend": "flash_attn"},
        "critic: the attention backend flash_attn runs on cuda, not on cpu",
    ),
}

QUICK = ("layers", "critic")


@pytest.mark.bad_input
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_a_job_is_refused_before_ranks_start(tmp_path: Any, case: str, report: Any) -> None:
    changes, words = CASES[case]
    code, said = trained(tmp_path, warmup=None, output_dir="runs", **changes)
    line = said.splitlines()[-1]
    report(line)
    assert code == 2 and line.startswith("error: the job cannot run here: ") and words in line, said
    assert not (tmp_path / "runs").exists()
