"""What NeMo-RL's files leave unsaid: its own defaults, of every field of its configuration classes.

The fields and their defaults are facts of the commit that `data/nemo_rl_defaults.json` names; scripts/peer_defaults.py
reads them from a checkout.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job import JobConfig
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from roll_batching.tools.conversion.nemo_rl_file import defaults_of

FACTS = json.loads((Path(__file__).parent / "data" / "nemo_rl_defaults.json").read_text())
SECTIONS = {
    "GRPOConfig": "grpo",
    "AsyncGRPOConfig": "grpo.async_grpo",
    "RewardScalingConfig": "grpo.reward_scaling",
    "RewardShapingConfig": "grpo.reward_shaping",
    "RewardPenaltyConfig": "reward_penalties",
    "AdvEstimatorConfig": "grpo.adv_estimator",
    "ClippedPGLossConfig": "loss_fn",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "AsyncRLConfig": "async_rl",
    "MasterConfig": "",
} | {f"{name}SamplerConfig": "async_rl.sampler" for name in ("Windowed", "ReadyFirst", "WeightFifo", "InOrder")}
"""Where a class's fields stand in a file; the rest are TypedDicts, whose defaults are those of `.get(FIELD, ...)`."""
QUEUES = {"min_groups_for_streaming_train", "max_inflight_prompts", "max_buffered_rollouts"}
"""Sizes of NeMo-RL's own queues, which have no counterpart."""
READ_WITHOUT_EFFECT = {
    "_v2",
    "defer_fsdp_grad_sync",
    "dp_replicate_size",
    "gradient_accumulation_fusion",
    "max_grad_norm",
    "model_save_format",
    "sequence_packing",
    "transformer_impl",
    "port_range_high",
    "port_range_low",
    "split",
    "use_tqdm",
}
"""Fields whose `.get` default changes nothing here: max_grad_norm is read there, and clips nothing, under Megatron."""
ABSENT_IN_REQUESTS = {"chat_template_kwargs", "stop_strings", "env_name", "http_server_serving_chat_kwargs"}
"""Fields whose name is also that of a key of requests to an engine, of which these defaults are."""

FILE: dict[str, Any] = {
    "policy": {
        "model_name": "models/small",
        "tokenizer": {"name": "models/small"},
        "train_global_batch_size": 64,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 512,
        "precision": "bfloat16",
        "max_grad_norm": 1.0,
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "activation_checkpointing": False},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6, "weight_decay": 0.1}},
        "sequence_packing": {"enabled": True, "train_mb_tokens": 1024, "algorithm": "first_fit_decreasing"},
        "generation": {"backend": "vllm", "max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0, "top_k": None},
    },
    "checkpointing": {"enabled": False},
    "cluster": {"gpus_per_node": 2, "num_nodes": 1},
}
TASKS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {}, "loss_fn": {}},
    "async": {"grpo": {}, "loss_fn": {"use_importance_sampling_correction": True}, "async_rl": {}},
    "sft": {"sft": {}},
    "dpo": {"dpo": {}},
}


