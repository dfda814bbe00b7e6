"""The command `train` with failing rewards: one message, the exit code, and no process left."""

from __future__ import annotations

import pytest

from tests.jobs.launch.commands import done, train, trained, write_job

REWARDS = "tests.jobs.rewards.reward_functions:"
SHORT = {"warmup": None, "max_steps": 1, "output_dir": "runs"}


def shown(said: str) -> list[str]:
    """The output, without progress lines."""
    return [line for line in said.splitlines() if not line.startswith(("warmup ", "rl "))]


@pytest.mark.bad_input
def test_a_reward_that_leaves_fails_the_job_with_one_message(tmp_path, report):
    text = "import sys\n\ndef reward(completion):\n    sys.exit(0)\n"
    (tmp_path / "leaving.py").write_text(text)
    code, said = trained(tmp_path, **SHORT, reward_function="leaving:reward")
    assert code == 1
    assert len(shown(said)) == 1, said
    assert shown(said)[0].startswith("error: scoring: rank 0: ") and "rank 1: " in said
    assert "reward function leaving:reward failed on sample " in said and "SystemExit: 0 at " in said
    report(shown(said)[0])


@pytest.mark.bad_input
def test_a_reward_that_leaves_on_import_is_found_before_ranks_are_started(tmp_path, report):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    code, said = trained(tmp_path, **SHORT, reward_function="leaving:reward")
    assert code == 2
    assert len(said.splitlines()) == 1, said
    assert said.startswith("error: reward function 'leaving:reward': cannot import 'leaving' (SystemExit: 0 at ")
    assert not (tmp_path / "runs").exists()
    report(said.strip())


@pytest.mark.slow
@pytest.mark.bad_input
def test_a_reward_that_never_returns_ends_the_job_at_its_limit(tmp_path, report):
    code, said = trained(tmp_path, **SHORT, reward_function=REWARDS + "never", reward_timeout=2)
    assert code == 1
    assert "did not return within 2 s on sample " in shown(said)[-1] and "raise reward_timeout" in shown(said)[-1]
    assert len(shown(said)) == 1, said
    report(shown(said)[-1])


@pytest.mark.bad_input
def test_more_processes_than_devices_named_is_an_error_without_our_launcher(tmp_path, report):
    job = write_job(tmp_path, **SHORT, actor_train__device_mapping="0-3")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    code, said = done(tmp_path, *train(job)[:-2], **place)
    assert code == 2
    assert said.startswith("error: actor_train.device_mapping names 4 devices and 2 processes were started")
    report(said.strip())
