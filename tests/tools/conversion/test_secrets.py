"""Keys, from the environment or written out, do not get into converted files or their reports."""

from __future__ import annotations

import pytest
import yaml

from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, convert_file
from tests.tools.conversion.test_nemo_rl import BASE
from tests.tools.conversion.test_roll_defaults import FILES

SECRET = "sk-7f3a9"
pytestmark = pytest.mark.config


def converted(folder, origin, text):
    """The lists of a conversion as JSON. Its file loads."""
    path = folder / "file.yaml"
    path.write_text(text)
    done = convert_file(path, ORIGINS[origin])
    (folder / "job.yaml").write_text(done.to_yaml())
    assert SECRET not in done.to_yaml() and SECRET not in done.to_json()
    return done, load_config(folder / "job.yaml")


@pytest.mark.parametrize("is_set", [True, False], ids=["set", "unset"])
@pytest.mark.parametrize(
    "written",
    ["${oc.env:WANDB_API_KEY}", "${oc.env:WANDB_API_KEY,none}", "x-${oc.env:WANDB_API_KEY}", "${custom_envs.alias}",
     "${oc.env:RB_UNSET,${oc.env:WANDB_API_KEY}}", "${oc.decode:${oc.env:WANDB_API_KEY}}",
     "${oc.env:${custom_envs.of}}"],
)  # fmt: skip
def test_a_key_of_the_environment_is_not_resolved(tmp_path, monkeypatch, written, is_set):
    monkeypatch.setenv("WANDB_API_KEY", SECRET) if is_set else monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("RB_PLACE", "here")
    file = yaml.safe_load(FILES["rlvr"])
    file["custom_envs"] = {"alias": "${oc.env:WANDB_API_KEY}", "of": "WANDB_API_KEY"}
    file["system_envs"] = {"WHERE": "${oc.env:RB_PLACE}", "WHICH": written}
    file["track_with"] = "wandb"
    file["tracker_kwargs"] = {"project": "p", "login": written}
    done, job = converted(tmp_path, "roll", yaml.safe_dump(file))
    assert job.system_envs == {"WHERE": "here"} and job.tracker_kwargs == {"project": "p"}
    reasons = {one.key: one.why for one in done.left_out}
    assert "WANDB_API_KEY" in reasons["system_envs.WHICH"] and "looks like a secret" in reasons["system_envs.WHICH"]


def test_keys_written_out_are_left_out(tmp_path):
    file = yaml.safe_load(FILES["rlvr"])
    file["system_envs"] = {"HF_TOKEN": SECRET, "WHERE": "here"}
    file["track_with"] = "wandb"
    file["tracker_kwargs"] = {"project": "p", "settings": {"api_key": SECRET}}
    done, job = converted(tmp_path, "roll", yaml.safe_dump(file))
    assert job.system_envs == {"WHERE": "here"} and job.tracker_kwargs == {"project": "p"}
    reasons = {one.key: one.why for one in done.left_out}
    assert {"system_envs.HF_TOKEN", "tracker_kwargs.settings.api_key"} <= reasons.keys()
    assert all("looks like a secret" in reasons[key] for key in ("system_envs.HF_TOKEN",))


def test_a_file_of_nemo_rl_keeps_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    file = yaml.safe_load(BASE)
    file["logger"] = {"wandb_enabled": True, "wandb": {"project": "p", "api_key": SECRET, "name": "${oc.env:HF_TOKEN}"}}
    _, job = converted(tmp_path, "nemo_rl", yaml.safe_dump(file))
    assert job.tracker_kwargs == {"project": "p"}


MODEL = "actor_rollout_ref.model"
HUB = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ"


def test_a_secret_is_told_by_its_value_in_every_framework(tmp_path, monkeypatch):
    """Under names that tell nothing, and in keys of the schema."""
    monkeypatch.setenv("LOGIN", HUB)
    file = yaml.safe_load(FILES["rlvr"])
    file["system_envs"] = {"LOGIN": "${oc.env:LOGIN}", "WHERE": "here", "OTHER": HUB}
    done, job = converted(tmp_path, "roll", yaml.safe_dump(file))
    assert job.system_envs == {"WHERE": "here"} and HUB not in done.to_yaml() + done.to_json()
    for origin, line, key in (
        (
            "verl",
            f"-m verl.trainer.main_ppo trainer.project_name={HUB} actor_rollout_ref.actor.optim.lr=1",
            "trainer.project_name",
        ),
        ("verl", "-m verl.trainer.main_ppo actor_rollout_ref.model.path=http://me:pass-7@h/m", f"{MODEL}.path"),
        ("slime", f"train.py --wandb-project {HUB}", "--wandb-project"),
    ):
        path = tmp_path / "run.sh"
        path.write_text(f"python3 {line}\n")
        done = convert_file(path, ORIGINS[origin])
        assert "looks like a secret" in {one.key: one.why for one in done.left_out}[key]
        assert not any(text in done.to_yaml() + done.to_json() for text in (HUB, "pass-7"))


def test_keys_and_tokens_that_are_no_secrets_are_kept(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("python3 train.py --reward-key score --wandb-key sk-7f3a9 --eval-reward-key acc\n")
    reasons = {one.key: one.why for one in convert_file(path, ORIGINS["slime"]).left_out}
    assert "secret" in reasons["--wandb-key"]
    assert "secret" not in reasons["--reward-key"] + reasons["--eval-reward-key"]
    section = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    options = f"{section}.token_budget=4096 {section}.additional_eos_token_ids=[1,2] {section}.sort_key=length"
    model = "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=/m algorithm.adv_estimator=grpo"
    path.write_text(f"python3 -m verl.trainer.main_ppo {model} {options}\n")
    kept = convert_file(path, ORIGINS["verl"]).settings["actor_infer"]["strategy_args"]["strategy_config"]
    assert (kept["token_budget"], kept["additional_eos_token_ids"], kept["sort_key"]) == (4096, [1, 2], "length")
    script = "BUDGET_TOKEN=4096\nREWARD_KEY=score\npython3 train.py --rollout-max-response-len $BUDGET_TOKEN\n"
    path.write_text(script)
    assert convert_file(path, ORIGINS["slime"]).settings["response_length"] == 4096


def test_conversion_leaves_oc_env_as_it_found_it(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setenv("HF_TOKEN", SECRET)
    converted(tmp_path, "nemo_rl", BASE)
    assert OmegaConf.create({"a": "${oc.env:HF_TOKEN}"}).a == SECRET
