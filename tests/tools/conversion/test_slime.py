"""Scripts of slime: options, slime's own defaults, and what is left out by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job import JobConfig
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file, origin_of

pytestmark = pytest.mark.config

NEEDED = "--hf-checkpoint /m --rollout-batch-size 16 --num-rollout 10 --rollout-max-response-len 512 --colocate"


def converted(folder: Path, options: str, program: str = "train.py", before: str = "") -> Conversion:
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{before}\nray job submit -- python3 {program} \\\n  {NEEDED} \\\n  {options}\n")
    return convert_file(path, ORIGINS["slime"])


def job_of(done: Conversion, folder: Path) -> JobConfig:
    (folder / "job.yaml").write_text(done.to_yaml())
    return load_config(folder / "job.yaml")


def value_at(settings: dict[str, Any], key: str) -> Any:
    here: Any = settings
    for part in key.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


def left_out(done: Conversion, *kinds: Any) -> dict[str, str]:
    return {one.key: one.why for one in done.left_out if not kinds or one.kind in kinds}


def test_a_whole_script(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL_ARGS=(\n  --num-layers 2\n  --swiglu\n)\n")
    path = tmp_path / "train.sh"
    path.write_text(
        """
ROOT="$(cd "$(dirname "$0")" && pwd)"
source "$ROOT/models/small.sh"
GROUP=${GROUP:-8}
DATA=(
  --prompt-data /data/sums.jsonl   # our own file
  --input-key question
  --label-key sum
  --rollout-shuffle
  --rm-type math
)
PERF=(
  --tensor-model-parallel-size 2
  --context-parallel-size 2
  --sequence-parallel
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
  # --log-probs-max-tokens-per-gpu 1
)
LOSS=( --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-kl-loss --kl-loss-coef 0.01
       --kl-loss-type low_var_kl )
python3 /somewhere/train.py --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /m \\
  --num-rollout 20 --rollout-batch-size 16 --n-samples-per-prompt $GROUP --num-steps-per-rollout 2 \\
  --rollout-max-response-len 1024 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6 \\
  --balance-data --lr-decay-style cosine --lr-warmup-fraction 0.1 \\
  "${MODEL_ARGS[@]}" ${DATA[@]} ${PERF[@]} ${LOSS[@]}
