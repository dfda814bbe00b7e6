"""ROLL's defaults and overrides: every field of its configuration classes means in a converted file what it meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, Verdict
from roll_batching.jobs.config.job_keys import ROLES, JobKeys
from roll_batching.jobs.config.key_paths import field_at, settings_at
from roll_batching.jobs.config.notices import unread_in
from roll_batching.settings.fields import nested_settings
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from roll_batching.tools.conversion.foreign_file import section_at

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "data" / "roll_defaults.json").read_text())

ROLE = "{model_args: {}, training_args: {}, data_args: {file_name: [a.jsonl]}, strategy_args: STRATEGY, "
ROLE += "use_sequence_packing: true}"
TRAIN, INFER = "{strategy_name: megatron_train}", "{strategy_name: megatron_infer}"
FILES = {
    "rlvr": f"""
response_length: 64
adv_estimator: reinforce
actor_train: {ROLE.replace("STRATEGY", TRAIN)}
actor_infer: {{generating_args: {{}}, strategy_args: {{strategy_name: vllm}}}}
reference: {ROLE.replace("STRATEGY", INFER)}
validation: {{generating_args: {{}}}}
use_kl_loss: true
kl_loss_coef: 0.1
rewards: {{math: {{worker_cls: a.MathRuleRewardWorker, tag_included: [aime]}}}}
""",
    "agentic": f"""
response_length: 64
adv_estimator: reinforce
actor_train: {ROLE.replace("STRATEGY", TRAIN)}
actor_infer: {{generating_args: {{}}, strategy_args: {{strategy_name: vllm}}}}
reference: {ROLE.replace("STRATEGY", INFER)}
use_kl_loss: true
kl_loss_coef: 0.1
custom_envs: {{}}
train_env_manager: {{tags: [a]}}
""",
    "sft": f"sequence_length: 64\nsft_train: {ROLE.replace('STRATEGY', TRAIN)}\n",
    "dpo": f"""
