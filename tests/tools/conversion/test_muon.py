"""Muon in files of NeMo-RL, verl and slime (and its forks, such as miles): Megatron's own names here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools.conversion import test_nemo_rl_policy, test_slime, test_verl

pytestmark = pytest.mark.config


def given(job: Any) -> dict[str, Any]:
    """Keys of Muon that are not the default, and whether state is sharded."""
    args, fields = job.actor_train.training_args, type(job.actor_train.training_args).model_fields
    keys = [key for key in fields if key == "optimizer" or key.startswith("muon_")]
    return {key: getattr(args, key) for key in keys if getattr(args, key) != fields[key].default} | {
        "shards": job.actor_train.strategy_args.strategy_config.use_distributed_optimizer
    }


SLIME = {
    "--optimizer muon": {"muon_momentum": 0.9, "shards": True},
    "--optimizer dist_muon --muon-momentum 0.95 --muon-no-split-qkv --muon-use-nesterov --overlap-param-gather": {
        "muon_split_qkv": False, "muon_nesterov": True, "shards": True,
    },
    "--optimizer muon --muon-scale-mode unit_rms_norm --muon-num-ns-steps 10 --muon-tp-mode duplicated "
    "--muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high --muon-coefficient-type aol --muon-use-syrk": {
        "muon_momentum": 0.9, "muon_scale_mode": "unit_rms_norm", "muon_num_ns_steps": 10, "shards": True,
        "muon_tp_mode": "duplicated", "muon_extra_scale_factor": 0.2, "muon_fp32_matmul_prec": "high",
        "muon_coefficient_type": "aol",
    },
}  # fmt: skip


@pytest.mark.parametrize("options", SLIME)
def test_options_of_slime(tmp_path: Path, options: str) -> None:
    done = test_slime.converted(tmp_path, options)
    assert given(test_slime.job_of(done, tmp_path)) == {"optimizer": "muon"} | SLIME[options]
    kept = {name for name in test_slime.left_out(done) if "muon" in name or name == "--optimizer"}
    assert kept <= {"--muon-use-syrk"}


VERL = {
    "optimizer=muon muon_scale_mode=shape_scaling muon_nesterov=True": {
        "muon_scale_mode": "shape_scaling", "muon_nesterov": True,
    },
    "optimizer=muon use_layer_wise_distributed_optimizer=True muon_match_adamw_update_rms=True": {
        "muon_extra_scale_factor": 0.229416,
    },
    "optimizer=muon override_optimizer_config.muon_num_ns_steps=10": {"muon_num_ns_steps": 10},
}  # fmt: skip


@pytest.mark.parametrize("options", VERL)
def test_keys_of_verl(tmp_path: Path, options: str) -> None:
    keys = " ".join(f"+{test_verl.A}.optim.{option}" for option in options.split())
    done = test_verl.converted(tmp_path, f"model_engine=megatron {keys}")
    assert given(test_slime.job_of(done, tmp_path)) == {"optimizer": "muon", "shards": True} | VERL[options]
    assert not [key for key in test_slime.left_out(done) if "muon" in key or "optimizer" in key]


def test_keys_of_nemo_rl(tmp_path: Path) -> None:
    optimizer = {
        "optimizer": "dist_muon", "lr": 1e-4, "muon_momentum": 0.9, "muon_extra_scale_factor": 0.5,
        "muon_split_qkv": True, "use_distributed_optimizer": False,
    }  # fmt: skip
    file = test_nemo_rl_policy.with_policy(dtensor_cfg={"enabled": False})
    file["policy"]["megatron_cfg"] = test_nemo_rl_policy.MEGATRON | {"optimizer": optimizer}
    assert given(test_nemo_rl_policy.job_of(tmp_path, file)) == {
        "optimizer": "muon", "muon_momentum": 0.9, "muon_extra_scale_factor": 0.5, "shards": True,
    }  # fmt: skip


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    """Also another optimizer beside Muon, for the parameters that are no matrices."""
    refused = test_slime.left_out(test_slime.converted(tmp_path, "--optimizer sgd --muon-momentum 0.5"), "refused")
    assert "sgd" in refused["--optimizer"]
    options = "--optimizer muon --muon-scalar-optimizer lion"
    refused = test_slime.left_out(test_slime.converted(tmp_path, options), "refused")
    assert "lion" in refused["--muon-scalar-optimizer"]
