"""Values whose names look like secrets reach no file, tracker, error or Ray's display; roles get them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import config_from_dict, load_config
from roll_batching.secret_names import REDACTED
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

SECRET = "sk-7f3a9"
BY_VALUE = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ"
"""A secret under a name that tells nothing."""


def job_of(folder, **changes: Any):
    return settings(
        folder,
        system_envs={"WANDB_API_KEY": SECRET, "NCCL_DEBUG": "WARN", "HUB_LOGIN": BY_VALUE},
        actor_train__system_envs={"HF_TOKEN": SECRET + "b"},
        track_with="wandb",
        tracker_kwargs={"mode": "offline", "settings": {"api_key": SECRET}},
        reward_function="tests.jobs.run.test_secrets:judged",
        reward_args={"api_key": SECRET, "headers": [{"Authorization": SECRET}], "reward_key": "score"},
        **changes,
    )


def judged(completion, *, api_key, headers, reward_key) -> float:
    """A reward that needs a key, as a judge does."""
    assert (api_key, headers, reward_key) == (SECRET, [{"Authorization": SECRET}], "score")
    return float(len(completion.response) % 2)


def files_with_secrets(folder):
    texts = ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
    return [path for path, text in texts if SECRET.encode() in text or BY_VALUE.encode() in text]


def test_a_run_leaves_no_secret_in_its_folder(tmp_path, report):
    """Its reward and its ranks have had them."""
    write_data(tmp_path)
    job = job_of(tmp_path, warmup=None, max_steps=1, eval_samples=0, save_steps=1)
    del job["track_with"], job["tracker_kwargs"]
    (errors,) = run_ranks(1, "tests.jobs.run.test_secrets:run_twice", job)
    folder = tmp_path / "runs" / "tiny"
    assert list(folder.rglob("job.json")) and (folder / "rollouts.jsonl").exists()
    assert files_with_secrets(folder) == []
    written = yaml.safe_load((folder / "config.yaml").read_text())
    kept = {"api_key": REDACTED, "headers": [{"Authorization": REDACTED}], "reward_key": "score"}
    assert written["reward_args"] == kept
    assert written["system_envs"] == {"WANDB_API_KEY": REDACTED, "NCCL_DEBUG": "WARN", "HUB_LOGIN": REDACTED}
    assert written["tokenizer"]["eos_token"] == "$", "keys of the schema are no secrets"
    assert "reward_args.api_key" in errors and "was not saved with the run" in errors
    report(errors)


def run_twice(job):
    """On a rank: the job, then what evaluating its model says."""
    from pathlib import Path

    from roll_batching.jobs.run.saved_model import open_checkpoint, tokenizer_of
    from tests.jobs.rl.jobs import run

    run(job)
    model = open_checkpoint(Path(job["output_dir"]) / job["exp_name"])
    tokenizer = tokenizer_of(model)
    with pytest.raises(ConfigError) as caught:
        model.evaluate([], tokenizer, model.sampling(tokenizer), samples=1, shown=0)
    return str(caught.value)


def test_a_written_configuration_loads_and_trains_only_once_its_secrets_are_given(tmp_path):
    from roll_batching.jobs.config.plain_data import without_secrets

    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(without_secrets(config_from_dict(job_of(tmp_path)).to_dict())))
    assert SECRET not in file.read_text()
    job = load_config(file)
    with pytest.raises(ConfigError) as caught:
        job.check_runnable()
    for key in (
        *(
            "system_envs.WANDB_API_KEY",
            "system_envs.HUB_LOGIN",
            "actor_train.system_envs.HF_TOKEN",
            "tracker_kwargs.settings.api_key",
        ),
        *("reward_args.api_key", "reward_args.headers.0.Authorization"),
    ):
        assert f"{key}: " in str(caught.value).replace("[0]", ".0")


def test_a_tracker_gets_its_options_whole_and_the_settings_without_secrets(tmp_path, monkeypatch):
    from roll_batching.jobs.run import recorder

    given = []
    monkeypatch.setattr(recorder, "tracker_of", lambda name: object())
    monkeypatch.setattr(recorder, "TrackedRun", lambda *arguments, resumes: given.append(arguments))
    config = config_from_dict(job_of(tmp_path))
    recorder.RunRecorder(config, enabled=False)._tracker(resumes=False)
    ((_, _, _, shown, options),) = given
    assert SECRET not in repr(shown) and BY_VALUE not in repr(shown) and options["settings"] == {"api_key": SECRET}
    assert config.environment()["WANDB_API_KEY"] == SECRET and config.to_dict()["reward_args"]["api_key"] == SECRET


def test_roles_that_disagree_on_a_key_are_told_without_it(tmp_path):
    job = job_of(tmp_path, reference__system_envs={"HF_TOKEN": SECRET + "c", "A": "1"})
    job["actor_train"]["system_envs"]["A"] = "2"
    with pytest.raises(ConfigError) as caught:
        config_from_dict(job)
    assert "system_envs.HF_TOKEN" in str(caught.value) and "share one process" in str(caught.value)
    assert SECRET not in str(caught.value) and "'2'" in str(caught.value)


@pytest.mark.parametrize("value", [[SECRET], {"a": SECRET}], ids=["list", "section"])
def test_a_key_of_the_wrong_kind_is_refused_without_its_value(tmp_path, value):
    job = job_of(tmp_path)
    job["system_envs"] = {"WANDB_API_KEY": value}
    with pytest.raises(ConfigError, match="system_envs.WANDB_API_KEY") as caught:
        config_from_dict(job)
    assert SECRET not in str(caught.value)


def test_an_override_of_a_key_is_refused_without_its_value(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path)))
    with pytest.raises(ConfigError, match="override 'actor_train.api_key=<secret, not kept>'") as caught:
        load_config(file, [f"actor_train.api_key={SECRET}"])
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="override 'actor_train.login=<secret, not kept>'") as caught:
        load_config(file, [f"actor_train.login={BY_VALUE}"])
    assert BY_VALUE not in str(caught.value)
    with pytest.raises(ConfigError, match="override 'actor_train.sort_key=length'"):
        load_config(file, ["actor_train.sort_key=length"])


def test_a_url_with_a_password_is_neither_written_nor_shown(tmp_path):
    """Keys of the schema are told by their values too."""
    from roll_batching.jobs.config.plain_data import withheld_problems, without_secrets

    job = settings(tmp_path, pretrain="https://user:pass-7@hub/model", exp_name="9f86d081884c7d659a2feaa0c55ad015")
    written = without_secrets(config_from_dict(job).to_dict())
    assert "pass-7" not in repr(written) and written["exp_name"] == job["exp_name"]
    assert ("pretrain",) in [problem.path for problem in withheld_problems(written)]
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**job, "task": "https://user:pass-7@hub"})
    assert "pass-7" not in str(caught.value)


def test_what_a_checkpoint_keeps_does_not_depend_on_keys(tmp_path):
    from roll_batching.jobs.run.job_digests import settings_of

    job = job_of(tmp_path)
    before = settings_of(config_from_dict(job))
    job["actor_train"]["system_envs"]["HF_TOKEN"] = job["reward_args"]["api_key"] = "another"
    assert settings_of(config_from_dict(job)) == before
