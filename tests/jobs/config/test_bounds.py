"""Refused first, by key and line: names that leave a folder, numbers of YAML 1.1, sizes that no machine holds."""

from __future__ import annotations

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from tests.jobs.config.jobs import changed

pytestmark = pytest.mark.bad_input


def complaint(tmp_path, text, overrides=()):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        load_config(file, overrides)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize("name", ["../../x", "..", ".", "a/b", "/tmp/x", "a/../../b", "./x"])
def test_a_name_that_leaves_the_output_folder_is_refused(tmp_path, name):
    (found,) = complaint(tmp_path, f'seed: 1\nexp_name: "{name}"\n')
    assert found.startswith(f"job.yaml:2: exp_name: is '{name}'; it names one folder inside output_dir")


@pytest.mark.parametrize("name", ["a\0b", "x" * 256, "ü" * 128])
def test_a_name_that_no_folder_can_have_is_refused(name):
    with pytest.raises(ConfigFileError, match="exp_name: is '.*; it names one folder inside output_dir"):
        config_from_dict({"exp_name": name})


def test_a_name_that_a_reference_makes_is_refused(tmp_path):
    (found,) = complaint(tmp_path, "output_dir: /tmp/x\nexp_name: ${output_dir}\n")
    assert found.startswith("job.yaml:2: exp_name: is '/tmp/x'; it names one folder")


@pytest.mark.parametrize("name", ["a.b", "..a", "run 1", "qwen2.5-7b", "ü" * 127])
def test_other_names_are_taken(name):
    assert config_from_dict({"exp_name": name}).exp_name == name


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("010", "YAML 1.1 reads '010' as 8; write 8, or put text into quotes"),
        ("-0_17", "YAML 1.1 reads '-0_17' as -15; write -15, or put text into quotes"),
        ("1:30", "YAML 1.1 reads '1:30' as 90; write 90, or put text into quotes"),
        ("1:30.5", "YAML 1.1 reads '1:30.5' as 90.5; write 90.5, or put text into quotes"),
        ("!!int '1:30'", "YAML 1.1 reads '1:30' as 90; write 90, or put text into quotes"),
    ],
)
def test_numbers_that_only_yaml_1_1_reads_so_are_refused(tmp_path, written, words):
    assert complaint(tmp_path, f"exp_name: x\nseed: {written}\n") == [f"job.yaml:2: seed: {words}"]
    (found,) = complaint(tmp_path, "exp_name: x\n", [f"max_steps={written}"])
    assert found == f"override 'max_steps={written}': its value {words}"
    (found,) = complaint(tmp_path, f"system_envs:\n  MODE: {written}\n")
    assert found == f"job.yaml:2: system_envs.MODE: {words}"


@pytest.mark.parametrize(("written", "value"), [("0", 0), ("10", 10), ("0x10", 16), ("1_000", 1000), ("1e3", 1000)])
def test_other_numbers_are_read(tmp_path, written, value):
    file = tmp_path / "job.yaml"
    file.write_text(f"seed: {written}\n")
    assert load_config(file).seed == value


STREAM = (
    "task: sft\nsequence_length: 64\ntrain:\n  max_num_steps: 300\n  train_policy: {enable_dp_load_balancing: true}\n"
)


@pytest.mark.parametrize(
    ("text", "override", "key", "words"),
    [
        (STREAM, "max_steps=10", "max_steps", "train.max_num_steps"),
        (STREAM, "prompt=x", "prompt", "unknown key"),
        (STREAM, "rollout_batch_size=4", "rollout_batch_size", "task is sft, which makes no rollouts"),
        ("seed: 1\n", "difficulty_low_threshold=0.2", "difficulty_low_threshold", "difficulty_mask is false"),
        ("seed: 1\n", "value_clip=0.5", "value_clip", "adv_estimator is grpo, not gae"),
        (
            "seed: 1\n",
            "reference.training_args.learning_rate=1e-4",
            "reference.training_args.learning_rate",
            "this role is not trained",
        ),
    ],
)
def test_an_override_without_effect_is_refused(tmp_path, text, override, key, words):
    (found,) = complaint(tmp_path, text, [override])
    assert found.startswith(f"override '{override}': {key}: ") and words in found


def test_what_stands_in_the_file_without_effect_is_a_notice(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("value_clip: 0.5\n")
    (notice,) = load_config(file, ["seed=2"]).notices
    assert "has no effect" in notice.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response_length", 1e8),
        ("prompt_length", 10**9),
        ("sequence_length", 10**12),
        ("actor_infer.generating_args.max_new_tokens", 10**8),
        ("actor_train.model_args.architecture.vocab_size", 4 * 10**12),
        ("actor_train.model_args.architecture.hidden_size", 10**9),
        ("actor_train.model_args.architecture.ffn_hidden_size", 10**9),
        ("actor_train.model_args.architecture.num_layers", 10**9),
        ("actor_train.model_args.architecture.num_attention_heads", 10**9),
        ("actor_train.model_args.architecture.kv_channels", 10**9),
        ("actor_train.model_args.architecture.moe", {"num_experts": 10**9}),
        ("actor_train.model_args.architecture.moe", {"num_experts": 2, "ffn_hidden_size": 10**9}),
        ("rollout_batch_size", 10**12),
        ("actor_train.training_args.per_device_train_batch_size", 10**12),
    ],
)
def test_sizes_that_no_machine_holds_are_refused_by_key(key, value):
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed({key: value}))
    text = str(caught.value)
    number = value if not isinstance(value, dict) else max(value.values())
    key = key if not isinstance(value, dict) else f"{key}.{max(value, key=value.get)}"
    assert f"{key}: is {number}; it must be at most " in text and "e+" not in text.partition("at most ")[2]
