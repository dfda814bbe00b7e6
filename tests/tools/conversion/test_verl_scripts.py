"""Scripts of verl around its settings: launchers, programs of forks, rewards of one's own, chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file, origin_of
from tests.tools.conversion.test_slime import converted as slime_converted
from tests.tools.conversion.test_slime import job_of, left_out, value_at
from tests.tools.conversion.test_verl import NEEDED, A, converted

pytestmark = pytest.mark.config

SFT = "data.train_files=/d.parquet model.path=/m data.train_batch_size=64 data.micro_batch_size_per_gpu=2 "
STEPS = "actor_train.training_args.gradient_accumulation_steps"
REWARD = "custom_reward_function"


def sft(folder: Path, launcher: str, overrides: str = "", program: str = "verl.trainer.sft_trainer") -> Conversion:
    path = folder / "sft.sh"
    path.write_text(f"{launcher} -m {program} {SFT} data.use_dynamic_bsz=False {overrides}\n")
    return convert_file(path, ORIGINS["verl"])


# ---- torchrun


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("torchrun --nproc_per_node=4", 4),
        ("torchrun --standalone --nnodes=1 --nproc-per-node 4", 4),
        ("torchrun --nnodes 2 --nproc_per_node=8", 16),
        ("N=2\ntorchrun --nnodes=$N --nproc_per_node=${NPROC:-4}", 8),
        ('ARGS=(--nnodes=2 --nproc_per_node=2)\ntorchrun "${ARGS[@]}"', 4),
        ("python3 -m torch.distributed.run --nproc_per_node=2", 2),
    ],
)
def test_torchrun_decides_the_ranks_and_so_the_batch(tmp_path, launcher, devices):
    """Whatever trainer.n_gpus_per_node says: verl's SFT trainer has the ranks that torchrun starts."""
    for keys in ("", "trainer.n_gpus_per_node=3 trainer.nnodes=5"):
        done = sft(tmp_path, launcher, keys)
        assert done.settings["actor_train"]["device_mapping"] == f"list(range(0,{devices}))"
        assert value_at(done.settings, STEPS) == 64 // (2 * devices)
        assert not any("device" in text for text in done.missing)


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        ("torchrun --nproc_per_node=$1", "$1 is an argument of the script"),
        ("torchrun --nproc_per_node $NPROC", "NPROC has no value in this file"),
        ("torchrun --nproc_per_node=gpu", "gpu is no number of processes"),
        ("torchrun --nnodes=1:4 --nproc_per_node=2", "1:4 is no number of processes"),
    ],
)
def test_a_number_of_ranks_that_the_file_does_not_tell_is_asked_for(tmp_path, launcher, why):
    done = sft(tmp_path, launcher)
    key = "trainer.nnodes" if "1:4" in launcher else "trainer.n_gpus_per_node"
    assert "line 1: --n" in left_out(done, "refused")[key] and why in left_out(done, "refused")[key]
    assert any(text.startswith("actor_train.device_mapping: the file does not tell") for text in done.missing)
    known = left_out(sft(tmp_path, launcher, "trainer.n_gpus_per_node=4 trainer.nnodes=1"), "refused")
    assert why in known[key], "the trainer's keys do not decide it"


def test_devices_of_rays_trainer_that_the_file_does_not_tell_are_asked_for(tmp_path):
    done = converted(tmp_path, "trainer.n_gpus_per_node=$GPUS")
    assert "GPUS has no value" in left_out(done, "refused")["trainer.n_gpus_per_node"]
    assert any("the file does not tell the number of devices, and 8 are assumed" in text for text in done.missing)
    assert not any("device_mapping" in text for text in converted(tmp_path, "trainer.n_gpus_per_node=4").missing)


# ---- programs


@pytest.mark.parametrize(
    "program",
    ["verl_tool.trainer.main_ppo", "recipe.dapo.main_dapo", "recipe.prime.main_prime", "mypkg.verl.trainer.main_ppo",
     "verl.experimental.fully_async_policy.fully_async_main"],
)  # fmt: skip
def test_programs_of_forks_and_recipes_convert_with_a_notice(tmp_path, program):
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m {program} {NEEDED} {A}.ppo_epochs=2 +verl_tool.max_turns=3\n")
    assert origin_of(path) is ORIGINS["verl"]
    done = convert_file(path, ORIGINS["verl"])
    assert done.settings["ppo_epochs"] == 2
    notice = left_out(done, "refused")[program]
    assert "is another program" in notice and "verl.trainer.main_ppo" in notice
    assert "verl_tool.max_turns" in left_out(done, "unknown")


