"""Keys of uneven pipelines in a job: refused before anything starts, by key, and inherited by roles as one."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import ConfigFileError, JobConfig, config_from_dict
from roll_batching.jobs.config.layout_rules import differing_keys, samples_apart
from tests.jobs.config.jobs import changed

pytestmark = pytest.mark.config

TRAIN = "actor_train.strategy_args.strategy_config"
REFERENCE = "reference.strategy_args.strategy_config"
SAMPLING = "actor_infer.strategy_args.strategy_config"
PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"


def job(layers: int = 4, role: str = TRAIN, **keys: Any) -> JobConfig:
    changes = {f"{role}.{key}": value for key, value in keys.items()}
    return config_from_dict(changed({"actor_train.model_args.architecture.num_layers": layers, **changes}))


def split(config: JobConfig, role: str = "actor_train") -> Any:
    part = getattr(config, role)
    return part.strategy_args.strategy_config.chunk_layers(part.model_args.architecture.num_layers)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({FIRST: 1}, FIRST, "pipeline_model_parallel_size is 1; leave it out"),
    ({LAYOUT: "Et*4L"}, LAYOUT, "pipeline_model_parallel_size is 1"),
    ({PP: 2, FIRST: 4}, FIRST, "leave 0 for 1 other stages; they need a multiple of 1, at least 1"),
    ({PP: 2, FIRST: 9}, FIRST, "leave -5 for 1 other stages"),
    ({PP: 2, FIRST: 1, LAST: 2}, FIRST, "leave 1 for 0 other stages; they need 0: the sum of both keys"),
    ({PP: 4, FIRST: 1, "layers": 6}, FIRST, "leave 5 for 3 other stages; they need a multiple of 3"),
    ({PP: 2, VPP: 2, FIRST: 1, "layers": 5}, FIRST, "is 1, which does not divide into VPP = 2 chunks"),
    ({PP: 2, VPP: 2, FIRST: 2, LAST: 2}, LAST, "fails in Megatron together with"),
    ({PP: 4, VPP: 2, LAST: 2, "layers": 12}, LAST, "leave 10 for 3 other stages of 2 chunks"),
    ({PP: 2, FIRST: 1, LOSS: True}, FIRST, f"excludes {LOSS}"),
    ({PP: 2, LOSS: True}, LOSS, "4 layers and 1 of these keys are 5, which do not divide into PP x VPP = 2"),
    ({PP: 2, VPP: 2, EMBEDDING: True, LOSS: True}, EMBEDDING, "are 6, which do not divide into PP x VPP = 4"),
    ({PP: 2, LAYOUT: "Et|ttL"}, LAYOUT, "has 3 decoder layers, and the model 4; write 4"),
    ({PP: 2, LAYOUT: "Et|t|ttL"}, LAYOUT, "has 3 chunks, which do not divide among PP = 2"),
    ({PP: 2, VPP: 4, LAYOUT: "Et|t|t|tL"}, VPP, "is 4, and pipeline_model_parallel_layout has 4 chunks on 2 stages"),
    ({PP: 2, VPP: 2, LAYOUT: "Et|tttL"}, VPP, "is 2, and pipeline_model_parallel_layout has 2 chunks"),
    ({PP: 2, LAYOUT: "Et||ttt|L"}, LAYOUT, "leaves chunk 1 \\(stage 1\\) without any layer"),
    ({PP: 2, LAYOUT: "Et|tttL", FIRST: 1}, FIRST, f"excludes {LAYOUT}"),
    ({PP: 2, LAYOUT: "Et|tttL", EMBEDDING: True}, EMBEDDING, f"excludes {LAYOUT}"),
    ({PP: 2, LAYOUT: "Et|xL"}, LAYOUT, "has 'x' at a place where Megatron reads"),
    ({PP: 2, LAYOUT: "Ettt|m|tL"}, LAYOUT, "multi-token prediction"),
    ({PP: 2, LAYOUT: [["embedding"], 5]}, LAYOUT, "list"),
    ({PP: 2, FIRST: 0}, FIRST, "greater than or equal to 1|at least 1"),
    ({PP: 2, LAST: float("nan")}, LAST, "integer|number"),
    ({PP: 2, LOSS: "perhaps"}, LOSS, "true or false|boolean"),
]


@pytest.mark.parametrize(("keys", "blamed", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_its_key(keys: dict[str, Any], blamed: str, message: str) -> None:
    with pytest.raises(ConfigFileError, match=message) as error:
        job(**keys)
    assert f"{TRAIN}.{blamed}" in str(error.value)


def test_layers_that_do_not_divide_name_the_keys_that_help() -> None:
    with pytest.raises(ConfigFileError, match="do not divide into PP x VPP = 4 .*num_layers_in_first_pipeline_stage"):
        job(layers=6, **{PP: 4})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({PP: 2, FIRST: 1}, ((1,), (3,))),
        ({PP: 4, FIRST: 1, LAST: 3, "layers": 8}, ((1,), (2,), (2,), (3,))),
        ({PP: 2, VPP: 2, LAST: 4, "layers": 6}, ((1, 1), (2, 2))),
        ({PP: 2, EMBEDDING: True, LOSS: True}, ((2,), (2,))),
        ({PP: 4, LOSS: True, "layers": 7}, ((2,), (2,), (2,), (1,))),
        ({PP: 2, VPP: 2, EMBEDDING: True, LOSS: True, "layers": 6}, ((1, 2), (2, 1))),
        ({PP: 2, LAYOUT: "E|t|ttt|L"}, ((0, 3), (1, 0))),
        ({EMBEDDING: True, LOSS: True}, ((4,),)),
    ],
)
def test_layers_by_stage_and_chunk(keys: dict[str, Any], expected: Any) -> None:
    assert split(job(**keys)) == expected


def test_roles_take_a_split_as_one_and_with_its_pipeline_only() -> None:
    uneven = {f"{TRAIN}.{PP}": 2, f"{TRAIN}.{FIRST}": 1}
    same = config_from_dict(changed(uneven))
    assert split(same, "reference") == ((1,), (3,)) and not differing_keys(same.reference, same.actor_train)
    alone = config_from_dict(changed({**uneven, f"{REFERENCE}.{PP}": 1}))
    assert split(alone, "reference") == ((4,),) and PP in differing_keys(alone.reference, alone.actor_train)
    other = config_from_dict(changed({**uneven, f"{REFERENCE}.{LAST}": 2}))
    assert split(other, "reference") == ((2,), (2,))
    assert differing_keys(other.reference, other.actor_train) == [FIRST, LAST]
    none = config_from_dict(changed({**uneven, f"{REFERENCE}.{FIRST}": None}))
    assert split(none, "reference") == ((2,), (2,)) and differing_keys(none.reference, none.actor_train) == [FIRST]
    text = config_from_dict(changed({f"{TRAIN}.{PP}": 2, f"{TRAIN}.{LAYOUT}": "Et|t|t|tL", f"{SAMPLING}.{VPP}": 1}))
    assert split(text, "reference") == ((1, 1), (1, 1)) and split(text, "actor_infer") == ((2,), (2,))
    assert not differing_keys(text.reference, text.actor_train)


def test_rollouts_default_to_sizes_that_sample() -> None:
    """Without interleaving and context parallelism, unless actor_infer names sizes itself."""
    layout = {f"{TRAIN}.{PP}": 2, f"{TRAIN}.{LAYOUT}": "Et|t|t|tL"}
    job = config_from_dict(changed(layout))
    assert split(job, "actor_infer") == ((2,), (2,)) and samples_apart(job)
    job = config_from_dict(changed({f"{TRAIN}.context_parallel_size": 2}))
    assert job.actor_infer.strategy_args.strategy_config.context_parallel_size == 1 and samples_apart(job)
    assert not samples_apart(config_from_dict(changed({f"{TRAIN}.{PP}": 2})))  # a pipeline samples by itself
    with pytest.raises(ConfigFileError, match=f"{VPP}: is 2, and models sample only with 1"):
        config_from_dict(changed({**layout, f"{SAMPLING}.tensor_model_parallel_size": 2, f"{SAMPLING}.{VPP}": 2}))
