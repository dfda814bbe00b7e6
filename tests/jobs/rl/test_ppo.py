"""PPO with a critic as a job: its metrics, its warm-up, resuming, what it starts from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks

HERE = "tests.jobs.rl.test_ppo:"
LENGTH = "tests.jobs.rl.jobs:length"
CRITIC = {
    "training_args": {"learning_rate": 2e-3, "per_device_train_batch_size": 2, "lr_scheduler_type": "linear"},
    "use_sequence_packing": True,
    "sequence_packing_args": {"max_packed_sequence_length_train": 96, "max_packed_sequence_length_forward": 160},
}


def ppo(folder: Path, name: str = "ppo", **changes: Any) -> dict[str, Any]:
    """A tiny PPO job: a reward that differs between responses, one warm-up step of the critic, four steps in all."""
    given = {
        "exp_name": name,
        "adv_estimator": "gae",
        "critic": CRITIC,
        "lambd": 0.95,
        "value_clip": 0.5,
        "whiten_advantages": True,
        "critic_warmup": 1,
        "max_steps": 4,
        "eval_samples": 0,
        "reward_function": LENGTH,
        "num_return_sequences_in_group": 1,
        "rollout_batch_size": 8,
    }
    return settings(folder, **(given | changes))


def rows_of(folder: Path, name: str = "ppo") -> list[dict[str, Any]]:
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    times = {*TIMES, "critic_train_seconds"}
    return [{key: value for key, value in row.items() if key not in times} for row in rows]


def run_and_watch(payload: dict[str, Any]) -> dict[str, Any]:
    """On a rank: the whole job; what the critic started from and how the policy moved by RL step."""
    import torch

    from roll_batching.jobs.rl.critic import Critic
    from roll_batching.jobs.rl.grpo import Grpo
    from roll_batching.modeling.head import gpt_of
    from tests.jobs.rl.jobs import run

    seen: dict[str, Any] = {"moved": [], "equal": None}

    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": parameter.detach().clone()
            for index, chunk in enumerate(strategy.chunks)
            for name, parameter in gpt_of(chunk).named_parameters()
        }

    start, step = Critic.__init__, Grpo._step

    def started(self: Any, config: Any, policy: Any) -> None:
        start(self, config, policy)
        own, theirs = weights(self.strategy), weights(policy)
        heads = [name for name in own if name.endswith("output_layer.weight")]
        seen["heads"] = [(tuple(own[name].shape), float(own[name].abs().max())) for name in heads]
        seen["equal"] = all(torch.equal(own[name], theirs[name]) for name in own if name not in heads)
        # What the optimizer steps on are these weights, not those before the copy.
        self.strategy.optimizer.reload_model_params()

    def stepped(self: Any, number: int) -> None:
        before = weights(self.strategy)
        step(self, number)
        after = weights(self.strategy)
        seen["moved"].append(any(not torch.equal(before[name], after[name]) for name in before))

    Critic.__init__, Grpo._step = started, stepped  # type: ignore[method-assign]
    try:
        run(payload)
    finally:
        Critic.__init__, Grpo._step = start, step  # type: ignore[method-assign]
    return seen


def test_a_critic_learns_from_its_first_step_and_the_policy_after_the_warm_up(tmp_path, report) -> None:
    write_data(tmp_path)
    (seen,) = run_ranks(1, HERE + "run_and_watch", ppo(tmp_path, critic_warmup=2))
    assert seen == {"moved": [False, False, True, True], "equal": True, "heads": [((1, 32), 0.0)]}
    rows = [row for row in rows_of(tmp_path) if row["phase"] == "rl"]
    assert ["loss" in row for row in rows] == [False, False, True, True]
    assert rows[0]["critic_value"] != 0, "four optimizer steps, of which the first starts at 0"
    assert all(row["critic_grad_norm"] > 0 and row["critic_tokens"] > 0 for row in rows)
    assert rows[0]["value_explained_variance"] == pytest.approx(0, abs=1e-9), "all values are 0"
    assert rows[-1]["critic_error"] < rows[0]["critic_error"]
    # 8 samples, 2 per optimizer step: 4 steps in each RL step, the schedule spans all 16.
    assert rows[0]["critic_lr"] > rows[-1]["critic_lr"] > 0
    report(f"critic: squared error {[round(row['critic_error'], 3) for row in rows]}")


def test_a_critic_of_the_policys_model_starts_from_its_weights_whatever_is_frozen() -> None:
    from roll_batching.jobs.rl.critic import is_same_model
    from roll_batching.settings.model import ModelArgs

    policy = ModelArgs(model_name_or_path="/models/one", freeze_module_prefix=("embedding",))
    critic = ModelArgs(model_name_or_path="/models/one", value_head=True, value_head_std=0.1)
    assert is_same_model(critic, policy)
    assert not is_same_model(critic.model_copy(update={"model_name_or_path": "/models/two"}), policy)


def head_of_the_critic(payload: dict[str, Any]) -> list[list[float]]:
    """On a rank: the value head of the job's critic as it is built, if this rank has it."""
    import torch

    from roll_batching.jobs.config.loader import config_from_dict
    from roll_batching.jobs.objectives.from_config import critic_role
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(critic_role(config_from_dict(payload), 1), seed=payload["seed"])
    strategy.initialize()
    named = [pair for chunk in strategy.chunks for pair in gpt_of(chunk).named_parameters()]
    heads = [parameter for name, parameter in named if name == "output_layer.weight"]
    return [head.detach().to(torch.float64)[0].tolist() for head in heads]


