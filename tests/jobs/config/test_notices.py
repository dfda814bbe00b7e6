"""Keys that do nothing where they stand get a notice, and only those."""

from __future__ import annotations

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.key_paths import schema_keys
from roll_batching.settings.batching import PASSES_OF_ROLES, RoleBatching
from tests.jobs.config.jobs import changed


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"kl_loss_coef": 0.1}, "kl_loss_coef"),
        ({"pg_clip_low": 0.1}, "pg_clip_low"),
        ({"use_pg_clip_range": True, "pg_clip": 0.1}, "pg_clip"),
        ({}, "reference"),
        ({"actor_train.padded_length": 32}, "actor_train.padded_length"),
        ({"actor_train.infer_batch_size": 3, "actor_train.logprob_plan": "own"}, "actor_train.infer_batch_size"),
        ({"actor_train.sequence_length_round_in_train": 32}, "actor_train.sequence_length_round_in_train"),
        ({"actor_train.planning_args": {"shared_shapes": True}}, "actor_train.planning_args.shared_shapes"),
        (
            {"actor_train.sequence_packing_args.max_packed_sequence_length_forward": 2048},
            "actor_train.sequence_packing_args.max_packed_sequence_length_forward",
        ),
        (
            {"num_return_sequences_in_group": 8, "actor_infer.generating_args.num_return_sequences": 1},
            "actor_infer.generating_args.num_return_sequences",
        ),
        (
            {
                "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": 2,
                "actor_infer.generating_args.max_tokens_in_cache": 1 << 20,
            },
            "actor_infer.generating_args.max_tokens_in_cache",
        ),
        ({"reference.training_args": {"learning_rate": 1e-3}}, "reference.training_args.learning_rate"),
        ({"reference.data_args": {"file_name": "x"}}, "reference.data_args.file_name"),
        ({"actor_train.generating_args": {"top_k": 3}}, "actor_train.generating_args.top_k"),
        ({"reference.backend_timeout": 3}, "reference.backend_timeout"),
        ({"actor_infer.infer_batch_size": 3}, "actor_infer.infer_batch_size"),
        ({"reference.use_dynamic_batching_in_train": True}, "reference.use_dynamic_batching_in_train"),
        (
            {"reference.sequence_packing_args": {"min_num_micro_batches_train": 2}},
            "reference.sequence_packing_args.min_num_micro_batches_train",
        ),
        (
            {
                "reference.use_dynamic_batching_in_infer": True,
                "reference.max_tokens_per_microbatch_in_infer": 64,
                "reference.padded_length": 3,
            },
            "reference.padded_length",
        ),
        ({"reward_norm": "group"}, "reward_norm"),
        ({"reward_scale": True}, "reward_scale"),
        ({"difficulty_low_threshold": 0.2}, "difficulty_low_threshold"),
        (
            {"actor_train.strategy_args.strategy_config.sequence_parallel": True},
            "actor_train.strategy_args.strategy_config.sequence_parallel",
        ),
        ({"prompt_length": 1000, "response_length": 1000}, "actor_train.planning_args.oversize"),
    ],
)
def test_keys_without_effect_get_a_notice(changes, path):
    notices = {notice.path for notice in config_from_dict(changed(changes)).notices}
    assert path in notices


def test_a_key_that_is_not_given_or_has_effect_gets_no_notice():
    for changes in (
        {"actor_train.logprob_plan": "own"},
        {
            "actor_train.logprob_plan": "own",
            "actor_train.infer_batch_size": 3,
            "actor_train.use_sequence_packing": False,
            "actor_train.sequence_packing_args": None,
        },
    ):
        notices = {notice.path for notice in config_from_dict(changed(changes)).notices}
        assert "actor_train.infer_batch_size" not in notices, notices


MODES = {
    "packed": {
        "use_sequence_packing": True,
        "sequence_packing_args.max_packed_sequence_length_train": 64,
    },
    "dynamic": {
        "use_sequence_packing": False,
        "use_dynamic_batching_in_train": True,
        "use_dynamic_batching_in_infer": True,
        "max_tokens_per_microbatch_in_train": 64,
        "max_tokens_per_microbatch_in_infer": 128,
    },
    "padded": {"use_sequence_packing": False},
}
OTHER_VALUES = {
    "infer_batch_size": 5,
    "algorithm": "none",
    "max_packed_sequence_length_train": 96,
    "max_packed_sequence_length_forward": 96,
    "min_num_micro_batches_train": 3,
    "min_num_micro_batches_forward": 3,
    "max_tokens_per_microbatch_in_train": 96,
    "sequence_length_round_in_train": 8,
    "max_tokens_per_microbatch_in_infer": 96,
    "sequence_length_round_in_infer": 8,
    "padded_length": 77,
    "oversize": "drop",
    "objective": "lockstep",
    "dynamic_algorithm": "nemo_rl",
    "shared_shapes": True,
    "sequence_multiple": 16,
    "seed": 9,
    "share_prefixes": False,
    "pack_shapes": 4,
}
KEYS = {key.path[-1]: ".".join(key.path) for key in schema_keys(RoleBatching) if key.path[-1] in OTHER_VALUES}
SWITCHES = {
    "use_sequence_packing",
    "use_dynamic_batching",
    "use_dynamic_batching_in_train",
    "use_dynamic_batching_in_infer",
}


def test_no_batching_key_is_left_out_below():
    keys = {key.path[-1] for key in schema_keys(RoleBatching) if key.section is None}
    assert keys == set(OTHER_VALUES) | SWITCHES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", PASSES_OF_ROLES)
@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_batching_key_has_a_notice_exactly_where_it_changes_no_plan(role, mode, key):
    """What is declared of a key (roles, passes, mode) is true of the batching that comes of it."""
    base = {"actor_train.logprob_plan": "own"} | {f"{role}.{name}": value for name, value in MODES[mode].items()}
    path = f"{role}.{KEYS[key]}"
    before = config_from_dict(changed(base))
    after = config_from_dict(changed(base | {path: OTHER_VALUES[key]}))
    one, two = (getattr(config, role).batching() for config in (before, after))
    effect = any(getattr(one, kind) != getattr(two, kind) for kind in PASSES_OF_ROLES[role])
    effect |= bool(PASSES_OF_ROLES[role]) and one.share_prefixes != two.share_prefixes
    said = [n for n in after.notices if f"{path}.".startswith(f"{n.path}.") and "has no effect" in n.text]
    assert bool(said) != effect, [str(notice) for notice in after.notices]