"""
    )
    assert origin_of(path) is ORIGINS["slime"]
    done = convert_file(path, ORIGINS["slime"])
    wanted = {
        "actor_train.use_sequence_packing": True,
        "actor_train.sequence_packing_args.max_packed_sequence_length_train": 8192,  # per device x CP
        "actor_train.training_args.gradient_accumulation_steps": 32,  # 64 samples over 2 ranks
        "actor_train.training_args.lr_scheduler_type": "cosine",
        "actor_train.training_args.warmup_ratio": 0.1,
        "actor_train.strategy_args.strategy_config.sequence_parallel": True,
        "actor_train.data_args.prompt": "question",
        "actor_train.data_args.response": "sum",
        "actor_infer.strategy_args.strategy_config.tp_size": 2,
        "actor_infer.strategy_args.strategy_config.mem_fraction_static": 0.6,
        "num_return_sequences_in_group": 8,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.28,
        "kl_loss_coef": 0.01,
        "loss_args.kl_estimator": "k3",
        "reward_function": "math_verify",
        "is_offload_states": True,
    }
    assert {key: value_at(done.settings, key) for key in wanted} == wanted
    assert {"--num-layers", "--swiglu", "--balance-data"} <= left_out(done, "idle").keys()
    assert set(left_out(done, "refused")) == {"--attention-dropout", "--hidden-dropout"}, "Megatron's 0.1 is not ours"
    job = job_of(done, tmp_path)
    assert job.mini_batch_size(2) == 64 and job.kl_loss_bound == 10


def test_what_a_script_leaves_out_has_slimes_default(tmp_path):
    job = job_of(converted(tmp_path, ""), tmp_path)
    args = job.actor_train.training_args
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (args.lr_scheduler_type, args.warmup_steps, args.min_lr) == ("linear", 0, 0)
    assert (job.loss_agg_mode, job.seed, job.clip_range) == ("seq-mean-token-mean", 1234, (0.2, 0.2))
    assert (job.dual_clip_loss, job.use_kl_loss, job.entropy_loss_coef) == (False, False, 0)
    assert (job.adv_estimator, job.norm_mean_type, job.norm_std_type) == ("reinforce", "group", None), "groups of one"
    assert job.actor_train.strategy_args.strategy_config.use_distributed_optimizer
    assert job.actor_train.model_args.dtype == "bf16" and job.world_size == 8
    assert job.actor_train.data_args.prompt == "input" and job.eval_samples == 0
    sampling = job.actor_infer.generating_args
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)


MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "per token": ("--calculate-per-token-loss", {"loss_agg_mode": None, "adv_estimator": "reinforce"}),
    "rollouts of its own": ("--custom-generate-function-path a.b", {"loss_agg_mode": "rollout-token-mean"}),
    "gspo": ("--advantage-estimator gspo --n-samples-per-prompt 4", {"importance_sampling": "seq"}),
    "cispo": ("--advantage-estimator cispo --n-samples-per-prompt 4", {"loss_function": "cispo"}),
    "no deviation": (
        "--n-samples-per-prompt 4 --disable-grpo-std-normalization",
        {"adv_estimator": "reinforce", "norm_mean_type": "group"},
    ),
    "raw rewards": (
        "--n-samples-per-prompt 4 --disable-rewards-normalization",
        {"adv_estimator": "reinforce", "norm_mean_type": None},
    ),
    "reinforce": (
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.1 --gamma 0.99",
        {"add_token_level_kl": True, "init_kl_coef": 0.1, "gamma": 0.99},
    ),
    "whitened": ("--n-samples-per-prompt 4 --normalize-advantages", {"whiten_advantages": True}),
    "tis": ("--use-tis", {"loss_args.engine_ratio_cap": 2.0}),
    "tis range": (
        "--use-tis --tis-clip 3 --tis-clip-low 0.5",
        {"loss_args.engine_ratio_cap": 3.0, "loss_args.engine_ratio_min": 0.5},
    ),
    "k1": ("--use-kl-loss --kl-loss-coef 0.1", {"loss_args.kl_estimator": "k1", "use_kl_loss": True}),
    "k3 is not clamped": (
        "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --use-unbiased-kl",
        {"loss_args.kl_estimator": None, "kl_loss_bound": None, "loss_args.kl_gradient": "importance"},
    ),
    "dual clip": ("--eps-clip-c 3", {"dual_clip_loss": True, "dual_clip_ratio": 3.0}),
    "engine's log-probs": ("--use-rollout-logprobs", {"actor_train.logprob_plan": "rollout"}),
    "other devices": ("--rollout-num-gpus 4", {"is_offload_states": True}),
    "padded": ("--micro-batch-size 2", {"actor_train.training_args.per_device_train_batch_size": 2}),
    "evaluation": (
        "--eval-interval 5 --eval-prompt-data a /a.jsonl b /b.jsonl --n-samples-per-eval-prompt 4 --eval-top-p 0.9",
        {
            "eval_steps": 5,
            "actor_train.data_args.eval_file_name": ["/a.jsonl", "/b.jsonl"],
            "validation.generating_args.num_return_sequences": 4,
            "validation.generating_args.top_p": 0.9,
        },
    ),
    "equals": ("--lr=0.001", {"actor_train.training_args.learning_rate": 0.001}),
    "tracker": (
        "--use-wandb --wandb-project sums",
        {"track_with": "wandb", "tracker_kwargs.project": "sums"},
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_options_keep_their_meaning(tmp_path, case):
    options, wanted = MEANINGS[case]
    done = converted(tmp_path, options)
    job_of(done, tmp_path)
    found = {key: value_at(done.settings, key) for key in wanted}
    if case == "per token":
        assert job_of(done, tmp_path).loss_agg_mode == "token-mean"
        found["loss_agg_mode"] = None
    if case == "k3 is not clamped":
        assert job_of(done, tmp_path).kl_loss_bound is None
        found["loss_args.kl_estimator"] = None  # k3 or absent: our default
    assert found == wanted


def test_routing_replay_keeps_its_mode(tmp_path):
    for option, mode in (("--use-routing-replay", "R2"), ("--use-rollout-routing-replay", "R3")):
        assert job_of(converted(tmp_path, option), tmp_path).actor_train.router_replay.mode == mode


def test_losses_and_biases_of_routers(tmp_path):
    sigmoid = "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss"
    for options, rate in ((sigmoid, 1e-3), (f"{sigmoid} --moe-router-bias-update-rate 0", 0), ("", None)):
        done = converted(tmp_path, options)
        assert job_of(done, tmp_path).actor_train.strategy_args.strategy_config.moe_router_bias_update_rate == rate
        assert not [key for key in left_out(done, "refused", "unknown") if "moe" in key]
    refused = left_out(converted(tmp_path, f"{sigmoid} --moe-aux-loss-coeff 0.1"), "refused")
    assert {"--moe-router-load-balancing-type", "--moe-aux-loss-coeff"} <= refused.keys()


def test_train_async_runs_ahead(tmp_path):
    done = converted(tmp_path, "--rollout-num-gpus 4", "train_async.py")
    job = job_of(done, tmp_path)
    assert job.async_generation_ratio == 1 and not job.is_offload_states


def test_supervised_fine_tuning(tmp_path):
    options = "--loss-type sft_loss --num-epoch 2 --global-batch-size 32 --input-key messages --prompt-data /d.parquet"
    path = tmp_path / "run.sh"
    path.write_text(f"python train_async.py --hf-checkpoint /m --rollout-batch-size 32 --debug-train-only {options}")
    done = convert_file(path, ORIGINS["slime"])
    assert done.settings["task"] == "sft" and done.settings["num_train_epochs"] == 2
    assert value_at(done.settings, "loss_args.aggregation") == "sequence_mean", "slime's mean of samples' means"
    assert value_at(done.settings, "actor_train.data_args.messages") == "messages"
    assert value_at(done.settings, "actor_train.training_args.gradient_accumulation_steps") == 4
    assert any(text.startswith("sequence_length") for text in done.missing)


def test_nothing_is_dropped_silently(tmp_path):
    done = converted(
        tmp_path,
        "--no-such-option 3 --advantage-estimator ppo --kl-coef 0.1 --rm-type f1 --wandb-key sk-7f3a9 --lr 1e-5 "
        "--lr 2e-5 --seed $(date +%s) ${EXTRA[@]} --custom-rm-path a.b",
        before="if [ -n x ]; then\n  EXTRA=(--lr-decay-iters 7)\nfi\nsource gone.sh",
    )
    refused, unknown = left_out(done, "refused"), left_out(done, "unknown")
    assert set(unknown) == {"--no-such-option"}
    assert "the critic's returns" in refused["--kl-coef"] and "secret" in refused["--wandb-key"]
    assert "line 8" in refused["--seed"] and "condition" in refused["--lr-decay-iters (line 3)"]
    assert "line 8" in refused["--lr (line 8)"] and "not there" in refused["source (line 5)"]
    assert value_at(done.settings, "reward_args.path") == "a.b", "a function of one's own replaces --rm-type"
    assert value_at(done.settings, "actor_train.training_args.learning_rate") == 2e-5
    assert "seed" not in done.settings, "its default would be a guess"
    assert "sk-7f3a9" not in done.to_yaml() + done.to_json()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--max-tokens-per-gpu", "has no value"),
        ("--max-tokens-per-gpu --use-dynamic-batch-size", "has no value"),
        ("--max-tokens-per-gpu many", "write a whole number"),
        ("--max-tokens-per-gpu 0", "at least 1"),
        ("--max-tokens-per-gpu 1.5", "write a whole number"),
        ("--lr nan", "write a number"),
        ("--lr inf", "write a number"),
        ("--lr 1 2", "has 2 values"),
        ("--colocate yes", "takes no value"),
        ("--global-batch-size -4", "at least 1"),
        ("--eval-prompt-data", "has no value"),
        ("--actor-num-nodes 99999999999999999999999999x", "write a whole number"),
        ("--lr 'open", "never closed"),
    ],
)
def test_bad_values_are_one_error_with_file_and_line(tmp_path, options, why):
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, options)
    message = str(error.value)
    assert why in message and "run.sh:5" in message and message.count("\n") <= 1
    assert "Traceback" not in message


@pytest.mark.bad_input
def test_a_size_beyond_floats_is_left_out(tmp_path):
    done = converted(tmp_path, f"--n-samples-per-prompt 1{'0' * 400}")
    assert "--n-samples-per-prompt" in left_out(done, "refused")


@pytest.mark.bad_input
def test_other_scripts_are_named(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("echo hello\n")
    for call in (lambda: convert_file(path, ORIGINS["slime"]), lambda: origin_of(path)):
        with pytest.raises(ConfigError, match="no command that starts"):
            call()
    path.write_text("python train.py --lr 1\npython train.py --lr 2\n")
    with pytest.raises(ConfigError, match="lines 1, 2"):
        convert_file(path, ORIGINS["slime"])


def test_the_output_is_a_file_that_loads(tmp_path):
    done = converted(tmp_path, "--rm-type dapo")
    assert yaml.safe_load(done.to_yaml()) == done.settings
    assert done.settings["reward_args"] == {"after": "Answer:"}


def test_sizes_per_pack_are_refused_by_name(tmp_path):
    done = converted(tmp_path, "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4096")
    refused = left_out(done, "refused")
    for option in ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank"):
        assert "strategy_config.context_parallel_size: auto" in refused[option]