def test_a_random_value_head_is_the_same_in_every_layout(tmp_path) -> None:
    job = ppo(tmp_path, critic=CRITIC | {"model_args": {"value_head_std": 0.5}}, seed=3)
    ((whole,),) = run_ranks(1, HERE + "head_of_the_critic", job)
    assert 0.3 < torch_std(whole) < 0.7, "normal, with the given deviation"
    for sizes in ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}):
        job["actor_train"]["strategy_args"] = {"strategy_config": sizes}
        heads = [head for found in run_ranks(2, HERE + "head_of_the_critic", job) for head in found]
        assert heads and all(head == whole for head in heads)
    job["seed"] = 4
    assert whole not in [head for found in run_ranks(2, HERE + "head_of_the_critic", job) for head in found]


def torch_std(values: list[float]) -> float:
    import torch

    return float(torch.tensor(values).std())


def test_the_critic_makes_the_passes_of_critic_epochs(tmp_path) -> None:
    """Each pass makes its 4 mini-batches, of the same samples, and the schedule spans all of them."""
    write_data(tmp_path)
    for name, epochs in (("once", 1), ("thrice", 3)):
        run_ranks(1, "tests.jobs.rl.jobs:run", ppo(tmp_path, name, critic_epochs=epochs, max_steps=2))
    once, thrice = (next(row for row in rows_of(tmp_path, name) if row["phase"] == "rl") for name in ("once", "thrice"))
    assert thrice["critic_tokens"] == 3 * once["critic_tokens"]
    config = config_from_dict(ppo(tmp_path, critic_epochs=3))
    from roll_batching.jobs.objectives.from_config import critic_role

    assert critic_role(config, 1).training_args.max_steps == 48, "4 RL steps of 3 passes of 4 mini-batches"


def test_a_mean_over_rollouts_of_one_sample_is_the_mean_over_samples(tmp_path) -> None:
    """In the policy's loss and the critic's."""
    write_data(tmp_path)
    for name, mode in (("rollouts", "rollout-token-mean"), ("samples", "seq-mean-token-mean")):
        run_ranks(1, "tests.jobs.rl.jobs:run", ppo(tmp_path, name, loss_agg_mode=mode, max_steps=2))
    ours, theirs = (
        [row for row in rows_of(tmp_path, name) if row["phase"] == "rl"][-1] for name in ("rollouts", "samples")
    )
    for column in ("loss", "critic_loss", "grad_norm"):
        assert ours[column] == pytest.approx(theirs[column], rel=1e-5) and ours[column] != 0


@pytest.mark.slow
def test_resumed_to_the_bit_on_two_ranks(tmp_path) -> None:
    """A critic with its optimizer sharded, warm-up, and the KL divergence in the reward; resumed in its warm-up."""
    write_data(tmp_path)
    sharded = {"strategy_config": {"use_distributed_optimizer": True}}
    options = {
        "add_token_level_kl": True,
        "reference": {},
        "target_kl": 0.1,
        "critic_warmup": 2,
        "save_steps": 1,
        "critic": CRITIC | {"strategy_args": sharded},
        "actor_train__strategy_args": sharded,
    }
    run_ranks(2, "tests.jobs.rl.jobs:run", ppo(tmp_path, "straight", **options))
    run_ranks(2, "tests.jobs.rl.jobs:run", ppo(tmp_path, "resumed", **options))
    for step in (1, 3):
        other = tmp_path / "runs" / "resumed" / "checkpoints" / f"rl-{step:06d}"
        job = ppo(tmp_path, "resumed", **options, resume_from_checkpoint=str(other))
        run_ranks(2, "tests.jobs.rl.jobs:run", job)
        assert rows_of(tmp_path, "resumed") == rows_of(tmp_path, "straight")


@pytest.mark.bad_input
def test_a_checkpoint_without_a_critic_is_refused(tmp_path, report) -> None:
    write_data(tmp_path)
    plain = {"adv_estimator": "reinforce", "critic": None, "critic_warmup": 0, "value_clip": None, "save_steps": 2}
    run_ranks(1, "tests.jobs.rl.jobs:run", ppo(tmp_path, "plain", max_steps=2, **plain))
    job = ppo(tmp_path, "with", resume_from_checkpoint=str(tmp_path / "runs" / "plain"))
    (text,) = run_ranks(1, "tests.jobs.rl.jobs:refusal", job)
    assert text.startswith("CheckpointError") and "critic" in text
    report(text)


