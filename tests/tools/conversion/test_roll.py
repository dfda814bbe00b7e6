"""Files in ROLL's shape, composed by Hydra, as ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from roll_batching.cli import app
from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.rewards import REWARDS
from roll_batching.jobs.rewards import load_reward
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file

RLVR = """
defaults:
  - ../config/environments@_here_

hydra: {run: {dir: .}}
exp_name: reason-${now:%Y}
output_dir: ${oc.env:RB_TEST_OUTPUT,./output}
logging_dir: ${oc.env:RB_TEST_NOT_SET}
max_steps: 20
rollout_batch_size: 8
prompt_length: 64
response_length: 192
num_return_sequences_in_group: 4
adv_estimator: reinforce
reward_norm: batch
reward_shift: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.9
is_num_return_sequences_expand: true
pretrain: ${custom_envs.model}
actor_train:
  model_args: {dtype: bf16, flash_attn: fa2, lora_dropout: 0.1}
  training_args: {learning_rate: 1.0e-6, gradient_accumulation_steps: 8}
  data_args:
    file_name: [data/a.jsonl]
    messages: messages
    domain_interleave_probs: {math: 0.5, code: 0.3, judge: 0.2}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {sequence_parallel: true, moe_grouped_gemm: true, bf16: true}
  use_sequence_packing: true
  device_mapping: list(range(0,8))
  colour: red
actor_infer:
  num_gpus_per_worker: 2
  generating_args: {top_k: -1, num_return_sequences: "${num_return_sequences_in_group}"}
  strategy_args: {strategy_name: vllm, strategy_config: {block_size: 16}}
  device_mapping: list(range(0,6))
rewards:
  judge: {worker_cls: a.b.DetectionRewardWorker, model_args: {model_name_or_path: "${reward_pretrain}"}}
  math: {worker_cls: a.b.MathRuleRewardWorker, tag_included: [aime], world_size: 8}
  code: {worker_cls: a.b.CodeSandboxRewardWorker, use_local: true, tag_included: [KodCode]}
validation:
  data_args: {file_name: data/held_out.jsonl}
  generating_args: {top_p: 0.6}
