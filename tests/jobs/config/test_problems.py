"""What is wrong with a file is said with the key, its line and the cure, all at once."""

from __future__ import annotations

import textwrap

import pytest
import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config


@pytest.fixture
def problems(tmp_path):
    def read(text, overrides=()):
        file = tmp_path / "job.yaml"
        file.write_text(textwrap.dedent(text))
        with pytest.raises(ConfigFileError) as caught:
            load_config(file, overrides)
        assert isinstance(caught.value, ConfigError)
        return [str(problem).replace(str(file), "job.yaml") for problem in caught.value.problems]

    return read


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "actor_train:\n  use_sequence_pack: true\n",
            "job.yaml:2: actor_train.use_sequence_pack: unknown key; did you mean 'use_sequence_packing'?",
        ),
        ("max_stepz: 3\n", "job.yaml:1: max_stepz: unknown key; did you mean 'max_steps'?"),
        (
            "actor_train:\n  learning_rate: 1.0e-3\n",
            "job.yaml:2: actor_train.learning_rate: unknown key here; it belongs at "
            "actor_train.training_args.learning_rate",
        ),
        (
            "actor_train:\n  strategy_args:\n    strategy_config:\n      tensor_parallel_size: 2\n",
            "job.yaml:4: actor_train.strategy_args.strategy_config.tensor_parallel_size: unknown key; "
            "did you mean 'tensor_model_parallel_size'?",
        ),
        (
            "actor_train:\n  sequence_packing_args: {algorithm: load_balanced}\n",
            "job.yaml:2: actor_train.sequence_packing_args.algorithm: 'load_balanced' is not possible; "
            "did you mean 'load_balance'? choose load_balance, none, concatenative, "
            "first_fit_decreasing, first_fit_shuffle, modified_first_fit_decreasing or your own as package.module:name",
        ),
        (
            "actor_train:\n  planning_args: {dynamic_algorithm: 3}\n",
            "job.yaml:2: actor_train.planning_args.dynamic_algorithm: 3 is not possible; "
            "choose roll, nemo_rl, prefer_closest, prefer_first or your own as package.module:name",
        ),
        (
            "actor_train:\n  planning_args:\n    dynamic_algorithm: my_packers.mine\n",
            "job.yaml:3: actor_train.planning_args.dynamic_algorithm: 'my_packers.mine' is not possible; "
            "choose roll, nemo_rl, prefer_closest, prefer_first or your own as package.module:name",
        ),
        (
            "actor_train:\n  strategy_args: {strategy_name: fsdp2_train}\n",
            "job.yaml:2: actor_train.strategy_args.strategy_name: 'fsdp2_train' does not exist here: "
            "training runs on Megatron-Core; use megatron_train or megatron_infer",
        ),
        (
            "actor_train:\n  sequence_packing_args:\n    max_packed_sequence_length_train: 0\n",
            "job.yaml:3: actor_train.sequence_packing_args.max_packed_sequence_length_train: "
            "is 0; it must be at least 1",
        ),
        (
            "actor_train:\n  max_tokens_per_microbatch_in_train: -5\n",
            "job.yaml:2: actor_train.max_tokens_per_microbatch_in_train: is -5; it must be at least 1",
        ),
        ("max_steps: many\n", "job.yaml:1: max_steps: expected a whole number, got 'many'"),
        ("max_steps: true\n", "job.yaml:1: max_steps: expected a whole number, got true"),
        (
            "train_infer_correction:\n  filters:\n  - {ratio_low: 0.5}\n  - {ratio_high: true}\n",
            "job.yaml:4: train_infer_correction.filters.1.ratio_high: expected a number, got true",
        ),
        (
            "train_infer_correction:\n  filters:\n  - {ratio_hi: 0.5}\n",
            "job.yaml:3: train_infer_correction.filters.0.ratio_hi: unknown key; did you mean 'ratio_high'?",
        ),
        ("max_steps: 1.5\n", "job.yaml:1: max_steps: expected a whole number, got 1.5"),
        (
            "actor_train:\n  use_sequence_packing: maybe\n",
            "job.yaml:2: actor_train.use_sequence_packing: expected true or false, got 'maybe'",
        ),
        ("actor_train: 3\n", "job.yaml:1: actor_train: expected keys and values, got 3"),
        (
            "actor_train:\n  padded_length: shortest\n",
            "job.yaml:2: actor_train.padded_length: 'shortest' is not possible; choose longest or a whole number",
        ),
        (
            "seed: 1\nmax_steps: 2\nseed: 3\n",
            "job.yaml:3: seed: is written 2 times (first in line 1); keep one",
        ),
        ("exp_name: ${exp_nam}\n", "job.yaml:1: exp_name: ${exp_nam} names no key of this file"),
        ("- a\n- b\n", "job.yaml:1: the file must hold keys and values at its top level"),
        (
            "actor_train:\n  device_mapping: list(range(zero))\n",
            "job.yaml:2: actor_train.device_mapping: cannot read 'list(range(zero))'; write a list such as "
            "[0, 1], 'list(range(0,8))' or '0-7'",
        ),
        (
            "actor_train:\n  model_args:\n    architecture:\n      hidden_size: 64\n      num_layers: 2\n"
            "      num_attention_heads: 4\n",
            "job.yaml:3: actor_train.model_args.architecture.vocab_size: is missing",
        ),
    ],
)
def test_one_problem(problems, text, expected, report):
    assert problems(text) == [expected]
    report(expected)