def file_of(task: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The shortest file of a task, below `sections`."""
    kind = "BinaryPreferenceDataset" if task == "dpo" else "ResponseDataset"
    processor = {"processor": "math_hf_data_processor", "env_name": "math"} if task in ("grpo", "async") else {}
    texts = {name: {"data_path": f"data/{name}.jsonl"} for name in ("train", "validation")}
    data = {"max_input_seq_length": 128, **texts, "default": {"dataset_name": kind, **processor}}
    return copy.deepcopy(FILE | {"data": data, "env": {"math": {}}} | TASKS[task] | sections)


def converted(folder: Path, file: dict[str, Any]) -> Conversion:
    (folder / "file.yaml").write_text(yaml.safe_dump(file))
    return convert_file(folder / "file.yaml", ORIGINS["nemo_rl"])


def job_of(folder: Path, file: dict[str, Any]) -> JobConfig:
    (folder / "job.yaml").write_text(converted(folder, file).to_yaml())
    return load_config(folder / "job.yaml")


def fields() -> Iterator[tuple[str, str, Any]]:
    """(class, key in a file, default) of every field with one."""
    for where, facts in FACTS["classes"].items():
        name = where.rpartition(":")[2]
        for field, default in facts["defaults"].items():
            yield name, f"{SECTIONS[name]}.{field}".removeprefix("."), default


def is_section(default: Any) -> bool:
    """Whether a default is another class's, whose fields come by themselves."""
    return isinstance(default, str) and default.startswith("<")


@pytest.mark.config
def test_every_default_of_its_classes_is_known():
    task = {name: "sft" if name == "SFTConfig" else "dpo" if name == "DPOConfig" else "async" for name in SECTIONS}
    wrong = []
    for name, key, default in fields():
        file = file_of(task[name])
        if name.endswith("SamplerConfig"):
            file["async_rl"]["sampler"] = {"name": FACTS["classes"][_where(name)]["defaults"]["name"]}
            if key.endswith(".name") and name != "InOrderSamplerConfig":
                continue  # a file that means another sampler names it
        known = defaults_of(file)
        if is_section(default) or key.rpartition(".")[2] in QUEUES:
            continue
        if default != known.get(key, None) and (default or key in known):  # what is off there is off here, unsaid
            wrong.append((key, default, known.get(key)))
    assert wrong == []


def _where(name: str) -> str:
    return next(where for where in FACTS["classes"] if where.endswith(f":{name}"))


@pytest.mark.config
def test_every_default_of_its_reads_is_known():
    files = [*(file_of(task) for task in TASKS), {"policy": {"megatron_cfg": {"enabled": True}}}]
    known = {key.rpartition(".")[2] for file in files for key in defaults_of(file)}
    on = {field for field, values in FACTS["reads"].items() if any(values)}
    assert on - known - READ_WITHOUT_EFFECT - ABSENT_IN_REQUESTS == set()


@pytest.mark.config
@pytest.mark.parametrize("task", TASKS)
def test_a_file_that_leaves_defaults_unsaid_is_the_job_of_one_that_writes_them(tmp_path, task):
    short = file_of(task)
    written = copy.deepcopy(short)
    for name, key, default in fields():
        section = key.partition(".")[0]
        if section in short and not is_section(default) and (name == "InOrderSamplerConfig" or "Sampler" not in name):
            *sections, last = key.split(".")
            here = written
            for part in sections:
                here = here.setdefault(part, {})
            here.setdefault(last, default)
    written["policy"]["logprob_batch_size"] = 2
    written["policy"]["tokenizer"]["chat_template"] = "default"
    written["policy"]["optimizer"]["kwargs"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    written["policy"]["sequence_packing"]["microbatch_order"] = "packer"
    written["env"]["math"] = {"verifier_type": "math", "math_verify_impl": "hf_math_verify"}
    job = job_of(tmp_path, short)
    assert job.model_dump() == job_of(tmp_path, written).model_dump()
    marked = {one.key for one in converted(tmp_path, short).defaults}
    assert marked and not converted(tmp_path, written).defaults
    assert "NeMo-RL's defaults, for keys that the file leaves out:" in converted(tmp_path, short).to_yaml()


@pytest.mark.config
def test_the_shortest_files_train_as_nemo_rl_trains_them(tmp_path):
    job = job_of(tmp_path, file_of("grpo"))
    assert (job.rollout_batch_size, job.group_size, job.seed, job.adv_estimator) == (32, 16, 42, "grpo_leave_one_out")
    assert (job.kl_coef, job.loss_args["kl_estimator"], job.kl_loss_bound) == (0.01, "k3", 10.0)
    assert job.reference is not None and job.loss_args["kl_gradient"] == "score_function"
    assert (job.clip_range, job.loss_agg_mode, job.importance_sampling) == ((0.2, 0.2), "token-mean", "token")
    assert (job.eval_steps, job.eval_samples) == (10, 256)
    training = job.actor_train.training_args
    assert (training.learning_rate, training.weight_decay) == (5e-6, 0.1)
    job = job_of(tmp_path, file_of("async"))
    assert job.async_generation_ratio == 1
    job = job_of(tmp_path, file_of("sft"))
    assert (job.max_steps, job.seed, job.eval_steps, job.eval_samples) == (60, 42, 10, 256)
    job = job_of(tmp_path, file_of("dpo"))
    assert (job.max_steps, job.seed, job.eval_steps, job.eval_samples) == (150, 42, 25, 64)
    assert job.loss_args["beta"] == 0.05


ESTIMATORS = {
    (False, True): ("rloo", None),
    (True, True): ("grpo_leave_one_out", None),
    (True, False): ("grpo", None),
    (False, False): ("reinforce", "group"),
}


@pytest.mark.config
@pytest.mark.parametrize("given", ESTIMATORS)
def test_advantages_are_those_of_the_section_that_is_read(tmp_path, given):
    normalised, others = given
    section = {"normalize_rewards": normalised, "use_leave_one_out_baseline": others}
    old = {"normalize_rewards": not normalised, "use_leave_one_out_baseline": not others}
    done = converted(tmp_path, file_of("grpo", grpo={**old, "adv_estimator": {"name": "grpo", **section}}))
    settings = done.settings
    assert (settings.get("adv_estimator", "grpo"), settings.get("norm_mean_type")) == ESTIMATORS[given]
    idle = {one.key: one.why for one in done.left_out_as("idle")}
    assert all("adv_estimator" in idle[f"grpo.{name}"] for name in old)


@pytest.mark.config
def test_a_section_of_advantages_without_the_key_has_its_own_default(tmp_path):
    old = {"normalize_rewards": False, "use_leave_one_out_baseline": False}
    assert job_of(tmp_path, file_of("grpo", grpo=old)).adv_estimator == "grpo_leave_one_out"
    part = {"adv_estimator": {"normalize_rewards": False}}
    assert job_of(tmp_path, file_of("grpo", grpo=part)).adv_estimator == "rloo"


@pytest.mark.config
@pytest.mark.parametrize("framework", ["dtensor", "megatron"])
def test_what_an_optimizer_is_not_told_is_as_in_its_own_class(tmp_path, framework):
    import torch
    from megatron.core.optimizer import OptimizerConfig

    file = file_of("sft")
    if framework == "dtensor":
        theirs = {name: one.default for name, one in inspect.signature(torch.optim.AdamW).parameters.items()}
        theirs |= {"adam_beta1": theirs["betas"][0], "adam_beta2": theirs["betas"][1], "adam_eps": theirs["eps"]}
        file["policy"]["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {}}
        file["policy"]["max_grad_norm"] = 0.5
        theirs |= {"clip_grad": 0.5}
    else:
        theirs = {name: getattr(OptimizerConfig(lr=3e-6), name) for name in ("lr", "weight_decay", "clip_grad")}
        theirs |= {name: getattr(OptimizerConfig(), name) for name in ("adam_beta1", "adam_beta2", "adam_eps")}
        file["policy"]["dtensor_cfg"] = {"enabled": False}
        file["policy"]["megatron_cfg"] = {"enabled": True, "optimizer": {"lr": 3e-6}, "scheduler": {}}
        file["policy"]["max_grad_norm"] = 0.5  # which only DTensor reads
    training = job_of(tmp_path, file).actor_train.training_args
    names = {"lr": "learning_rate", "adam_eps": "adam_epsilon", "clip_grad": "max_grad_norm"}
    for name in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"):
        assert getattr(training, names.get(name, name)) == theirs[name], name
    assert training.lr_scheduler_type == ("constant" if framework == "dtensor" else "linear")
