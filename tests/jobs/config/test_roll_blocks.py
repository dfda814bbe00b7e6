"""The two YAML blocks that ROLL's documents print load unchanged, and every key of them is accounted for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll_batching.jobs.config import ConfigFileError, load_config
from roll_batching.jobs.config.foreign_keys import Verdict, given_foreign_keys
from roll_batching.jobs.config.key_paths import field_at, given_keys

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
BLOCKS = ["roll_dynamic_batching", "roll_sequence_packing"]

# What a key of the blocks becomes in the loaded configuration.
EXPECTED = {
    "actor_train.training_args.learning_rate": lambda c: c.actor_train.training_args.learning_rate == 1e-6,
    "actor_train.training_args.weight_decay": lambda c: c.actor_train.training_args.weight_decay == 0,
    "actor_train.training_args.warmup_steps": lambda c: c.actor_train.training_args.warmup_steps == 10,
    "actor_train.training_args.lr_scheduler_type": lambda c: c.actor_train.training_args.lr_scheduler_type == "cosine",
    "actor_train.training_args.per_device_train_batch_size": lambda c: c.mini_batch_size(8) == 2 * 64 * 8,
    "actor_train.training_args.gradient_accumulation_steps": lambda c: c.mini_batch_size(8) == 2 * 64 * 8,
    "actor_train.device_mapping": lambda c: c.world_size == 8,
    "actor_train.max_tokens_per_microbatch_in_train": lambda c: c.actor_train.batching().train.max_tokens in (8192,),
    "actor_train.use_dynamic_batching_in_train": lambda c: c.actor_train.batching().train.mode == "dynamic",
    "actor_train.sequence_length_round_in_train": lambda c: c.actor_train.batching().train.sequence_length_round == 128,
    "actor_train.max_tokens_per_microbatch_in_infer": lambda c: c.actor_train.batching().infer.max_tokens == 16384,
    "reference.max_tokens_per_microbatch_in_infer": lambda c: c.reference.batching().infer.max_tokens == 16384,
    "reference.strategy_args.strategy_config": lambda c: (
        c.reference.strategy_args.strategy_config == c.actor_train.strategy_args.strategy_config
    ),
    "actor_infer.generating_args.max_new_tokens": lambda c: c.response_length == 128,
    "actor_infer.generating_args.top_k": lambda c: c.actor_infer.generating_args.top_k == 100,
    "actor_infer.generating_args.num_return_sequences": lambda c: c.group_size == 1,
    "actor_train.use_sequence_packing": lambda c: c.actor_train.batching().train.mode == "packed",
    "actor_train.sequence_packing_args.algorithm": lambda c: c.actor_train.batching().train.algorithm == "load_balance",
    "actor_train.sequence_packing_args.max_packed_sequence_length_train": lambda c: (
        c.actor_train.batching().train.max_tokens == 8192
    ),
    "actor_train.sequence_packing_args.max_packed_sequence_length_forward": lambda c: (
        c.actor_train.batching().infer.max_tokens == 8192
    ),
}


@pytest.mark.config
@pytest.mark.parametrize("block", BLOCKS)
def test_every_key_has_its_effect_or_a_notice(block, report):
    config = load_config(DATA / f"{block}.yaml")
    notices = {notice.path: notice for notice in config.notices}
    keys = [
        (".".join(map(str, path)), value)
        for path, value in given_keys(yaml.safe_load((DATA / f"{block}.yaml").read_text()))
    ]
    assert len(keys) > 5
    foreign = {given.path: given for given in given_foreign_keys(yaml.safe_load((DATA / f"{block}.yaml").read_text()))}
    for path, value in keys:
        if path in notices:
            assert notices[path].line is not None and len(notices[path].text) > 20
            report(f"{block} {path}: notice (line {notices[path].line}): {notices[path].text}")
            continue
        parts = tuple(path.split("."))
        if "system_envs" in parts:
            assert config.environment()[parts[-1]] == value
            report(f"{block} {path}: set in the workers' environment")
            continue
        if parts in foreign:
            key = foreign[parts].key
            assert key.verdict is Verdict.REFUSED, f"{path} has no effect and no notice"
            assert not key.refuses(value)
            report(f"{block} {path}: {value!r} is what happens ({key.reason})")
            continue
        field = field_at(parts)
        assert field is not None, path
        if path in EXPECTED:
            assert EXPECTED[path](config), path
        report(f"{block} {path}: read: {field.description}")
    assert {path for path, _ in keys} & EXPECTED.keys()


@pytest.mark.config
def test_notices_name_what_happens_instead(report):
    config = load_config(DATA / "roll_dynamic_batching.yaml")
    notices = {notice.path: notice for notice in config.notices}
    assert "Megatron model itself" in notices["actor_infer.strategy_args.strategy_name"].text
    memory = notices["actor_infer.strategy_args.strategy_config.gpu_memory_utilization"]
    assert "vllm" in memory.text and memory.line == 53
    flash = notices["actor_train.system_envs.NVTE_FLASH_ATTN"]
    assert "TransformerEngine" in flash.text and flash.line == 4
    assert config.environment()["NVTE_FLASH_ATTN"] == "1"
    report("notices carry the line of their key")


def test_the_reference_takes_the_layout_of_actor_train():
    changes = ["actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2"]
    config = load_config(DATA / "roll_dynamic_batching.yaml", changes)
    assert config.reference.strategy_args.strategy_config.tensor_model_parallel_size == 2
    assert config.dp_size(8) == 4


def test_the_reference_may_have_a_layout_of_its_own():
    train, own = (f"{role}.strategy_args.strategy_config" for role in ("actor_train", "reference"))
    changes = [f"{train}.{key}=2" for key in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")]
    config = load_config(DATA / "roll_dynamic_batching.yaml", [*changes, f"{own}.pipeline_model_parallel_size=1"])
    layout = config.reference.strategy_args.strategy_config
    assert (layout.pipeline_model_parallel_size, layout.vpp_size) == (1, 1)  # chunks are of actor_train's pipeline
    config = load_config(DATA / "roll_dynamic_batching.yaml", [f"{own}.context_parallel_size=4"])
    assert config.dp_size(8) == 8
    with pytest.raises(ConfigFileError, match="reference.strategy_args.strategy_config: 6 processes do not divide"):
        config.dp_size(6)


OBSTACLES = {
    "`rewards`": (["rewards={judge: {worker_cls: LLMJudgeRewardWorker}}"], "worker_cls: unknown key"),
    "`reference`": (["reference.device_mapping=0-7"], "reference.device_mapping"),
    "`stop_strings`": (["actor_infer.generating_args.stop_strings=[x]"], "end token"),
}
"""What docs/roll.md says is left out of ROLL's files, and what the loader says of it."""