"""


@pytest.fixture
def rlvr(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "environments.yaml").write_text("custom_envs: {model: models/small}\nmax_steps: 7\n")
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs" / "rlvr.yaml"
    path.write_text(RLVR)
    return path


def converted(path: Path) -> Conversion:
    return convert_file(path, ORIGINS["roll"])


def loads_quietly(done: Conversion, folder: Path) -> None:
    """What was written loads, and nothing of it is without effect."""
    (folder / "job.yaml").write_text(done.to_yaml())
    said = [notice for notice in load_config(folder / "job.yaml").notices if "no effect" in notice.text]
    assert said == []


@pytest.mark.config
def test_a_file_is_composed_and_every_key_is_accounted_for(rlvr, tmp_path, monkeypatch):
    monkeypatch.setenv("RB_TEST_OUTPUT", "elsewhere")
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    settings = done.settings
    assert settings["pretrain"] == "models/small", "through `defaults` and a reference"
    assert settings["max_steps"] == 20, "the file goes before what it inherits"
    assert settings["output_dir"] == "elsewhere" and settings["exp_name"].startswith("reason-2")
    assert settings["reward_norm"] == "batch" and settings["difficulty_mask"] is True
    assert settings["actor_train"]["data_args"]["eval_file_name"] == "data/held_out.jsonl"
    defaults = {"temperature": 0.95, "top_p": 0.7}
    assert settings["actor_infer"]["generating_args"] == {"top_k": -1, "num_return_sequences": 4} | defaults
    refused = {one.key for one in done.left_out_as("refused")}
    assert refused == {
        "actor_train.model_args.lora_dropout",
        "custom_envs",
        "logging_dir",
        "rewards.judge",
    }
    assert [one.key for one in done.left_out_as("unknown")] == ["actor_train.colour"]
    idle = {one.key: one.why for one in done.left_out_as("idle")}
    layout = "actor_train.strategy_args.strategy_config"
    for key in (
        "actor_infer.num_gpus_per_worker",
        "actor_train.model_args.flash_attn",
        "is_num_return_sequences_expand",
        f"{layout}.bf16",
        f"{layout}.moe_grouped_gemm",
        f"{layout}.sequence_parallel",
    ):
        assert key in idle
    changed = {one.key: one.meaning for one in done.changed}
    assert settings["actor_infer"]["strategy_args"] == {"strategy_name": "vllm", "strategy_config": {"block_size": 16}}
    assert "2048 tokens" in changed["actor_train.use_sequence_packing"], "the cap that follows is said"
    assert "RB_TEST_OUTPUT" in changed["output_dir"]
    assert settings["rewards"] == {
        "math": {"reward_function": "math_verify", "tag_included": ["aime"]},
        "code": {
            "reward_function": "code_tests",
            "reward_args": {"all_or_nothing": True, "run": "subprocess"},
            "tag_included": ["KodCode"],
        },
    }
    assert settings["actor_train"]["data_args"]["response"] == "ground_truth"
    assert settings["actor_train"]["data_args"]["domain_interleave_probs"] == {"math": 0.625, "code": 0.375}
    assert settings["actor_train"]["data_args"]["long_prompts"] == "drop"
    assert settings["validation"] == {"generating_args": {"top_p": 0.6, "temperature": 0.95, "top_k": 50}}
    assert "over their sum" in changed["actor_train.data_args.domain_interleave_probs.math"]
    assert "in a sandbox" in changed["rewards.code.use_local"] and "rewards.math.world_size" in idle
    assert [text.split(":")[0] for text in done.missing] == ["pretrain"]


@pytest.mark.config
@pytest.mark.parametrize("said", ["use_local: false", "use_local: yes please", "code_url: http://127.0.0.1:1"])
def test_code_runs_only_where_the_file_says_so(rlvr, said):
    rlvr.write_text(RLVR.replace("use_local: true", said))
    done = converted(rlvr)
    assert "run" not in done.settings["rewards"]["code"]["reward_args"]
    assert "rewards.code.reward_args.run" in [text.split(":")[0] for text in done.missing]


RULES = """rewards:
  follow: {worker_cls: a.b.GeneralRuleRewardWorker, reward_type: soft, tag_included: [ifeval]}
  qa:
    {worker_cls: a.b.CrossThinkQARuleRewardWorker, reward_type: soft, response_length_penalty_coef: 0.0,
     tag_included: [qa]}
  strict:
    {worker_cls: a.b.CrossThinkQARuleRewardWorker, reward_type: TYPE, response_length_penalty_coef: 0.3,
     tag_included: [x]}
  boxed: {worker_cls: a.b.MultipleChoiceBoxedRuleRewardWorker, tag_included: [gpqa]}
