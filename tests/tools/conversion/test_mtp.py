"""Heads of multi-token prediction in files of NeMo-RL, slime, verl and ROLL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools.conversion import test_nemo_rl_policy as nemo_rl
from tests.tools.conversion import test_roll_defaults as roll
from tests.tools.conversion import test_slime as slime
from tests.tools.conversion import test_verl as verl

pytestmark = pytest.mark.config


def heads_of(job: Any) -> tuple[int | None, float, bool]:
    layout = job.actor_train.strategy_args.strategy_config
    return layout.mtp_num_layers, layout.mtp_loss_scaling_factor, layout.mtp_detach_heads


def test_slime_trains_detached_heads_where_it_is_told_to(tmp_path: Path) -> None:
    done = slime.converted(tmp_path, "--mtp-num-layers 1 --enable-mtp-training")
    assert heads_of(slime.job_of(done, tmp_path)) == (1, 0.2, True)
    done = slime.converted(tmp_path, "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.05")
    assert heads_of(slime.job_of(done, tmp_path)) == (1, 0.05, True)
    done = slime.converted(tmp_path, "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.05")
    assert heads_of(slime.job_of(done, tmp_path)) == (None, 0.1, False)
    assert {"--mtp-num-layers", "--mtp-loss-scaling-factor"} <= slime.left_out(done, "idle").keys()


@pytest.mark.parametrize(
    ("given", "wanted", "idle", "refused"),
    [
        (
            {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3, "mtp_detach_heads": True},
            (1, 0.3, True),
            set(),
            set(),
        ),
        ({"mtp_num_layers": 1, "mtp_use_repeated_layer": True}, (1, 0.1, False), {"mtp_use_repeated_layer"}, set()),
        ({"mtp_num_layers": 5, "mtp_use_repeated_layer": True}, (5, 0.1, False), set(), {"mtp_use_repeated_layer"}),
        (
            {"mtp_num_layers": 5, "mtp_use_repeated_layer": True, "mtp_detach_heads": True},
            (None, 0.1, False),
            set(),
            {"mtp_num_layers", "mtp_use_repeated_layer", "mtp_detach_heads"},
        ),
        (
            {"mtp_num_layers": 0, "mtp_loss_scaling_factor": 0.0, "mtp_detach_heads": True},
            (None, 0.1, False),
            {"mtp_num_layers", "mtp_loss_scaling_factor", "mtp_detach_heads"},
            set(),
        ),
    ],
)
def test_nemo_rl(tmp_path: Path, given: dict[str, Any], wanted: Any, idle: set[str], refused: set[str]) -> None:
    file = nemo_rl.with_policy(dtensor_cfg={"enabled": False})
    file["policy"]["megatron_cfg"] = nemo_rl.MEGATRON | given
    assert heads_of(nemo_rl.job_of(tmp_path, file)) == wanted
    for kind, names in (("idle", idle), ("refused", refused)):
        found = {key.rpartition(".")[2] for key in nemo_rl.reasons(tmp_path, file, kind) if ".mtp_" in key}
        assert found == names, kind


def test_verl(tmp_path: Path) -> None:
    mtp = "actor_rollout_ref.model.mtp"
    done = verl.converted(tmp_path, f"model_engine=megatron {mtp}.enable=True {mtp}.enable_train=True")
    assert heads_of(verl.job_of(done, tmp_path)) == (1, 0.1, False)
    more = f"{mtp}.detach_encoder=True {mtp}.mtp_loss_scaling_factor=0.4 {mtp}.enable_rollout=True"
    done = verl.converted(tmp_path, f"model_engine=megatron {mtp}.enable=True {mtp}.enable_train=True {more}")
    assert heads_of(verl.job_of(done, tmp_path)) == (1, 0.4, True)
    assert "not used in sampling" in verl.left_out(done, "refused")[mtp]
    done = verl.converted(tmp_path, f"model_engine=megatron {mtp}.enable=True")
    assert heads_of(verl.job_of(done, tmp_path))[0] is None
    assert any(key.startswith(mtp) for key in verl.left_out(done))


def test_roll(tmp_path: Path) -> None:
    import yaml

    role = yaml.safe_load(roll.FILES["rlvr"])["actor_train"]
    for mode, wanted in (("standalone", (1, 0.1, True)), ("joint", (1, 0.1, False)), ("disabled", (None, 0.1, False))):
        _, job = roll.converted("rlvr", tmp_path, actor_train=role | {"mtp_training_mode": mode})
        assert heads_of(job) == wanted, mode
