"""Caps for passes without gradient are used for old log-probs where they are set, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll_batching.jobs.config import config_from_dict, load_config
from tests.jobs.config.jobs import changed

DATA = Path(__file__).parent / "data"
PACKING = "actor_train.sequence_packing_args"
FORWARD = f"{PACKING}.max_packed_sequence_length_forward"
INFER = "actor_train.max_tokens_per_microbatch_in_infer"
DYNAMIC = {
    "actor_train.use_sequence_packing": False,
    "actor_train.use_dynamic_batching_in_train": True,
    "actor_train.use_dynamic_batching_in_infer": True,
    "actor_train.max_tokens_per_microbatch_in_train": 64,
}
PADDED = {"actor_train.use_sequence_packing": False, "actor_train.training_args.per_device_train_batch_size": 2}
AHEAD = {"async_generation_ratio": 1}
CORRECTED = AHEAD | {"loss_args": {"engine_ratio_cap": 2.0}}

SEPARATE = {
    FORWARD: {FORWARD: 4096},
    f"{PACKING}.min_num_micro_batches_forward": {f"{PACKING}.min_num_micro_batches_forward": 2},
    INFER: DYNAMIC | {INFER: 128},
    "actor_train.sequence_length_round_in_infer": DYNAMIC | {"actor_train.sequence_length_round_in_infer": 16},
    "actor_train.infer_batch_size": PADDED | {"actor_train.infer_batch_size": 8},
    "actor_train.use_dynamic_batching_in_infer": PADDED
    | {"actor_train.use_dynamic_batching_in_infer": True, INFER: 64},
}
SHARED = {
    "no cap of its own": {},
    "the same cap": {FORWARD: 1024},
    "no cap of dynamic batching": DYNAMIC,
    "the same cap of dynamic batching": DYNAMIC | {INFER: 64},
    "as many rows": PADDED | {"actor_train.infer_batch_size": 2},
    "the default number of rows": PADDED,
    "a cap that no pass reads": {INFER: 128},
    "a cap of the reference": {"reference.sequence_packing_args": {"max_packed_sequence_length_forward": 4096}},
}


def plan_of(changes):
    return config_from_dict(changed(changes)).actor_train.batching().logprob_plan


@pytest.mark.parametrize("key", SEPARATE)
def test_a_cap_of_its_own_is_used(key):
    config = config_from_dict(changed(SEPARATE[key]))
    assert config.actor_train.batching().logprob_plan == config.actor_train.logprob_plan == "own"
    (notice,) = [notice for notice in config.notices if notice.path == key]
    assert "logprob_plan: train" in notice.text and "no effect" not in notice.text
    again = config_from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict())))
    assert again.actor_train == config.actor_train


@pytest.mark.parametrize("case", SHARED)
def test_without_one_the_first_ratio_stays_exact(case):
    assert plan_of(SHARED[case]) == "train"


def test_what_is_asked_for_holds():
    for plan in ("train", "rollout"):
        config = config_from_dict(changed({FORWARD: 4096, "actor_train.logprob_plan": plan}))
        assert config.actor_train.logprob_plan == plan
        assert any(notice.path == FORWARD and "has no effect" in notice.text for notice in config.notices)


def test_rollouts_ahead_of_training_and_texts_keep_their_own_rule():
    assert plan_of(AHEAD | {FORWARD: 4096}) == "rollout"
    assert (plan_of(CORRECTED), plan_of(CORRECTED | {FORWARD: 4096})) == ("train", "own")
    assert plan_of({"task": "sft", "reference": None, FORWARD: 4096}) == "none"


def test_a_role_without_a_job_follows_the_same_rule():
    role = config_from_dict(changed({})).actor_train
    given = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": 64}}
    assert type(role).model_validate(given).batching().logprob_plan == "train"
    given["sequence_packing_args"]["max_packed_sequence_length_forward"] = 128
    assert type(role).model_validate(given).batching().logprob_plan == "own"


def test_the_caps_of_rolls_documents_have_an_effect():
    config = load_config(DATA / "roll_dynamic_batching.yaml")
    assert config.actor_train.batching().logprob_plan == "own"
    idle = {notice.path for notice in config.notices if "no effect" in notice.text}
    assert not idle & {INFER, "actor_train.use_dynamic_batching_in_infer", "actor_train.sequence_length_round_in_infer"}
    assert load_config(DATA / "roll_sequence_packing.yaml").actor_train.logprob_plan == "train", "equal caps"