"""


@pytest.mark.config
@pytest.mark.parametrize("kind", ["strict", "loose", "other", "3"])
def test_rewards_by_rules_are_kept_with_their_arguments(rlvr, tmp_path, kind):
    text = RLVR[: RLVR.index("rewards:\n")] + RULES.replace("TYPE", kind) + RLVR[RLVR.index("validation:\n") :]
    rlvr.write_text(text.replace("    domain_interleave_probs: {math: 0.5, code: 0.3, judge: 0.2}\n", ""))
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    rewards = {name: (one["reward_function"], one.get("reward_args")) for name, one in done.settings["rewards"].items()}
    known = kind in ("strict", "loose")
    assert rewards == {
        "follow": ("ifeval", {"repetition_penalty": 0.5}),
        "qa": ("multiple_choice", {"repetition_penalty": 0.5, "grading": "soft"}),
        "strict": ("multiple_choice", {"repetition_penalty": 0.5} | ({"grading": kind} if known else {})),
        "boxed": ("multiple_choice", None),
    }
    assert ("rewards.strict.reward_args.grading" in [text.split(":")[0] for text in done.missing]) is not known
    left = {one.key: one.why for one in done.left_out_as("refused")}
    assert "padded length" in left["rewards.strict.response_length_penalty_coef"]
    assert {"rewards.follow.reward_type", "rewards.qa.response_length_penalty_coef"} <= {
        one.key for one in done.left_out_as("idle")
    }
    for one in done.settings["rewards"].values():
        load_reward(REWARDS.get(one["reward_function"]).target, one.get("reward_args"))


JUDGES = {
    "a server of ROLL's": (
        "judge_model_type: inference, judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt,"
        "strategy_args: {strategy_name: vllm},"
        "model_args: {model_name_or_path: a/b}, generating_args: {max_new_tokens: 100, top_p: 0.8, top_k: 50,"
        "num_beams: 1, temperature: 0.8, num_return_sequences: 1}, device_mapping: 'list(range(24,32))'",
        {"model": "a/b", "request": {"max_tokens": 100, "top_p": 0.8, "top_k": 50, "temperature": 0.8}},
        {"url"},
    ),
    "a URL": (
        "judge_model_type: api, judge_model_name: gpt, judge_api_url: 'https://x.test/v1', judge_api_key: sk-abcdef,"
        "generating_args: {temperature: 0.9}",
        {"model": "gpt", "url": "https://x.test/v1", "auth_variable": "JUDGE_API_KEY"},
        set(),
    ),
    "a password in the URL": (
        "judge_model_name: m, judge_api_url: 'https://me:sk-abcdef@x.test'",
        {"model": "m"},
        {"url"},
    ),
    "nothing": ("judge_api_key: null", None, {"url", "model"}),
    "wrong types": (
        "judge_model_name: [a], judge_api_url: 3, model_args: [], generating_args: 7",
        None,
        {"url", "model"},
    ),
}


@pytest.mark.config
@pytest.mark.parametrize("case", JUDGES)
def test_judges_keep_what_a_url_needs_and_no_key(rlvr, tmp_path, case):
    keys, arguments, missing = JUDGES[case]
    rlvr.write_text(RLVR.replace("DetectionRewardWorker, model_args: {model_name_or_path: \"${reward_pretrain}\"}",
                                 f"LLMJudgeRewardWorker, tag_included: [RLVR], {keys}"))  # fmt: skip
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    judge = done.settings["rewards"]["judge"]
    assert judge["reward_function"] == "llm_judge" and judge.get("reward_args") == arguments
    assert {text.split(":")[0] for text in done.missing if "judge" in text} == {
        f"rewards.judge.reward_args.{key}" for key in missing
    }
    assert "sk-abcdef" not in done.to_yaml() + done.to_json()
    assert ("rewards.judge.judge_prompt" in {one.key for one in done.left_out_as("refused")}) == ("prompt" in keys)
    assert done.settings["actor_train"]["data_args"]["domain_interleave_probs"]["judge"] == 0.2


@pytest.mark.config
@pytest.mark.parametrize(
    ("variant", "loss"), [("topr", "topr"), ("cispo", "cispo"), ("ppo", "policy"), ("vanilla", "gpg"), ("tis", None)]
)
def test_a_variant_of_the_policy_gradient_is_a_loss(rlvr, tmp_path, variant, loss):
    role = f"  worker_cls: a.actor_pg_worker.ActorPGWorker\n  pg_variant: {variant}\n  topr_negative_weight: 0.5\n"
    rlvr.write_text(RLVR.replace("  colour: red\n", role))
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    settings = done.settings
    assert settings.get("loss_function") == loss
    assert settings.get("loss_args") == ({"negative_weight": 0.5} if variant == "topr" else None)
    if loss is None:
        assert "topr" in {one.key: one.why for one in done.left_out_as("refused")}["actor_train.pg_variant"]
    if loss == "cispo":
        assert (settings["use_pg_clip_range"], settings["pg_clip_low"], settings["pg_clip_high"]) == (True, 0.1, 0.1)
    rlvr.write_text(RLVR.replace("  colour: red\n", "  pg_variant: topr\n"))
    done = converted(rlvr)
    assert "loss_function" not in done.settings
    assert "actor_train.pg_variant" in {one.key for one in done.left_out_as("idle")}, "no other worker reads it"


@pytest.mark.config
def test_the_correction_of_sampler_and_trainer_is_ours(rlvr, tmp_path):
    section = (
        "train_infer_correction:\n  is_weight: {enabled: true, weight_type: segment, upper_bound: 1.5}\n  filters:\n"
        "  - {enabled: true, agg_type: sequence, diff_enabled: true, ratio_high: 1.05, diff_low: -0.1}\n"
        "  - {enabled: false, agg_type: token}\n"
    )
    rlvr.write_text(RLVR + section)
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    assert done.settings["train_infer_correction"] == {
        "is_weight": {"weight_type": "segment", "upper_bound": 1.5},
        "filters": [
            {"agg_type": "sequence", "ratio_low": 0.8, "ratio_high": 1.05, "diff_low": -0.1, "diff_high": 0.2},
        ],
    }
    rlvr.write_text(RLVR + "train_infer_correction: {is_weight: {enabled: false}}\n")
    done = converted(rlvr)
    assert "train_infer_correction" not in done.settings
    assert "train_infer_correction" in {one.key for one in done.left_out_as("idle")}


FILES = "[data/judge_a.jsonl, data/aime.jsonl, data/KodCode.jsonl, data/other.jsonl, FOLDER/x.jsonl, FOLDER/y.jsonl]"


@pytest.mark.config
def test_files_of_rewards_that_are_left_out_are_left_out_too(rlvr, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"tag": "opinions"}\n' * 3)
    (tmp_path / "y.jsonl").write_text('{"tag": "opinions"}\n{"tag": "aime"}\n')
    text = RLVR.replace("[data/a.jsonl]", FILES.replace("FOLDER", str(tmp_path)))
    rlvr.write_text(text.replace("DetectionRewardWorker,", "DetectionRewardWorker, tag_included: [opinions],"))
    done = converted(rlvr)
    kept = [Path(file).name for file in done.settings["actor_train"]["data_args"]["file_name"]]
    assert kept == ["aime.jsonl", "KodCode.jsonl", "other.jsonl", "y.jsonl"], "by their lines, else by their names"
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    assert "name" in refused["actor_train.data_args.file_name (data/judge_a.jsonl)"]
    assert "opinions" in refused[f"actor_train.data_args.file_name ({tmp_path}/x.jsonl)"]


@pytest.mark.config
def test_the_number_of_checkpoints_is_kept(rlvr, tmp_path):
    for given, kept in ((3, 3), (0, None)):
        rlvr.write_text(RLVR + f"max_ckpt_to_keep: {given}\n")
        assert converted(rlvr).settings.get("save_total_limit") == kept


@pytest.mark.config
@pytest.mark.bad_input
@pytest.mark.parametrize("share", ["much", "0", "null", "-1"])
def test_parts_of_domains_that_are_none_are_left_out(rlvr, tmp_path, share):
    rlvr.write_text(RLVR.replace("{math: 0.5, code: 0.3, judge: 0.2}", f"{{math: {share}, judge: 0.2}}"))
    done = converted(rlvr)
    loads_quietly(done, tmp_path)
    assert "domain_interleave_probs" not in str(done.settings)
    left = [one.key for one in done.left_out_as("refused", "idle")]
    assert any(key.startswith("actor_train.data_args.domain_interleave_probs") for key in left)


@pytest.mark.config
def test_the_command_writes_yaml_and_lists(rlvr, tmp_path):
    out, lists = tmp_path / "out.yaml", tmp_path / "lists.json"
    result = CliRunner().invoke(
        app, ["convert-config", "--from", "roll", str(rlvr), "--output", str(out), "--report", str(lists)]
    )
    assert result.exit_code == 0, result.output
    assert "to be filled in: pretrain" in result.output
    assert yaml.safe_load(out.read_text())["rollout_batch_size"] == 8
    said = json.loads(lists.read_text())
    assert {"key": "actor_train.colour", "why": "there is no such setting here", "kind": "unknown"} in said["left_out"]
    for one in said["left_out"]:
        assert f"#   {one['key']}: " in out.read_text()
    assert CliRunner().invoke(app, ["convert-config", str(rlvr)]).exit_code == 0, "its sections say whose it is"


@pytest.mark.config
@pytest.mark.bad_input
def test_training_on_a_file_of_rolls_says_first_what_to_do(rlvr):
    with pytest.raises(ConfigError) as caught:
        load_config(rlvr)
    head, first, *own = str(caught.value).splitlines()
    assert "was written for ROLL; convert it: roll-batching convert-config --from roll" in first
    assert "defaults: unknown key" in own[0] and len(own) <= 11, "its own problems follow, the first of them"


@pytest.mark.config
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [../config/nowhere@_here_]\nactor_train: {}\n", "nowhere"),
        ("a: [", "job.yaml"),
        ("model: 7b\n", "name the framework"),
    ],
)
def test_what_cannot_be_composed_is_one_error(tmp_path, text, words):
    (tmp_path / "job.yaml").write_text(text)
    result = CliRunner().invoke(app, ["convert-config", str(tmp_path / "job.yaml")])
    assert isinstance(result.exception, ConfigError) and words in str(result.exception)
