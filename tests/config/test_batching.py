"""Devices, and what the planner is asked to do."""

from __future__ import annotations

import pytest

from roll_batching.config import BatchingConfig, PassBatching, config_from_dict
from roll_batching.config.batching import ALGORITHMS
from roll_batching.config.devices import parse_devices
from roll_batching.errors import ConfigError
from roll_batching.planning import PlanConstraints
from roll_batching.planning import constraints as planning_constraints


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("list(range(0,8))", list(range(8))),
        ("list(range(8))", list(range(8))),
        ("range(2, 8, 3)", [2, 5]),
        ("list(range(0,2)) + list(range(4,6))", [0, 1, 4, 5]),
        ("0-3", [0, 1, 2, 3]),
        ("0-1, 4", [0, 1, 4]),
        ("[0, 3]", [0, 3]),
        ([1, 2], [1, 2]),
        (3, [3]),
    ],
)
def test_device_mapping(written, devices):
    assert parse_devices(written) == devices


@pytest.mark.parametrize(
    "written",
    [
        "__import__('os').getcwd()",
        "list(range(x))",
        "range(0, 8, 0)",
        "[0, 0]",
        [-1],
        "list()",
        [],
        True,
        [1.5],
        "eight",
    ],
)
def test_device_mapping_runs_no_code_and_refuses_the_rest(written):
    with pytest.raises(ValueError):
        parse_devices(written)


def test_modes_reach_the_planner():
    packed = PassBatching(max_tokens=64, sequence_multiple="2*cp*tp", oversize="drop")
    constraints = packed.constraints(dp_size=2, tp_size=2, cp_size=2, sequence_parallel=True, pack_multiple=16)
    assert isinstance(constraints, PlanConstraints)
    assert (constraints.mode, constraints.max_tokens, constraints.oversize) == ("packed", 64, "drop")
    assert constraints.sequence_multiple == "2*cp*tp" and constraints.pack_multiple == 16
    experts = packed.constraints(dp_size=4, cp_size=2, tp_size=2, ep_size=4, etp_size=1, fully_sharded=True)
    assert (experts.ep_size, experts.etp_size, experts.fully_sharded) == (4, 1, True)
    dynamic = PassBatching(mode="dynamic", max_tokens=64, algorithm="roll", sequence_length_round=8)
    assert dynamic.constraints(dp_size=1, pp_size=2, vpp_size=2, group_size=3).group_size == 3
    padded = PassBatching(mode="padded", algorithm="none", rows=4, padded_length=32)
    assert padded.constraints(dp_size=1).padded_length == 32


def test_the_algorithms_are_the_planners():
    assert {mode: set(names) for mode, names in ALGORITHMS.items()} == {
        mode: set(names) for mode, names in planning_constraints.ALGORITHMS.items()
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": None}, "needs max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"mode": "dynamic", "max_tokens": 8}, "does not exist in dynamic mode"),
        ({"mode": "padded", "algorithm": "none"}, "needs rows"),
        ({"mode": "folded"}, "unknown"),
        ({"max_tokens": 8, "oversize": "bogus"}, "oversize 'bogus' is unknown; choose one of error, alone"),
        ({"max_tokens": 8, "objective": "bogus"}, "objective 'bogus' is unknown; choose one of auto"),
        ({"max_tokens": 8, "sequence_multiple": "bogus"}, "sequence_multiple 'bogus' is unknown"),
        ({"max_tokens": 8, "sequence_multiple": 0}, "sequence_multiple is 0"),
        ({"max_tokens": "8"}, "max_tokens is '8'; it must be a whole number"),
        ({"max_tokens": 8.5}, "max_tokens is 8.5; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
    ],
)
def test_inconsistent_passes_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        PassBatching(**values)


def test_logprob_plan_is_checked():
    one = PassBatching(max_tokens=8)
    with pytest.raises(ConfigError, match="choose train, own or none"):
        BatchingConfig(train=one, infer=one, logprob_plan="both")


def test_the_short_form_sets_both_passes():
    role = {
        "use_dynamic_batching": True,
        "max_tokens_per_microbatch_in_train": 64,
        "max_tokens_per_microbatch_in_infer": 128,
    }
    batching = config_from_dict({"actor_train": role}).actor_train.batching()
    assert (batching.train.mode, batching.infer.mode) == ("dynamic", "dynamic")
    assert (batching.train.max_tokens, batching.infer.max_tokens) == (64, 128)


def test_passes_have_caps_of_their_own():
    packing = {
        "max_packed_sequence_length_train": 64,
        "max_packed_sequence_length_forward": 256,
        "min_num_micro_batches_train": 2,
        "min_num_micro_batches_forward": 3,
    }
    role = {"use_sequence_packing": True, "sequence_packing_args": packing, "logprob_plan": "own"}
    batching = config_from_dict({"actor_train": role}).actor_train.batching()
    assert (batching.train.max_tokens, batching.infer.max_tokens) == (64, 256)
    assert (batching.train.min_num_micro_batches, batching.infer.min_num_micro_batches) == (2, 3)
    del packing["max_packed_sequence_length_forward"]
    assert config_from_dict({"actor_train": role}).actor_train.batching().infer.max_tokens == 64


@pytest.mark.parametrize(("written", "length"), [(None, 96), ("longest", None), (48, 48)])
def test_padded_length(written, length):
    data = {"prompt_length": 32, "response_length": 64, "actor_train": {"padded_length": written}}
    padded = config_from_dict(data).actor_train.batching().train
    assert (padded.mode, padded.padded_length) == ("padded", length)


def test_packing_switched_off_by_an_override_is_padded():
    from roll_batching.config import load_config

    config = load_config("configs/demo_grpo.yaml", ["actor_train.use_sequence_packing=false"])
    assert config.actor_train.batching().train.mode == "padded"
    assert [notice.path for notice in config.notices] == ["actor_train.sequence_packing_args"]