@pytest.mark.bad_input
def test_a_reward_that_is_no_number_ends_the_job_before_the_critic_learns_from_it(tmp_path, report) -> None:
    write_data(tmp_path)
    job = ppo(tmp_path, reward_function="tests.jobs.rl.jobs:nan_for_one", rollout_batch_size=8)
    (text,) = run_ranks(1, "tests.jobs.rl.jobs:refusal", job)
    assert text.startswith("DataError") and "the reward is nan" in text
    assert not [row for row in rows_of(tmp_path) if row["phase"] == "rl"]
    report(text)


SMALLER = {"vocab_size": 9, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 2}
REFUSED = {
    "no critic": ({"critic": None}, "adv_estimator", "needs the role `critic`"),
    "another layout": (
        {"critic__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}}},
        "critic.strategy_args.strategy_config.tensor_model_parallel_size",
        "shares its parallel sizes for now",
    ),
    "other devices": (
        {"critic__device_mapping": [2, 3], "actor_train__device_mapping": [0, 1]},
        "critic.device_mapping",
        "shares its devices for now",
    ),
    "an engine": ({"critic__strategy_args": {"strategy_name": "megatron_infer"}}, "critic", "cannot train the critic"),
    "no value head": ({"critic__model_args": {"value_head": False}}, "critic.model_args.value_head", "is false"),
    "a policy with a value head": (
        {"actor_train__model_args__value_head": True},
        "actor_train.model_args.value_head",
        "only the role `critic`",
    ),
    "a deviation of the policy's head": (
        {"actor_train__model_args__value_head_std": 0.02},
        "actor_train.model_args.value_head_std",
        "only the role `critic`",
    ),
    "a smaller vocabulary": (
        {"critic__model_args": {"architecture": SMALLER}},
        "critic.model_args.architecture.vocab_size",
        "which the critic reads",
    ),
    "a negative deviation": (
        {"critic__model_args": {"value_head_std": -0.1}},
        "critic.model_args.value_head_std",
        "at least 0",
    ),
    "no pass": ({"critic_epochs": 0}, "critic_epochs", "at least 1"),
    "a warm-up without end": ({"critic_warmup": 4}, "critic_warmup", "no step would train the policy"),
    "a lambda above 1": ({"lambd": 1.5}, "lambd", "it must be at most 1"),
    "no number": ({"value_clip": float("nan")}, "value_clip", "finite"),
    "a negative clip": ({"value_clip": -1}, "value_clip", "above 0"),
    "groups without advantages": ({"drop_zero_advantage_groups": True}, "drop_zero_advantage_groups", "the critic"),
    "ROLL's placement": ({"batch_balance": True}, "batch_balance", "drawn over all ranks"),
    "no cap": ({"critic": {"use_dynamic_batching": True}}, "critic.max_tokens_per_microbatch_in_train", "is missing"),
    "a key of another role": ({"critic__logprob_plann": "own"}, "critic.logprob_plann", "did you mean"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_a_critic_that_cannot_be_is_refused_with_its_key(name: str, tmp_path, report) -> None:
    changes, path, words = REFUSED[name]
    job = ppo(tmp_path)
    job["critic"] = {key: dict(value) if isinstance(value, dict) else value for key, value in CRITIC.items()}
    job |= {key: value for key, value in changes.items() if "__" not in key}
    from tests.support.tiny_job import with_changes

    with_changes(job, {key: value for key, value in changes.items() if "__" in key})
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job)
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    (message,) = [text for key, text in found.items() if key.startswith(path)]
    assert words in message
    report(f"{name}: {message}")


@pytest.mark.config
def test_a_critic_without_gae_is_not_built_and_its_keys_have_notices(tmp_path) -> None:
    job = ppo(tmp_path, adv_estimator="reinforce", lambd=0.9)
    notices = {notice.path: notice.text for notice in config_from_dict(job).notices}
    assert "is not built: adv_estimator is reinforce, not gae" in notices["critic"]
    for key in ("value_clip", "critic_warmup", "lambd"):
        assert "adv_estimator is reinforce, not gae" in notices[key]
    quiet = ppo(tmp_path)
    assert not [notice.path for notice in config_from_dict(quiet).notices if notice.path.startswith("critic")]


@pytest.mark.config
def test_what_a_critic_takes_from_actor_train(tmp_path) -> None:
    config = config_from_dict(ppo(tmp_path, max_grad_norm=0.25, actor_train__backend_timeout=2))
    critic, train = config.critic, config.actor_train
    assert critic is not None and critic.model_args.value_head and not train.model_args.value_head
    assert critic.model_args.architecture == train.model_args.architecture
    assert critic.backend_timeout == 2, "also the limit of its packing algorithm"
    assert critic.training_args.max_grad_norm == 0.25 and critic.training_args.learning_rate == 2e-3
    assert critic.batching().infer.max_tokens == 160 and critic.batching().train.max_tokens == 96
    from roll_batching.jobs.objectives.from_config import critic_role, schedule_of

    assert critic_role(config, 1).training_args.max_steps == 16, "4 RL steps of 4 mini-batches"
    assert schedule_of(config, 1).max_steps == 9, "3 of them with 3 mini-batches of the policy"
