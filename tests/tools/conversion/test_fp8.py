"""FP8 of NeMo-RL's, slime's, verl's and ROLL's files: kept with their defaults, or left out with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.layouts import complete_fp8
from tests.tools.conversion import test_slime, test_verl
from tests.tools.conversion.test_nemo_rl_defaults import converted, job_of
from tests.tools.conversion.test_nemo_rl_policy import MEGATRON, with_policy

pytestmark = pytest.mark.config

SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
LAYOUT = "actor_train.strategy_args.strategy_config"


def nemo_rl(**megatron: Any) -> dict[str, Any]:
    return with_policy(megatron_cfg=MEGATRON | megatron, dtensor_cfg={"enabled": False})


def keys_of(layout: Any) -> tuple[Any, ...]:
    return layout.fp8, layout.fp8_recipe, layout.transformer_impl


CFG = {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}


def test_nemo_rls_section_and_its_variable_are_kept(tmp_path: Path) -> None:
    job = job_of(tmp_path, nemo_rl(fp8_cfg=CFG, env_vars={SCALES: "1"}, first_last_layers_bf16=True))
    layout = job.actor_train.strategy_args.strategy_config
    assert keys_of(layout) == ("e4m3", "blockwise", "transformer_engine")
    assert layout.first_last_layers_bf16 and job.actor_train.system_envs == {SCALES: "1"}


def test_nemo_rls_section_that_is_off_has_no_effect(tmp_path: Path) -> None:
    file = nemo_rl(fp8_cfg=CFG | {"enabled": False}, env_vars={"NVTE_X": "1"})
    job = job_of(tmp_path, file)
    assert keys_of(job.actor_train.strategy_args.strategy_config) == (None, None, "auto")
    assert "policy.megatron_cfg.fp8_cfg" in {one.key for one in converted(tmp_path, file).left_out_as("idle")}


def test_nemo_rls_weights_in_fp8_are_left_out_by_name_and_a_missing_recipe_is_missing(tmp_path: Path) -> None:
    done = converted(tmp_path, nemo_rl(fp8_cfg=CFG | {"fp8_param": True, "force_clear_fp8_caches": True}))
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    assert "weights are kept in bf16" in refused["policy.megatron_cfg.fp8_cfg.fp8_param"]
    assert not any("fp8" in one.key for one in done.left_out_as("unknown"))
    missing = converted(tmp_path, nemo_rl(fp8_cfg={"enabled": True, "fp8": "e4m3"})).missing
    assert any("fp8_recipe: is missing" in text for text in missing), missing


def test_slimes_options_and_its_default_recipe(tmp_path: Path) -> None:
    done = test_slime.converted(tmp_path, "--fp8-format e4m3 --fp8-recipe blockwise")
    job = test_slime.job_of(done, tmp_path)
    assert keys_of(job.actor_train.strategy_args.strategy_config) == ("e4m3", "blockwise", "transformer_engine")
    assert job.actor_train.system_envs == {SCALES: "1"}
    done = test_slime.converted(tmp_path, "--fp8-format hybrid --fp8-param-gather")
    assert "weights are kept in bf16" in test_slime.left_out(done, "refused")["--fp8-param-gather"]
    said = [*done.missing, *test_slime.left_out(done, "refused").values()]
    assert any("delayed is not supported" in text for text in said), said
    ends = "--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    layout = test_slime.job_of(test_slime.converted(tmp_path, ends), tmp_path).actor_train.strategy_args.strategy_config
    assert layout.first_last_layers_bf16 and layout.num_layers_at_end_in_bf16 == 2
    alone = test_slime.left_out(test_slime.converted(tmp_path, "--fp8-recipe blockwise"))
    assert "--fp8-format only" in alone["--fp8-recipe"]


def test_verls_override_of_the_transformer_config(tmp_path: Path) -> None:
    given = "actor_rollout_ref.actor.megatron.override_transformer_config"
    done = test_verl.converted(tmp_path, f"model_engine=megatron +{given}.fp8=e4m3 +{given}.fp8_recipe=blockwise")
    layout = test_slime.job_of(done, tmp_path).actor_train.strategy_args.strategy_config
    assert keys_of(layout) == ("e4m3", "blockwise", "transformer_engine")


def test_rolls_keys_get_the_layers_that_they_need() -> None:
    layout = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    draft = Draft("roll.yaml", framework="ROLL")
    draft.values = {"actor_train": {"strategy_args": {"strategy_config": layout}}, "reference": None}
    complete_fp8(draft)
    assert layout["transformer_impl"] == "transformer_engine"
    bare = {"fp8": "hybrid"}
    draft.values = {"actor_train": {"strategy_args": {"strategy_config": bare}}}
    complete_fp8(draft, recipe="delayed")
    assert bare["fp8_recipe"] == "delayed"
