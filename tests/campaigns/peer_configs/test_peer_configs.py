"""The counter of peers' files: a job starts exactly if its own start-up checks pass."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.huggingface.families import FAMILIES, IN_MODULES
from roll_batching.settings.model import describe_model
from tests.campaigns.peer_configs import jobs
from tests.support.ranks import ROOT
from tests.tools.conversion.test_nemo_rl_defaults import converted, file_of


def test_the_models_are_what_their_families_are(tmp_path):
    models = jobs.PeerModels(tmp_path)
    for name, config in jobs.FACTS["configs"].items():
        found = describe_model(str(models.path(name)))
        assert found is not None
        assert bool(found.problems) == (config["model_type"] not in (*FAMILIES, *IN_MODULES)), (name, found.problems)
    assert models.path("Qwen/Qwen9-1B") is None
    same = models.path("/data/cpfs_0/common/models/Qwen2.5-7B")
    assert same == models.path("Qwen/Qwen2.5-7B")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "placeholder": ({"pretrain": "/path/to/model"}, "placeholder"),
    "unknown": ({"pretrain": "Qwen/Qwen9-1B"}, "unknown here: config.json of Qwen/Qwen9-1B"),
    "family": ({"pretrain": "google/gemma-4-31B-it"}, "model_type 'gemma4' is not supported"),
    "stages": ({"pipeline_model_parallel_size": 3}, "do not divide into PP x VPP"),
    "reward": ({"reward_function": None}, "reward_function: is missing"),
    "arguments": ({"reward_function": "code_tests", "reward_args": {}}, "reward_args.run"),
    "unwanted": ({"reward_args": {"before": "x"}}, "cannot be called with"),
    "tag": ({"rewards": {"math": {"reward_function": "math_verify", "tag_included": []}}}, "no reward is for its tag"),
    "domains": (
        {
            "rewards": {
                "math": {"reward_function": "math_verify", "tag_included": ["KodCode"]},
                "code": {"reward_function": "math_verify", "tag_included": ["other"]},
            },
            "file_name": "code_KodCode_data.jsonl",
            "domain_interleave_probs": {"math": 0.5, "code": 0.5},
        },
        "domain_interleave_probs draws from code",
    ),
    "template": ({"prompt_length": 3, "long_prompts": "error"}, "prompt_length"),
}


@pytest.mark.config
@pytest.mark.parametrize("case", CHANGES)
def test_a_file_starts_where_its_job_would(tmp_path, case):
    changes, reason = CHANGES[case]
    file = file_of("grpo")
    file["policy"]["model_name"] = file["policy"]["tokenizer"]["name"] = "Qwen/Qwen2.5-1.5B"
    file["policy"]["generation"]["backend"] = "megatron"
    settings = copy.deepcopy(converted(tmp_path, file).settings)
    strategy = settings["actor_train"].setdefault("strategy_args", {}).setdefault("strategy_config", {})
    for key, value in changes.items():
        if key == "pipeline_model_parallel_size":
            strategy[key] = value
        elif key in ("long_prompts", "file_name", "domain_interleave_probs"):
            settings["actor_train"]["data_args"][key] = value
        elif value is None:
            del settings[key]
        else:
            settings[key] = value
    if "rewards" in changes:
        del settings["reward_function"]
    before = copy.deepcopy(settings)
    stops = jobs.what_stops(settings, jobs.PeerModels(tmp_path / "models"), tmp_path)
    assert settings == before, "the settings that are counted stay as they are"
    assert (stops == []) if not reason else any(reason in one for one in stops), stops


def test_a_placeholder_stands_for_the_model_that_the_file_means(tmp_path):
    for one in jobs.FACTS["meant"]:
        assert one["why"] and one["model"] in jobs.FACTS["configs"], one
    swe = Path("examples/nemo_gym/grpo_qwen3_30ba3b_thinking_swe2.yaml")
    assert jobs.meant_model(swe) == "Qwen/Qwen3-30B-A3B-Thinking-2507"
    assert jobs.meant_model(Path("examples/configs/grpo_math_1B.yaml")) is None
    settings = {"pretrain": "/path/to/model", "tokenizer": {"name_or_path": "/path/to/model"}, "critic": {}}
    filled = jobs.with_model(settings, "Qwen/Qwen2.5-7B")
    assert jobs.model_names(filled) == {"Qwen/Qwen2.5-7B"} and settings["pretrain"] == "/path/to/model"
    assert jobs.with_model({}, "Qwen/Qwen2.5-7B") == {"pretrain": "Qwen/Qwen2.5-7B"}, "a model that is left open"
    other = {"pretrain": "/path/to/model", "critic": {"model_args": {"model_name_or_path": "Qwen/Qwen2.5-1.5B"}}}
    assert jobs.model_names(jobs.with_model(other, "Qwen/Qwen2.5-7B")) == {"Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B"}


def test_the_count_prints_nothing_that_its_reader_cannot_change(tmp_path):
    file = file_of("grpo")
    file["policy"]["model_name"] = file["policy"]["tokenizer"]["name"] = "Qwen/Qwen2.5-1.5B"
    file["policy"]["generation"]["backend"] = "megatron"
    file["policy"]["sequence_packing"] = {"enabled": True, "train_mb_tokens": 4096, "logprob_mb_tokens": 4096}
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "job.yaml").write_text(yaml.safe_dump(file))
    script = ROOT / "scripts" / "count_peer_configs.py"
    done = subprocess.run([sys.executable, script, "--nemo-rl", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "NeMo-RL: 1 files" in done.stdout, done.stdout + done.stderr
    assert "start once model and data are there" in done.stdout, done.stdout
    assert "Warning" not in done.stderr, done.stderr
