"""Options without effect are refused by a strategy in Python as in a job's YAML, by one rule."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict
from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

HERE = "tests.strategy.test_idle_options:"
IDLE: dict[str, Any] = {
    "recompute_method": "block",
    "recompute_num_layers": 1,
    "recompute_modules": ["mlp"],
    "recompute_modules, experts": ["core_attn", "moe"],
    "recompute_modules, latent": ["mla_up_proj"],
    "grad_reduce_in_fp32": True,
    "overlap_param_gather": True,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "microbatch_group_size_per_vp_stage": 4,
    "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": True,
    "num_layers_at_end_in_bf16": 2,
    "mtp_loss_scaling_factor": 0.3,
    "mtp_detach_heads": True,
    "freeze_moe_router": True,
    "moe_router_bias_update_rate": 0.001,
}
"""By option, with a word where an option has several values."""
SELECTIVE = {"recompute_granularity": "selective"}
BESIDE: dict[str, dict[str, Any]] = {
    "recompute_modules, experts": SELECTIVE,
    "recompute_modules, latent": SELECTIVE,
    "grad_reduce_in_fp32": {
        "main_grads_dtype": "bf16",
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
    },
}


def layout_of(name: str) -> dict[str, Any]:
    return {name.partition(",")[0]: IDLE[name], **BESIDE.get(name, {})}


def in_python(_: None) -> dict[str, str]:
    """The error of a training strategy with each option, empty where it is built."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    said = {}
    for key in IDLE:
        try:
            MegatronTrainStrategy(worker_config("packed", 64, megatron=layout_of(key))).initialize()
            said[key] = ""
        except RollBatchingError as error:
            said[key] = str(error)
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(1, HERE + "in_python")[0]


def in_yaml(key: str) -> str:
    role = {
        "model_args": {"architecture": ARCHITECTURE},
        "strategy_args": {"strategy_config": layout_of(key)},
        "use_sequence_packing": True,
    }
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"task": "sft", "sequence_length": 64, "actor_train": role})
    return str(caught.value)


@pytest.mark.parametrize("key", IDLE)
def test_python_and_yaml_refuse_it_with_one_text(said: dict[str, str], key: str) -> None:
    text = in_yaml(key)
    reason = said[key].partition(f"strategy_config.{key.partition(',')[0]} ")[2]
    assert reason and reason in text, (said[key], text)


@pytest.mark.parametrize("key", IDLE)
def test_every_option_that_python_refuses_says_what_to_set(said: dict[str, str], key: str) -> None:
    assert any(word in said[key] for word in ("leave it out", "needs ", "set that")), said[key]


def with_effect(_: None) -> list[str]:
    """Combinations that have an effect, and an inference strategy, which reads none of these."""
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import worker_config

    read = {
        "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "overlap": dict.fromkeys(("overlap_param_gather", "use_distributed_optimizer", "overlap_grad_reduce"), True),
        "heads": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    }
    for options in read.values():
        MegatronTrainStrategy(worker_config("packed", 64, megatron=options)).initialize()
    MegatronInferStrategy(worker_config("packed", 64, megatron={"recompute_method": "block"})).initialize()
    critic = worker_config("packed", 64, megatron={"mtp_detach_heads": True})
    critic = critic.model_copy(update={"model_args": critic.model_args.model_copy(update={"value_head": True})})
    MegatronTrainStrategy(critic).initialize()
    return list(read)


def test_options_with_effect_are_taken() -> None:
    assert len(run_ranks(1, HERE + "with_effect")[0]) == 3
