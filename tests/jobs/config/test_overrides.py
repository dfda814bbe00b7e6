"""`path.to.key=value` on the command line, `${...}` in a file, and numbers as people write them."""

from __future__ import annotations

import pytest

from roll_batching.jobs.config import ConfigFileError, load_config


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "exp_name: base\n"
        "response_length: 64\n"
        "output_dir: runs/${exp_name}\n"
        "actor_train:\n"
        "  training_args:\n"
        "    learning_rate: 1e-5\n"
        "  device_mapping: [0, 1]\n"
        "actor_infer:\n"
        "  generating_args:\n"
        "    max_new_tokens: ${response_length}\n"
        "reference: ~\n"
    )
    return path


def test_values_are_read_as_yaml(file):
    config = load_config(
        file,
        [
            "actor_train.training_args.learning_rate=3e-4",
            "actor_train.infer_batch_size=7",
            "actor_train.device_mapping=0-3",
            "control=shuffled",
            "actor_train.system_envs.WHERE=here",
            "max_grad_norm=0.5",
        ],
    )
    assert config.actor_train.training_args.learning_rate == 3e-4
    assert config.actor_train.training_args.max_grad_norm == 0.5
    assert config.actor_train.infer_batch_size == 7
    assert config.world_size == 4
    assert config.control == "shuffled"
    assert config.environment() == {"WHERE": "here"}


def test_an_override_makes_the_sections_it_needs(file):
    config = load_config(file, ["reference.infer_batch_size=3", "use_kl_loss=true", "kl_loss_coef=0.1"])
    assert config.reference.infer_batch_size == 3
    assert config.kl_coef == 0.1


def test_references_follow_overrides(file):
    config = load_config(file, ["response_length=32", "exp_name=other"])
    assert config.actor_infer.generating_args.max_new_tokens == 32
    assert config.output_dir == "runs/other"


def test_numbers_without_a_point_are_numbers(file):
    assert load_config(file).actor_train.training_args.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor_train.infer_batchsize=3",
            "override 'actor_train.infer_batchsize=3': actor_train.infer_batchsize: unknown key; "
            "did you mean 'infer_batch_size'?",
        ),
        ("max_steps=-1", "override 'max_steps=-1': max_steps: is -1; it must be at least 0"),
        ("max_steps", "override 'max_steps': an override is written path.to.key=value"),
        ("exp_name.sub=3", "override 'exp_name.sub=3': exp_name is 'base', which has no key 'sub'"),
        (
            "actor_train.device_mapping.5=3",
            "override 'actor_train.device_mapping.5=3': actor_train.device_mapping is a list of 2 items; "
            "'5' is not one",
        ),
    ],
)
@pytest.mark.bad_input
def test_errors_name_the_override(file, override, expected):
    with pytest.raises(ConfigFileError) as caught:
        load_config(file, [override])
    assert [str(problem) for problem in caught.value.problems] == [expected]


def test_a_reference_to_itself_is_an_error(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("exp_name: ${output_dir}\noutput_dir: ${exp_name}\n")
    with pytest.raises(ConfigFileError, match="refers to itself"):
        load_config(path)


def test_the_resolved_configuration_loads_again(file, tmp_path):
    import yaml

    config = load_config(file, ["actor_train.training_args.learning_rate=3e-4"])
    again = tmp_path / "resolved.yaml"
    again.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(again).to_dict() == config.to_dict()
