"""Keys of uneven pipelines in files of slime, verl, NeMo-RL and ROLL: Megatron's own names here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.jobs.config import config_from_dict
from tests.jobs.config.jobs import changed
from tests.tools.conversion import test_nemo_rl_policy, test_slime, test_verl

pytestmark = pytest.mark.config

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
KEYS = (FIRST, LAST, EMBEDDING, LOSS, LAYOUT)


def given(job: Any) -> dict[str, Any]:
    layout = job.actor_train.strategy_args.strategy_config
    return {key: getattr(layout, key) for key in KEYS if getattr(layout, key) not in (None, False)}


SLIME = {
    "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5": {FIRST: 3, LAST: 5},
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split": {EMBEDDING: True, LOSS: True},
    "--pipeline-model-parallel-layout 'Et*3|(tt|)*2t*5,L'": {LAYOUT: "Et*3|(tt|)*2t*5,L"},
}


@pytest.mark.parametrize("options", SLIME)
def test_options_of_slime(tmp_path: Path, options: str) -> None:
    done = test_slime.converted(tmp_path, f"--pipeline-model-parallel-size 4 {options}")
    assert given(test_slime.job_of(done, tmp_path)) == SLIME[options]
    assert not {name.split()[0] for name in options.split("--") if name} & {
        one.removeprefix("--") for one in test_slime.left_out(done)
    }


VERL = {
    f"{FIRST}=4 {LAST}=1": {FIRST: 4, LAST: 1},
    f"{EMBEDDING}=True {LOSS}=False": {EMBEDDING: True},
    f"{LAYOUT}=\"'Et*3|t*3L'\"": {LAYOUT: "Et*3|t*3L"},
}


@pytest.mark.parametrize("overrides", VERL)
def test_overrides_of_verl(tmp_path: Path, overrides: str) -> None:
    section = f"+{test_verl.A}.megatron.override_transformer_config"
    keys = " ".join(f"{section}.{one}" for one in overrides.split(" "))
    text = f"model_engine=megatron {test_verl.A}.megatron.pipeline_model_parallel_size=2 {keys}"
    done = test_verl.converted(tmp_path, text)
    assert given(test_slime.job_of(done, tmp_path)) == VERL[overrides]
    assert not [key for key in test_slime.left_out(done, "refused") if "pipeline" in key]


def test_keys_of_nemo_rl(tmp_path: Path) -> None:
    file = test_nemo_rl_policy.with_policy(dtensor_cfg={"enabled": False})
    pipeline = {"pipeline_model_parallel_size": 4, FIRST: 7, LAST: 6, "pipeline_dtype": "bfloat16"}
    file["policy"]["megatron_cfg"] = test_nemo_rl_policy.MEGATRON | pipeline
    assert given(test_nemo_rl_policy.job_of(tmp_path, file)) == {FIRST: 7, LAST: 6}
    file["policy"]["megatron_cfg"] |= {FIRST: None, LAST: None}
    assert given(test_nemo_rl_policy.job_of(tmp_path, file)) == {}


def test_keys_of_roll_are_megatrons() -> None:
    text = """
    pipeline_model_parallel_size: 2
    account_for_loss_in_pipeline_split: true
    account_for_embedding_in_pipeline_split: true
    """
    prefix = "actor_train.strategy_args.strategy_config"
    keys = {f"{prefix}.{key}": value for key, value in yaml.safe_load(text).items()}
    assert given(config_from_dict(changed(keys))) == {EMBEDDING: True, LOSS: True}
    layout = {f"{prefix}.pipeline_model_parallel_size": 2, f"{prefix}.{LAYOUT}": "E|(t|)*4,L"}
    job = config_from_dict(changed(layout))
    strategy = job.actor_train.strategy_args.strategy_config
    assert strategy.vpp_size == 3 and strategy.chunk_layers(4) == ((0, 1, 1), (1, 1, 0))