def test_programs_by_file_and_of_sft(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"python3 recipe/dapo/main_dapo.py {NEEDED}\n")
    assert origin_of(path) is ORIGINS["verl"]
    assert "recipe/dapo/main_dapo.py" in left_out(convert_file(path, ORIGINS["verl"]), "refused")
    done = sft(tmp_path, "torchrun --nproc_per_node=2", program="mine.trainer.sft_trainer")
    assert done.settings["task"] == "sft"
    assert "verl.trainer.sft_trainer" in left_out(done, "refused")["mine.trainer.sft_trainer"]
    assert "verl.trainer.sft_trainer" not in left_out(sft(tmp_path, "torchrun --nproc_per_node=2"))


# ---- rewards


@pytest.mark.parametrize("section", [REWARD, f"reward.{REWARD}"])
def test_a_reward_function_of_ones_own_is_kept(tmp_path, section):
    given = f"{section}.path=rewards/mine.py {section}.name=score_it +{section}.reward_kwargs.scale=2.0"
    done = converted(tmp_path, given)
    assert done.settings["reward_function"] == "verl_compute_score"
    args = {"path": "rewards/mine.py", "name": "score_it", "reward_kwargs": {"scale": 2.0}}
    assert done.settings["reward_args"] == args
    assert value_at(done.settings, "actor_train.data_args.response") == "reward_model.ground_truth"
    assert not left_out(done, "refused") and job_of(done, tmp_path).has_reward
    job_of(converted(tmp_path, f"{section}.path=m.py reward.reward_manager.name=batch"), tmp_path)


def test_a_secret_of_a_reward_function_is_not_kept(tmp_path):
    given = f"{REWARD}.path=m.py +{REWARD}.reward_kwargs.api_key=abc +{REWARD}.reward_kwargs.sort_key=len"
    done = converted(tmp_path, given)
    assert done.settings["reward_args"]["reward_kwargs"] == {"sort_key": "len"}
    assert "secret" in str(left_out(done, "refused")) and "abc" not in done.to_yaml() + done.to_json()


def test_slimes_reward_function_is_kept(tmp_path):
    options = "--custom-rm-path mine.rewards.score --reward-key score --metadata-key info --label-key label"
    done = slime_converted(tmp_path, f"{options} --rm-type math")
    assert done.settings["reward_function"] == "slime_custom_rm"
    args = {"path": "mine.rewards.score", "reward_key": "score", "metadata_key": "info", "options": {"rm_type": "math"}}
    assert done.settings["reward_args"] == args
    assert value_at(done.settings, "actor_train.data_args.response") == "label"
    assert job_of(done, tmp_path).has_reward
    alone = left_out(slime_converted(tmp_path, "--rm-type math --reward-key score"), "refused")
    assert "with --custom-rm-path" in alone["--reward-key"]


# ---- chat templates and schedules


def test_tools_and_thinking_reach_the_chat_template(tmp_path):
    keys = "data.tools_key=functions data.enable_thinking_key=think +data.enable_thinking_default=False"
    done = sft(tmp_path, "torchrun --nproc_per_node=2", f"{keys} +data.apply_chat_template_kwargs.effort=low")
    args = job_of(done, tmp_path).actor_train.data_args
    assert args.tools == "functions" and args.chat_template_columns == {"enable_thinking": "think"}
    assert args.chat_template_kwargs == {"effort": "low", "enable_thinking": False}
    plain = sft(tmp_path, "torchrun --nproc_per_node=2", "data.enable_thinking_default=none")
    assert "chat_template_kwargs" not in plain.settings["actor_train"]["data_args"]
    rl = converted(tmp_path, "+data.apply_chat_template_kwargs.enable_thinking=False data.tools_key=functions")
    args = job_of(rl, tmp_path).actor_train.data_args
    assert args.chat_template_kwargs == {"enable_thinking": False} and args.tools == "tools"
    assert "SFT trainer only" in left_out(rl, "idle")["data.tools_key"]


