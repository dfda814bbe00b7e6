"""Devices, and what the planner is asked to do."""

from __future__ import annotations

import pytest

from roll_batching.errors import ConfigError, LayoutError, PlanError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.devices import parse_devices
from roll_batching.planning import BatchingSpec, ParallelDims, PlanConstraints
from roll_batching.settings import BatchingConfig


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


def test_a_batching_and_a_layout_make_constraints_that_give_both_back():
    packed = BatchingSpec(max_tokens=64, sequence_multiple="2*cp*tp", oversize="drop")
    dims = ParallelDims(dp_size=4, cp_size=2, tp_size=2, ep_size=4, etp_size=1, fully_sharded=True)
    constraints = PlanConstraints.of(dims, packed, pack_multiple=16)
    assert (constraints.dims, constraints.batching, constraints.pack_multiple) == (dims, packed, 16)
    assert constraints == PlanConstraints(
        dp_size=4, cp_size=2, tp_size=2, ep_size=4, etp_size=1, fully_sharded=True,
        max_tokens=64, sequence_multiple="2*cp*tp", oversize="drop", pack_multiple=16,
    )  # fmt: skip
    pipeline = ParallelDims(pp_size=2, vpp_size=2)
    assert PlanConstraints.of(pipeline, BatchingSpec(mode="dynamic", max_tokens=64), group_size=3).group_size == 3


@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_a_mode_brings_its_own_default_algorithm(mode):
    spec = BatchingSpec(mode=mode, max_tokens=8)
    assert spec.algorithm == {"packed": "load_balance", "dynamic": "roll", "padded": "none"}[mode]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": None}, "needs max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer, at least 1"),
        ({"mode": "dynamic", "max_tokens": 8, "algorithm": "load_balance"}, "does not exist in mode 'dynamic'"),
        ({"mode": "padded"}, "needs rows"),
        ({"mode": "folded"}, "it must be one of packed, dynamic, padded"),
        ({"max_tokens": 8, "oversize": "bogus"}, "oversize is 'bogus'; it must be one of error, alone"),
        ({"max_tokens": 8, "objective": "bogus"}, "objective is 'bogus'; it must be one of auto"),
        ({"max_tokens": 8, "sequence_multiple": "bogus"}, "sequence_multiple is 'bogus'; it must be .*2.cp.tp"),
        ({"max_tokens": 8, "sequence_multiple": 0}, "sequence_multiple is 0; it must be"),
        ({"max_tokens": "8"}, "max_tokens is '8'; it must be an integer"),
        ({"max_tokens": 8.5}, "max_tokens is 8.5; it must be an integer"),
        ({"max_tokens": True}, "max_tokens is True; it must be an integer"),
        (
            {"mode": "dynamic", "max_tokens": 8, "algorithm": "prefer_first", "shared_shapes": True},
            "'roll' or 'nemo_rl'",
        ),
    ],
)
def test_inconsistent_batchings_are_refused(values, words):
    with pytest.raises(PlanError, match=words):
        BatchingSpec(**values)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 0}, "tp_size is 0; it must be an integer"),
        ({"vpp_size": 2}, "vpp_size=2 needs pp_size"),
        ({"dp_size": 4, "ep_size": 3}, "ep_size=3 does not divide dp_size x cp_size = 4"),
    ],
)
def test_sizes_that_no_world_has_are_refused(sizes, words):
    with pytest.raises(LayoutError, match=words):
        ParallelDims(**sizes)
    with pytest.raises(PlanError, match=words):
        PlanConstraints(**({"dp_size": 1} | sizes), max_tokens=8)


def test_a_layout_of_a_world():
    dims = ParallelDims.of_world(16, tp_size=2, pp_size=2, ep_size=4)
    assert (dims.dp_size, dims.world_size, dims.etp_size) == (4, 16, 2)
    assert str(dims) == "dp 4 x tp 2 x pp 2 x ep 4" and str(ParallelDims()) == "one rank"
    assert ParallelDims(**dims.to_dict()) == dims
    with pytest.raises(LayoutError, match="6 processes cannot be divided into replicas of 4"):
        ParallelDims.of_world(6, tp_size=2, pp_size=2)


