"""Dynamic sampling in files of NeMo-RL, verl and slime: on, off, and with values that have no equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_batching.tools.conversion import Conversion
from tests.tools.conversion import test_nemo_rl, test_slime, test_verl

pytestmark = pytest.mark.config
FILTER = "--dynamic-sampling-filter-path"
KEYS = ("dynamic_sampling", "dynamic_sampling_max_batches", "dynamic_sampling_batch_size")


def loaded(done: Conversion, folder: Path) -> Conversion:
    """`done`, which loads without a key that has no effect."""
    test_nemo_rl.loads_quietly(done, folder)
    return done


def sampling(done: Conversion) -> tuple:
    return tuple(done.settings.get(key, "-") for key in KEYS)


def left_out(done: Conversion, kind: str) -> dict[str, str]:
    return {one.key: one.why for one in done.left_out_as(kind)}


@pytest.mark.parametrize(
    ("grpo", "expected"),
    [
        ({"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 10, "batch_multiplier": 3}, (True, 11, 3)),
        ({"use_dynamic_sampling": True, "batch_multiplier": 1.5}, (True, 11, 1.5)),
        ({"use_dynamic_sampling": True}, (True, 11, None)),
        ({"use_dynamic_sampling": False, "batch_multiplier": 1, "dynamic_sampling_max_gen_batches": 4}, None),
    ],
)
def test_of_nemo_rl(tmp_path, grpo, expected):
    done = loaded(test_nemo_rl.converted(tmp_path, f"defaults: base.yaml\ngrpo: {json.dumps(grpo)}\n"), tmp_path)
    if expected is None:
        assert sampling(done) == ("-", "-", "-")
        assert "grpo.dynamic_sampling_max_gen_batches" in left_out(done, "idle")
        return
    on, most, times = expected
    size = "-" if times is None else int(done.settings["rollout_batch_size"] * times)
    assert sampling(done) == (on, most, size)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
         "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=96", (True, 10, 96)),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=0", (True, None, "-")),
        ("algorithm.filter_groups.enable=False algorithm.filter_groups.metric=acc data.gen_batch_size=96", None),
    ],
)  # fmt: skip
def test_of_verl(tmp_path, options, expected):
    done = loaded(test_verl.converted(tmp_path, f"model_engine=megatron {options}"), tmp_path)
    assert sampling(done) == (expected or ("-", "-", "-"))
    if expected is None:
        keys = {"algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "data.gen_batch_size"}
        assert keys <= set(left_out(done, "idle"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (f"{FILTER} slime.a.check_reward_nonzero_std --over-sampling-batch-size 64", (True, None, 64)),
        (f"{FILTER} slime.a.check_reward_nonzero_std", (True, None, "-")),
        (f"{FILTER} my.own_filter --over-sampling-batch-size 64", None),
    ],
)
def test_of_slime(tmp_path, options, expected):
    done = loaded(test_slime.converted(tmp_path, f"--n-samples-per-prompt 8 {options}"), tmp_path)
    assert sampling(done) == (expected or ("-", "-", "-"))
    if expected is None:
        assert "own_filter" in left_out(done, "refused")[FILTER]
        assert "--over-sampling-batch-size" in left_out(done, "idle")