def test_slimes_tools_and_variables_reach_the_chat_template(tmp_path):
    options = """--apply-chat-template --tool-key functions --apply-chat-template-kwargs '{"enable_thinking": false}'"""
    args = job_of(slime_converted(tmp_path, options), tmp_path).actor_train.data_args
    assert args.tools == "functions" and args.chat_template_kwargs == {"enable_thinking": False}
    bad = slime_converted(tmp_path, "--apply-chat-template-kwargs '{enable'")
    assert "is no JSON" in left_out(bad, "refused")["--apply-chat-template-kwargs"]


def test_cycles_of_a_cosine(tmp_path):
    """Half a cycle is Megatron's; other numbers are in `test_verl.REFUSED`, and without a cosine they mean nothing."""
    key = f"{A}.optim.num_cycles"
    half = converted(tmp_path, f"{A}.optim.lr_scheduler_type=cosine {key}=0.5")
    assert key not in left_out(half) and job_of(half, tmp_path)
    assert "is no cosine" in left_out(converted(tmp_path, f"{key}=2"), "idle")[key]
    done = sft(tmp_path, "torchrun --nproc_per_node=2", "optim.lr_scheduler_type=cosine optim.num_cycles=1.5")
    assert "1.5: Megatron's cosine falls once" in left_out(done, "refused")["optim.num_cycles"]
    critic = "algorithm.adv_estimator=gae critic.optim.lr_scheduler_type=cosine critic.optim.num_cycles=1"
    assert "falls once" in left_out(converted(tmp_path, critic), "refused")["critic.optim.num_cycles"]


def test_a_key_of_images_in_the_file_tells_of_images(tmp_path):
    sees = "actor_rollout_ref.model.path=/m/GLM-4.1V data.image_key=pictures"
    for overrides, images in ((sees, "pictures"), ("", None)):
        assert value_at(converted(tmp_path, overrides).settings, "actor_train.data_args.images") == images


def test_asynchronous_trainers_are_refused_and_the_synchronous_one_is_not(tmp_path):
    for mode in ("separate_async", "colocate_async"):
        reason = left_out(converted(tmp_path, f"trainer.v1.trainer_mode={mode}"), "refused")["trainer.v1.trainer_mode"]
        assert reason.startswith(f"{mode}: verl's asynchronous trainers are not converted")
    assert "trainer.v1.trainer_mode" not in left_out(converted(tmp_path, "trainer.v1.trainer_mode=sync"), "refused")


def test_only_verls_manager_dapo_reads_the_penalty_for_long_responses(tmp_path):
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    penalty = f"+{key}.enable=True +{key}.len=64 +{key}.penalty_factor=0.5 +reward.reward_kwargs.max_resp_len=128"
    for manager, reads in (("naive", False), ("dapo", True)):
        done = converted(tmp_path, f"{penalty} reward.reward_manager.name={manager}")
        assert ("overlong_buffer" in done.settings) == reads
        assert (key in left_out(done, "idle")) != reads


def test_a_warm_up_begins_at_automodels_share_of_the_rate(tmp_path):
    done = sft(
        tmp_path,
        "torchrun --nproc_per_node=2",
        "engine=automodel optim.lr=2e-5 optim.init_lr_ratio=0.1 optim.lr_warmup_steps=9",
    )
    assert value_at(done.settings, "actor_train.training_args.lr_warmup_init") == 2e-6


def test_a_program_of_verls_by_its_path_is_verls_own(tmp_path):
    for program, is_own in (("verl/trainer/main_ppo.py", True), ("my/trainer/main_ppo.py", False)):
        path = tmp_path / "run.sh"
        path.write_text(f"python3 {program} {NEEDED}\n")
        told = [one.key for one in convert_file(path, ORIGINS["verl"]).left_out]
        assert (program in told) != is_own


def test_the_home_directory_belongs_to_its_own_words(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f'ARGS="actor_rollout_ref.model.path=$HOME/m {NEEDED}"\npython3 -m verl.trainer.main_ppo $ARGS\n')
    changed = {one.key: one.meaning for one in convert_file(path, ORIGINS["verl"]).changed if "$HOME" in one.meaning}
    assert list(changed) == ["actor_rollout_ref.model.path"]


def test_slimes_groups_of_samples_are_kept(tmp_path):
    done = slime_converted(tmp_path, "--custom-rm-path my.rewards.score --group-rm")
    assert done.settings["reward_args"] == {"path": "my.rewards.score", "grouped": True}