sequence_length: 64
beta: 0.1
actor_train: {ROLE.replace("STRATEGY", TRAIN).replace("true", "false")}
reference: {ROLE.replace("STRATEGY", INFER).replace("true", "false")}
""",
}
"""A file of each pipeline that says as little as it can, and has all sections."""
TOP = {"rlvr": "RLVRConfig", "agentic": "AgenticConfig", "sft": "SFTConfig", "dpo": "DPOConfig"}
SECTIONS = {
    "model_args": "ModelArguments",
    "training_args": "TrainingArguments",
    "data_args": "DataArguments",
    "strategy_args": "StrategyArguments",
    "sequence_packing_args": "SequencePackingConfig",
}
WITHOUT_KEY = frozenset(
    """
    add_len_reward audio_folder autocast_adapter_dtype balance_length base_dir batch_adjust_mode chosen_key code_url
    critic custom_data_kwargs_func data_seed dataset_filter device_map dirty_data_mask env_monitor
    error_max_len_threshold exp_mode force_disable_old_logprobs_recompute format_pattern
    generate_opt_level gradient_checkpointing_use_reentrant ipo
    is_offload_optimizer_states_in_train_step is_use_additional_prompts judge_api_key judge_api_url judge_model_name
    judge_model_type judge_prompt l2 label_smoothing lambd length_profiler_dir local_rank lora_dropout
    mask_type max_additional_running_prompts max_ckpt_to_keep max_running_requests minibatch_data_iter_num
    model_config_kwargs model_download_type model_update_buffer_size_mb moe_aux_loss_coef num_labels
    open_feedback_turn otlp_output_dir parse_tool_call_parameter_to_dict partial_gpu_mode pg_variant
    postive_loss_coef profiler_memory profiler_output_dir profiler_timeline prompt_key pure_opd_pipeline_type
    query_filter_config query_key ratio_type rejected_key render_save_dir report_length_and_rewards
    response_filter_config response_key response_length_penalty_coef reward reward_manager_config reward_model
    reward_normalization reward_type rl_loss_coef rollout_mock router_args save_hf_model save_logging_board_dir
    sft_train skip_mock_system_prompt student_infer student_train system_key
    tag_included tag_to_template teacher tf32 topr_negative_weight topr_positive_weight train_env_manager
    train_infer_correction transfer_backend ulysses_size use_local use_policy_loss_type use_reward_norm
    use_reward_scaling use_token_reward use_topr_loss use_topr_neg_loss_coef user_defined_rollout_loop_cls
    val_env_manager val_greedy val_n_sample val_prompt_length val_sequence_length video_fps video_max_frames
    video_max_pixels video_min_pixels video_resize_chunk_frames video_total_pixels
    """.split()
)
"""Fields that no key here stands for: by default they ask for nothing that is not done here. A new field of ROLL's
fails the test until it is looked at, and translated or added here."""
EXPLAINED = {
    "exp_name": "the name of ROLL's start script",
    "track_with": "tensorboard is always written here",
    "max_grad_norm": "1.0 of training_args",
    "response_length": "given, or follows from sequence_length",
    "sequence_length": "given, or follows from response_length",
    "max_new_tokens": "response_length, whatever the file says (tested below)",
    "prompt_length": "SFT and DPO have one length, sequence_length",
    "prompt": "RL: a file that names neither it nor messages has no prompts there; DPO: instruction, fixed in its code",
    "response": "RL: ground_truth, which the rewards read; SFT: response_key (tested below)",
    "max_packed_sequence_length_train": "per_device_train_batch_size x sequence_length, in ROLL's code",
    "image_max_pixels": "a file that names neither limit has no images here (test_images.py)",
    "image_min_pixels": "as image_max_pixels",
    "max_tokens_per_microbatch_in_train": "0 there and ~ here: not set",
}
"""Fields whose default is another value here and means the same."""


def converted(pipeline: str, folder: Path, **more: Any) -> tuple[Conversion, JobConfig]:
    path = folder / f"{pipeline}.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(FILES[pipeline]) | more))
    done = convert_file(path, ORIGINS["roll"])
    (folder / "job.yaml").write_text(done.to_yaml())
    return done, load_config(folder / "job.yaml")


def fields_of(pipeline: str) -> Iterator[tuple[str, str, Any, tuple[str, ...]]]:
    """(class, field, default, path here) of everything that a file of `pipeline` can leave out."""
    trained = "sft_train" if pipeline == "sft" else "actor_train"
    classes = {(): TOP[pipeline], (trained,): "WorkerConfig"}
    classes |= {(trained, name): cls for name, cls in SECTIONS.items()}
    if pipeline == "dpo":  # which does not pack
        del classes[trained, "sequence_packing_args"]
    if pipeline != "sft":
        classes |= {("reference",): "WorkerConfig"}
        classes |= {("reference", *path[1:]): cls for path, cls in classes.items() if len(path) > 1}
    if pipeline in ("rlvr", "agentic"):
        classes[("actor_infer", "generating_args")] = "GeneratingArguments"
    if pipeline == "rlvr":
        classes[("validation", "generating_args")] = "GeneratingArguments"
        classes[("rewards", "math")] = "RewardConfig"
    file = yaml.safe_load(FILES[pipeline])
    roles = RECORDED["classes"]["WorkerConfig"]
    for section, cls in classes.items():
        here = tuple("actor_train" if part == "sft_train" else part for part in section)
        for name, default in RECORDED["classes"][cls].items():
            field, path = field_at((*here, name)), (*here, name)
            if cls == "RewardConfig" and name in roles and name != "tag_included":
                continue  # a reward's devices and model: rewards run on the CPU here
            if (field is not None and nested_settings(field)) or name in SECTIONS or name in section_at(file, *section):
                continue
            if isinstance(default, dict) and "section" in default:
                continue
            if path[0] in JobKeys.model_fields and path[0] in ROLES and unread_in(path[0], path[1:]):
                continue
            doubled = pipeline == "dpo" and name in ("per_device_train_batch_size", "infer_batch_size")  # of pairs
            yield cls, name, 2 * default if doubled else default, path


def value_at(job: JobConfig, path: tuple[str, ...]) -> Any:
    here: Any = job
    for part in path:
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    return here


@pytest.mark.config
@pytest.mark.parametrize("pipeline", FILES)
def test_every_field_that_a_file_leaves_out_means_what_it_meant(pipeline, tmp_path):
    done, job = converted(pipeline, tmp_path)
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    wrong = []
    for cls, name, default, path in fields_of(pipeline):
        field = field_at(path)
        foreign = FOREIGN_KEYS.get(settings_at(path[:-1]), {}).get(name)
        if name in EXPLAINED or (foreign is not None and foreign.verdict is Verdict.NO_EFFECT):
            continue
        if field is not None:
            found = value_at(job, path)
            right = (list(found) if isinstance(found, tuple) else found) == default
        else:
            right = name in WITHOUT_KEY or (foreign is not None and not foreign.refuses(default))
        if not right and "ROLL's default" not in refused.get(".".join(path), ""):
            shown = repr(value_at(job, path)) if field is not None else "not here"
            wrong.append(f"{cls}.{name}: {default!r} there, {shown} here ({'.'.join(path)})")
    assert not wrong, "\n".join(wrong)


def changed(done: Conversion) -> dict[str, str]:
    return {one.key: one.meaning for one in (*done.changed, *done.defaults)}


@pytest.mark.config
def test_defaults_are_marked_in_the_file_and_what_is_written_goes_before_them(tmp_path):
    done, job = converted("rlvr", tmp_path, loss_agg_mode="token-mean")
    listed = {one.key for one in done.defaults}
    assert "actor_train.training_args.lr_scheduler_type" in listed and "loss_agg_mode" not in listed
    assert "# ROLL's defaults, for keys that the file leaves out:" in done.to_yaml()
    assert job.loss_agg_mode == "token-mean"
    assert "adv_estimator" not in listed, "the file names one"
    (tmp_path / "gae.yaml").write_text(FILES["rlvr"].replace("adv_estimator: reinforce", ""))
    refused = {one.key: one.why for one in convert_file(tmp_path / "gae.yaml", ORIGINS["roll"]).left_out_as("refused")}
    assert refused["adv_estimator"].startswith("ROLL's default; "), "a default that cannot be kept is named"


@pytest.mark.config
@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ({"response_length": 64, "prompt_length": 32}, 64),
        ({"response_length": 64, "prompt_length": 32, "sequence_length": 80}, 48),
        ({"response_length": None, "prompt_length": 32, "sequence_length": 80}, 48),
        ({"response_length": None, "sequence_length": 2048}, 1024),
    ],
)
def test_a_response_is_as_long_as_rolls_code_makes_it(tmp_path, written, answer):
    _, plain = converted("rlvr", tmp_path, **written)
    assert plain.actor_infer.generating_args.max_new_tokens == answer == plain.response_length
    sampling = {"generating_args": {"max_new_tokens": 7, "top_p": 1.0}}
    role = {**sampling, "strategy_args": {"strategy_name": "vllm"}}
    done, job = converted("rlvr", tmp_path, **written, actor_infer=role, validation=sampling)
    assert job.actor_infer.generating_args.max_new_tokens == answer
    assert job.validation.generating_args.max_new_tokens == answer
    assert "(7)" in changed(done)["actor_infer.generating_args.max_new_tokens"]


@pytest.mark.config
def test_held_out_answers_have_lengths_of_their_own(tmp_path):
    lengths = {"val_prompt_length": 32, "val_sequence_length": 48, "prompt_length": 32}
    _, job = converted("rlvr", tmp_path, **lengths, validation={"generating_args": {"temperature": 0.6}})
    sampling = job.validation.generating_args
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (16, 0.6, 0.7)
    assert job.actor_infer.generating_args.max_new_tokens == 64


@pytest.mark.config
@pytest.mark.parametrize("std", ["batch", "running", "group", None])
def test_grpo_divides_by_the_groups_deviation_whatever_the_file_says(tmp_path, std):
    done, job = converted(
        "rlvr",
        tmp_path,
        adv_estimator="grpo",
        norm_std_type=std,
        norm_mean_type="batch",
        num_return_sequences_in_group=4,
    )
    assert job.norm_std_type in ("group", None), "the default under grpo"
    assert ("ROLL's code" in changed(done).get("norm_std_type", "")) == (std in ("batch", "running"))


@pytest.mark.config
@pytest.mark.parametrize(("given", "group"), [(None, 1), (4, 4)])
def test_the_size_of_a_group_rules_the_number_of_responses(tmp_path, given, group):
    more = {} if given is None else {"num_return_sequences_in_group": given}
    sampling = {"generating_args": {"num_return_sequences": 8}}
    done, job = converted("rlvr", tmp_path, **more, actor_infer=sampling)
    assert job.group_size == group == job.actor_infer.generating_args.num_return_sequences
    assert "(8)" in changed(done)["actor_infer.generating_args.num_return_sequences"]


@pytest.mark.config
@pytest.mark.parametrize("pipeline", ["rlvr", "dpo", "sft"])
def test_the_model_is_pretrain_unless_every_role_names_one(tmp_path, pipeline):
    trained = "sft_train" if pipeline == "sft" else "actor_train"
    file = yaml.safe_load(FILES[pipeline]) | {"pretrain": "models/base"}
    file[trained]["model_args"] = {"model_name_or_path": "models/own"}
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(file))
    done = convert_file(path, ORIGINS["roll"])
    assert "models/own" not in str(done.settings)
    assert f"{trained}.model_args.model_name_or_path" in {one.key for one in done.left_out}
    for role in {"actor_train", "actor_infer", "reference"} & set(file):
        file[role]["model_args"] = {"model_name_or_path": "models/own"}
    path.write_text(yaml.safe_dump(file))
    kept = convert_file(path, ORIGINS["roll"]).settings["actor_train"].get("model_args", {})
    assert kept.get("model_name_or_path") == (None if pipeline == "sft" else "models/own")


@pytest.mark.config
@pytest.mark.parametrize("pipeline", ["rlvr", "sft", "dpo"])
def test_the_span_of_the_schedule_is_computed(tmp_path, pipeline):
    trained = "sft_train" if pipeline == "sft" else "actor_train"
    file = yaml.safe_load(FILES[pipeline])
    file[trained]["training_args"] = {"max_steps": 7}
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(file))
    done = convert_file(path, ORIGINS["roll"])
    assert "max_steps" not in done.settings["actor_train"].get("training_args", {})
    assert f"{trained}.training_args.max_steps" in {one.key for one in done.left_out_as("idle")}


@pytest.mark.config
@pytest.mark.parametrize(("temperature", "written"), [(None, 1.0), (0.6, 1.0), (1.0, None)])
def test_log_probs_of_the_loss_are_at_temperature_1(tmp_path, temperature, written):
    sampling = {} if temperature is None else {"temperature": temperature}
    role = {"generating_args": sampling, "strategy_args": {"strategy_name": "vllm"}}
    done, job = converted("rlvr", tmp_path, actor_infer=role)
    assert job.logprob_temperature == 1.0
    assert done.settings["actor_train"].get("logprob_temperature") == written
    assert ("actor_train.logprob_temperature" in changed(done)) == (written is not None)


@pytest.mark.config
@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.07, 44, 4), (0.5, 8, 4), (0.01, 10, 1), (0.0, 10, 0)])
def test_a_share_of_warm_up_is_rounded_up(ratio, steps, warmup):
    torch = pytest.importorskip("torch")
    from roll_batching.modeling.builder import build_scheduler
    from roll_batching.settings import TrainingArgs

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0].update({"wd_mult": 1.0, "lr_mult": 1.0})
    scheduler = build_scheduler(optimizer, TrainingArgs(warmup_ratio=ratio), steps)
    assert scheduler.lr_warmup_steps == warmup