@pytest.mark.config
def test_the_page_for_people_from_roll_says_what_is_left_out():
    page = (ROOT / "docs" / "roll.md").read_text()
    chapter = page.split("\n## Convert ROLL's files")[1].split("\n## ")[0]
    obstacles = [line for line in chapter.splitlines() if line.startswith("| ")][1:]
    named = {name: line for line in obstacles for name in OBSTACLES if name in line}
    assert named.keys() == OBSTACLES.keys()
    for changes, words in OBSTACLES.values():
        with pytest.raises(ConfigFileError, match=re.escape(words)):
            load_config(ROOT / "configs" / "demo_grpo.yaml", changes)


@pytest.mark.config
def test_no_notice_promises_fusions():
    change = "actor_train.strategy_args.strategy_config.bias_activation_fusion=true"
    with pytest.raises(ConfigFileError, match="has no effect: .*fused on CUDA and not on the CPU.*leave it out"):
        load_config(ROOT / "configs" / "demo_grpo.yaml", [change])


@pytest.mark.config
@pytest.mark.parametrize("key", ["transformer_impl", "attention_backend"])
def test_variables_of_transformer_engine_have_a_notice_where_nobody_reads_them(key):
    changes = ["system_envs.NVTE_FLASH_ATTN=1"]
    (notice,) = load_config(ROOT / "configs" / "demo_grpo.yaml", changes).notices
    assert notice.path == "system_envs.NVTE_FLASH_ATTN" and "not used here" in notice.text
    changes.append(f"actor_train.strategy_args.strategy_config.{key}=transformer_engine")
    assert not load_config(ROOT / "configs" / "demo_grpo.yaml", changes).notices


@pytest.mark.config
def test_roles_of_one_job_have_the_same_layers():
    where = "strategy_args.strategy_config.transformer_impl"
    changes = ["reference={}", f"actor_train.{where}=transformer_engine"]
    config = load_config(ROOT / "configs" / "demo_grpo.yaml", changes)
    assert config.reference.strategy_args.strategy_config.transformer_impl == "transformer_engine"
    with pytest.raises(ConfigFileError, match="is local, but transformer_engine in actor_train, whose weights"):
        load_config(ROOT / "configs" / "demo_grpo.yaml", [*changes, f"reference.{where}=local"])
