"""ROLL's own classes and functions, on the CPU, against the job that its converted file describes.

Runs where `ROLL_CHECKOUT` names a checkout of alibaba/ROLL; `roll_original` computes its side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file

HERE = Path(__file__).parent
CHECKOUT = os.environ.get("ROLL_CHECKOUT")
pytestmark = [
    pytest.mark.config,
    pytest.mark.skipif(CHECKOUT is None, reason="ROLL_CHECKOUT names no checkout of ROLL"),
]
PROMPT, RESPONSE, PROMPTS = 4, 9, 3
"""Tokens of the samples, and prompts of each domain."""
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"adv_estimator": "grpo", "norm_std_type": "batch"},
    "whitened, masked": {"adv_estimator": "reinforce", "whiten_advantages": True, "max_len_mask": True},
    "running": {"adv_estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"},
    "batch": {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch", "reward_clip": 1.0},
    "group mean": {"adv_estimator": "reinforce", "norm_mean_type": "group", "advantage_clip": 0.3},
    "token-mean": {"loss_agg_mode": "token-mean", "difficulty_mask": True, "difficulty_high_threshold": 0.9},
    "token-sum": {"loss_agg_mode": "seq-mean-token-sum", "dual_clip_loss": True},
    "token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_loss_coef": 0.0, "pg_clip": 0.1},
    "divergence": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "reference": {"strategy_args": {"strategy_name": "megatron_infer"}},
    },
    "sequence ratio": {"importance_sampling": "seq", "use_pg_clip_range": True, "pg_clip_low": 0.1},
    "topr": {"pg_variant": "topr", "topr_negative_weight": 0.5},
    "cispo": {"pg_variant": "cispo", "pg_clip": 0.4},
    "vanilla": {"pg_variant": "vanilla"},
    "ppo": {"pg_variant": "ppo", "dual_clip_loss": True},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "constant": {"lr_scheduler_type": "constant", "warmup_ratio": 0.07},
    "span": {"max_steps": 5, "warmup_ratio": 0.11},
}


def settings_of(more: dict[str, Any], schedule: dict[str, Any]) -> dict[str, Any]:
    """A file of ROLL that leaves out what it can."""
    role = {key: more[key] for key in ("pg_variant", "topr_negative_weight") if key in more}
    if role:
        role["worker_cls"] = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
    return {
        "response_length": RESPONSE,
        "prompt_length": PROMPT,
        "num_return_sequences_in_group": 4,
        "rollout_batch_size": 8,
        "max_steps": 11,
        "adv_estimator": "reinforce",
        "actor_train": {
            "training_args": schedule,
            "data_args": {"file_name": ["a.jsonl"], "domain_interleave_probs": {"math": 0.5, "code": 0.5}},
            "strategy_args": {"strategy_name": "megatron_train"},
            "device_mapping": "list(range(0,2))",
            **role,
        },
        "actor_infer": {"generating_args": {"top_k": -1}, "strategy_args": {"strategy_name": "vllm"}},
        "validation": {"generating_args": {"temperature": 0.2, "max_new_tokens": 3}},
        "rewards": {
            "math": {"worker_cls": "a.MathRuleRewardWorker", "tag_included": ["a"]},
            "code": {"worker_cls": "a.CodeSandboxRewardWorker", "tag_included": ["b"]},
        },
        **{key: value for key, value in more.items() if key not in role},
    }


def samples_of(group: int, seed: int = 0) -> dict[str, Any]:
    """Padded samples of two domains, whose rewards differ tenfold; some responses are as long as they may be."""
    rng = np.random.default_rng(seed)
    count, width = 2 * PROMPTS * group, PROMPT + RESPONSE
    lengths = rng.integers(2, RESPONSE + 1, count)
    lengths[::5] = RESPONSE
    places = np.arange(width)
    attention = (places < PROMPT + lengths[:, None]).astype(int)
    response = attention * (places >= PROMPT)
    scores = rng.integers(0, 2, count) * np.repeat([1.0, 10.0], count // 2)
    scores[:group] = 1.0  # a group of equal rewards

    def log_probs() -> np.ndarray:
        return (-2 + 0.7 * rng.standard_normal((count, width - 1))) * attention[:, 1:]

    return {
        "samples": {
            "input_ids": rng.integers(0, 50, (count, width)).tolist(),
            "attention_mask": attention.tolist(),
            "response_mask": response.tolist(),
            "scores": scores.tolist(),
            **{name: log_probs().tolist() for name in ("log_probs", "old_log_probs", "ref_log_probs")},
        },
        "domains": ["math"] * (count // 2) + ["code"] * (count // 2),
        "prompt_length": PROMPT,
    }


def theirs(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ROLL's figures, of one process for all requests."""
    command = [sys.executable, str(HERE / "roll_original.py"), str(CHECKOUT), "figures"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def ours(job: JobConfig, request: dict[str, Any]) -> dict[str, Any]:
    """The same figures from our job."""
    import torch

    from roll_batching.jobs.objectives.from_config import advantages_of, loss_of, schedule_of
    from roll_batching.jobs.rl.grpo import Grpo
    from roll_batching.losses import mask_overlong
    from roll_batching.modeling.builder import build_scheduler
    from roll_batching.samples import SampleBatch
    from tests.losses.formulas import run

    samples = {key: np.asarray(value) for key, value in request["samples"].items()}
    count, lengths = len(samples["scores"]), samples["attention_mask"].sum(1)
    tokens = samples["response_mask"].sum(1)
    scores = SimpleNamespace(
        ids=np.arange(count),
        rewards=samples["scores"],
        finished=tokens < RESPONSE,
        failed=np.zeros(count, dtype=bool),
    )
    masked = Grpo._masked_samples(SimpleNamespace(config=job), scores)  # type: ignore[arg-type]
    advantages = advantages_of(job)(
        samples["scores"],
        job.group_size,
        response_tokens=np.where(masked, 0, tokens),
        domains=np.array(request["domains"]),
    )
    rows = [slice(0, int(length)) for length in lengths]
    ragged = {
        name: [torch.tensor(samples[name][i, row]) for i, row in enumerate(rows)]
        for name in ("input_ids", "response_mask")
    }
    for name in ("old_log_probs", "ref_log_probs"):
        ragged[name] = [torch.tensor(samples[name][i, : row.stop - 1]) for i, row in enumerate(rows)]
    kinds = {"input_ids": "token", "response_mask": "token", "advantages": "sample", "rewards": "sample"}
    batch = SampleBatch.from_lists(
        {**ragged, "advantages": torch.tensor(advantages), "rewards": torch.tensor(samples["scores"])},
        kinds | {"old_log_probs": "next_token", "ref_log_probs": "next_token"},
    )
    batch = mask_overlong(batch, torch.from_numpy(masked))
    leaf = torch.zeros(batch.num_tokens, 2, dtype=torch.float64)
    for i, start in enumerate(batch.offsets[:-1].tolist()):
        leaf[start : start + lengths[i] - 1, 0] = torch.tensor(samples["log_probs"][i, : lengths[i] - 1])
    bins = [list(range(start, min(start + 4, count))) for start in range(0, count, 4)]
    loss, gradient, _ = run(loss_of(job), batch, bins, rows=leaf)
    wide = np.zeros(samples["log_probs"].shape)
    for i, start in enumerate(batch.offsets[:-1].tolist()):
        wide[i, : lengths[i] - 1] = gradient[start : start + lengths[i] - 1, 0]
    schedule = schedule_of(job, request["dp_size"])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0] |= {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
    scheduler, rates = build_scheduler(optimizer, schedule, schedule.max_steps), []
    for _ in range(schedule.max_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return {
        "advantages": advantages[:, None] * ~masked[:, None] * samples["response_mask"][:, 1:],
        "loss": loss,
        "gradient": wide,
        "learning_rates": rates,
    }


def check_agreement(job: JobConfig, request: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    """The largest differences; raises AssertionError above rounding."""
    here = ours(job, request)
    sampling = job.actor_infer.generating_args
    for name, args in (("sampling", sampling), ("validation", job.validation.generating_args)):
        if there[name] is not None:
            for key in ("temperature", "top_p", "max_new_tokens", "do_sample", "num_return_sequences"):
                assert getattr(args, key) == there[name][key], (name, key)
            assert args.top_k == max(there[name]["top_k"], 0), name
    assert job.logprob_temperature == 1, "ROLL's log-probs are those at temperature 1"
    worst = {}
    for name in ("learning_rates", "advantages", "loss", "gradient"):
        mine, other = np.asarray(here[name], dtype=float), np.asarray(there[name], dtype=float)
        assert mine.shape == other.shape, (name, mine.shape, other.shape)
        worst[name] = float(np.abs(mine - other).max() / max(np.abs(other).max(), 1e-9))
        assert worst[name] < 3e-6, (name, worst[name], mine.ravel()[:8], other.ravel()[:8])
    assert np.abs(here["gradient"]).max() > 0, "there is something to compare"
    return worst


def test_the_recorded_defaults_are_those_of_the_checkout():
    command = [sys.executable, str(HERE / "roll_original.py"), str(CHECKOUT), "defaults"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert found == json.loads((HERE / "data" / "roll_defaults.json").read_text())["classes"]


def _converted(path: Path, folder: Path) -> tuple[Conversion, JobConfig]:
    done = convert_file(path, ORIGINS["roll"])
    (folder / "job.yaml").write_text(done.to_yaml())
    return done, load_config(folder / "job.yaml")


def test_converted_settings_train_as_rolls_code_does(tmp_path):
    import yaml

    cases = {name: (more, {}) for name, more in VARIANTS.items()} | {name: ({}, one) for name, one in SCHEDULES.items()}
    requests, jobs = [], []
    for more, schedule in cases.values():
        settings = settings_of(more, schedule)
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(settings))
        jobs.append(_converted(tmp_path / "file.yaml", tmp_path)[1])
        requests.append({"settings": settings, "dp_size": 2, **samples_of(4)})
    for name, job, request, there in zip(cases, jobs, requests, theirs(requests), strict=True):
        assert "error" not in there, (name, there)
        print(name, check_agreement(job, request, there))


def test_the_files_of_the_checkout_train_as_rolls_code_does(tmp_path):
    """All RLVR files under examples/ that ROLL's own classes accept and whose advantages exist here."""
    found, others = [], []
    for path in sorted((Path(str(CHECKOUT)) / "examples").rglob("*rlvr*.yaml")):
        data = ORIGINS["roll"].compose(path).data
        if "megatron_train" not in str(data.get("actor_train")) or not data.get("rewards"):
            continue
        done, job = _converted(path, tmp_path)
        refused = {one.key: one.why for one in done.left_out_as("refused")}
        if "adv_estimator" in refused or data.get("reward_norm"):
            continue
        if "actor_train.logprob_temperature" in refused:
            # Rollouts ahead of training are compared with the engine's log-probs here, and the report says so.
            assert job.async_generation_ratio and "SGLang's log-probs" in refused["actor_train.logprob_temperature"]
            others.append(path.name)
            continue
        dp_size = job.dp_size(job.world_size or 1)
        found.append((path, job, {"settings": data, "dp_size": dp_size, **samples_of(job.group_size)}))
    assert len(found) >= 20
    compared, worst = 0, {}
    for (path, job, request), there in zip(found, theirs([request for _, _, request in found]), strict=True):
        if "error" in there:
            print(path.name, there["error"])
            continue
        compared += 1
        for key, value in check_agreement(job, request, there).items():
            worst[key] = max(worst.get(key, 0.0), value)
    print(f"{compared} files of {len(found)} agree; largest relative differences {worst}; told apart: {others}")
    assert compared >= 20