def test_logprob_plan_is_checked():
    one = BatchingSpec(max_tokens=8)
    with pytest.raises(ConfigError, match="choose one of train, own, rollout, none"):
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


@pytest.mark.parametrize(
    ("mode", "names"),
    [("packed", ("none", "load_balance", "my_packers:mine")), ("dynamic", ("prefer_first", "my_packers.of:mine"))],
)
def test_an_algorithm_is_a_registered_name_or_a_dotted_path_that_is_not_yet_loaded(mode, names):
    for name in names:
        role = {
            "packed": {
                "use_sequence_packing": True,
                "sequence_packing_args": {"max_packed_sequence_length_train": 64, "algorithm": name},
            },
            "dynamic": {
                "use_dynamic_batching": True,
                "max_tokens_per_microbatch_in_train": 64,
                "max_tokens_per_microbatch_in_infer": 64,
                "planning_args": {"dynamic_algorithm": name},
            },
        }[mode]
        batching = config_from_dict({"actor_train": role}).actor_train.batching()
        assert batching.train.algorithm == batching.infer.algorithm == name


@pytest.mark.parametrize(("written", "length"), [(None, 96), ("longest", None), (48, 48)])
def test_padded_length(written, length):
    data = {"prompt_length": 32, "response_length": 64, "actor_train": {"padded_length": written}}
    padded = config_from_dict(data).actor_train.batching().train
    assert (padded.mode, padded.padded_length) == ("padded", length)


def test_packing_switched_off_by_an_override_is_padded():
    from roll_batching.jobs.config import load_config

    config = load_config("configs/demo_grpo.yaml", ["actor_train.use_sequence_packing=false"])
    assert config.actor_train.batching().train.mode == "padded"
    assert [notice.path for notice in config.notices] == ["actor_train.sequence_packing_args"]


# ---- TRL's token_budget


def test_a_token_budget_packs_softly_up_to_it():
    """TRL's cap: rows stay within the budget, and a longer sample is alone. 0 and less leave batching as it is."""
    for budget in (0, -1):
        assert config_from_dict({"token_budget": budget}).actor_train.mode_of("train") == "padded"
        capped = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": 7}}
        assert (
            config_from_dict({"token_budget": budget, "actor_train": capped}).actor_train.planning_args.oversize
            == "error"
        )
    job = config_from_dict({"token_budget": 8192})
    spec = job.actor_train.batching().train
    assert (spec.mode, spec.max_tokens, spec.oversize) == ("packed", 8192, "alone") and not job.notices
    assert config_from_dict(job.to_dict()).actor_train == job.actor_train, "a run's own file loads again"
    own = {"planning_args": {"oversize": "error"}, "sequence_packing_args": {"algorithm": "none"}}
    kept = config_from_dict({"token_budget": 8192, "actor_train": own}).actor_train.batching().train
    assert (kept.oversize, kept.algorithm, kept.max_tokens) == ("error", "none", 8192)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"actor_train": {"use_sequence_packing": False}}, "use_sequence_packing is false"),
        ({"actor_train": {"sequence_packing_args": {"max_packed_sequence_length_train": 9}}}, "_train is 9: both are"),
        ({"actor_train": {"use_dynamic_batching": True, "max_tokens_per_microbatch_in_train": 64}}, "exclude each"),
        (
            {"task": "sft", "train": {"max_num_steps": 1, "train_policy": {"enable_dp_load_balancing": True}}},
            "the section train forms its own batches",
        ),
        ({"token_budget": 1.5}, "token_budget: expected a whole number"),
    ],
)
def test_a_token_budget_beside_another_limit_is_refused(theirs, words):
    with pytest.raises(ConfigError, match=words):
        config_from_dict({"token_budget": 64, **theirs})