@pytest.mark.bad_input
def test_all_problems_of_a_file_are_reported_together(problems, report):
    found = problems(
        """
        max_stepz: 3
        kl_loss_coef: -1
        actor_train:
          use_sequence_packing: true
          use_dynamic_batching: true
          strategy_args:
            strategy_config:
              overlap_param_gather: true
              virtual_pipeline_model_parallel_size: 2
          critic_model: x
        teacher: []
        """
    )
    lines = [int(problem.split(":")[1]) for problem in found]
    assert lines == sorted(lines) == [2, 3, 5, 9, 10, 11, 12], found
    report(f"{len(found)} problems of one file in one message")


def test_a_set_aside_value_causes_no_second_problem(problems):
    found = problems(
        """
        actor_train:
          use_sequence_packing: true
          sequence_packing_args:
            max_packed_sequence_length_train: 0
        """
    )
    assert len(found) == 1


@pytest.mark.bad_input
def test_broken_yaml_names_the_line(problems):
    (found,) = problems("seed: 1\nactor_train: [1, 2\nmax_steps: 3\n")
    assert found.startswith("job.yaml:3: is not valid YAML")


@pytest.mark.bad_input
def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigFileError, match=r"nowhere.yaml: no such file; check its path"):
        load_config(tmp_path / "nowhere.yaml")


def test_settings_without_a_file_have_no_place():
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict({"max_stepz": 3})
    assert str(caught.value) == (
        "the configuration has a problem:\n  max_stepz: unknown key; did you mean 'max_steps'?"
    )


def test_what_a_run_lacks_is_told_together(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("exp_name: x\nactor_train:\n  use_sequence_packing: false\n")
    with pytest.raises(ConfigFileError) as caught:
        load_config(file).check_runnable()
    text = str(caught.value)
    for key in ("architecture", "file_name", "reward_function", "response_length", "tokenizer.vocabulary"):
        assert key in text
    assert "job.yaml:2: actor_train.model_args.architecture" in text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "beside",
    [
        "rewards: {math: {reward_function: math_verify}}\n",
        "rewards: {}\n",
        "rewards: ~\n",
        "rewards: {a: 1}\n",
    ],
)
def test_a_misspelt_key_beside_rewards_is_named(problems, beside):
    found = problems(f"{beside}max_stepz: 3\n")
    assert "job.yaml:2: max_stepz: unknown key; did you mean 'max_steps'?" in found
    assert "convert it" not in str(found)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "theirs",
    ["hydra: {}", "sft_train: {}", "rewards: {math: {worker_cls: a.MathRuleRewardWorker}}", "defaults: [base.yaml]"],
)
def test_a_misspelt_key_of_another_frameworks_file_is_named_below_what_to_do(problems, theirs):
    found = problems(f"{theirs}\nmax_stepz: 3\n")
    assert "convert it: roll-batching convert-config --from" in found[0]
    assert any("max_stepz: unknown key" in one for one in found[1:])


SCRIPTS = {
    "verl": "set -x\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo",
    "verl under torchrun": "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_batch_size=8",
    "verl, a recipe": "#!/bin/bash\npython3 -m recipe.dapo.main_dapo data.train_batch_size=8",
    "verl, a fork": "key: value\npython -m verl_tool.trainer.main_ppo a=1",
    "slime": "ray job submit -- python3 train.py --lr 1e-6",
    "slime, asynchronous": "PYTHONBUFFERED=16 python train_async.py ${ARGS[@]}",
}
OTHER_FILES = {
    "nemo_rl": "policy: {model_name: a}\ngrpo: {num_prompts_per_step: 2}",
    "nemo_rl sft": "defaults: sft.yaml\npolicy: {model_name: a}",
    "verl": "actor_rollout_ref: {actor: {ppo_mini_batch_size: 8}}",
    "verl sft": "defaults: [{optim@optim: fsdp}, _self_]\ndata: {train_batch_size: 8}\ntrainer: {seed: 1}",
    "verl, over its own file": "defaults: [ppo_trainer, {override model_engine: megatron}]",
    "roll": "hydra: {}\nmax_stepz: 3",
}


@pytest.mark.bad_input
@pytest.mark.parametrize("command", ["train", "sft", "dpo", "rehearse", "simulate --lengths data"])
@pytest.mark.parametrize("case", [*(f"{name}.sh" for name in SCRIPTS), *(f"{name}.yaml" for name in OTHER_FILES)])
def test_every_command_says_how_a_foreign_file_is_converted(case, command, tmp_path, capsys):
    from roll_batching.cli import main

    name, _, suffix = case.rpartition(".")
    file = tmp_path / f"run.{suffix}"
    file.write_text((SCRIPTS if suffix == "sh" else OTHER_FILES)[name] + "\n")
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--config", str(file)])
    convert = f"roll-batching convert-config --from {name.split()[0].rstrip(',')} {file} --output job.yaml"
    assert caught.value.code == 2 and convert in capsys.readouterr().err


@pytest.mark.bad_input
def test_another_script_is_no_job(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("make all\n")
    with pytest.raises(ConfigFileError, match="is a shell script: give a YAML file"):
        load_config(file)


@pytest.mark.bad_input
def test_a_misspelt_key_in_a_runs_own_file_is_named(tmp_path):
    job = config_from_dict({"exp_name": "own"}).to_dict()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**job, "max_stepz": 3}, sort_keys=False))
    with pytest.raises(ConfigFileError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.path == ("max_stepz",) and "unknown key; did you mean 'max_steps'?" in problem.message
    assert "convert-config" not in str(caught.value)
