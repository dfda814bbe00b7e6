"""FrozenLake by vLLM itself on a CPU: rollouts run free, weights change meanwhile, and the model learns.

`scripts/engine_environment.sh` makes the environment; without it these tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("aiohttp")
pytest.importorskip("gymnasium")

from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_vllm_itself import PROGRAM, Server
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs .venv-engines: ./scripts/engine_environment.sh"),
]

LETTERS = ">SFHGP/=ldru$."
"""Of maps, places and moves, and the end token."""
STEPS = 40


def write_model(folder: Path) -> None:
    """A random Qwen2 with heads of 64 channels, and a tokenizer of the lake's letters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny.write_tokenizer(folder, text=LETTERS)
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.03,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def lake_job(folder: Path, url: str, **changes):
    changes = {"max_steps": STEPS, **changes}
    made = job(
        folder,
        rollout_function="roll_batching.jobs.rollouts.environments:rollout",
        rollout_args={
            "environment": "roll_batching.jobs.rollouts.environments:FrozenLake",
            "environment_args": {"size": 3},
            "max_turns": 8,
        },
        prompt_length=1,
        response_length=1,
        sequence_length=112,
        rollout_batch_size=16,
        num_return_sequences_in_group=8,
        warmup=None,
        eval_samples=0,
        loss_agg_mode="rollout-token-mean",
        async_generation_ratio=1,
        in_flight_updates=True,
        partial_rollout=True,
        actor_infer={"strategy_args": {"strategy_name": "vllm"}, "engine_args": {"urls": [url]}},
        actor_train__training_args={
            "learning_rate": 1.0e-3,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 4,
        },
        actor_train__sequence_packing_args__max_packed_sequence_length_train=2048,
        **changes,
    )
    del made["reward_function"], made["actor_train"]["data_args"]["eval_file_name"]
    return made


def test_the_lake_is_learned_while_weights_change_under_its_rollouts(tmp_path, report):
    write_model(tmp_path / "model")
    lines = [{"prompt": ">", "seed": seed} for seed in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = Server(tmp_path / "model", tmp_path / "log")
    found = {}
    try:
        server.wait()
        for name, changes in (("learns", {}), ("control", {"control": "shuffled", "max_steps": 15})):
            run_ranks(
                1, "tests.jobs.rl.jobs:run", lake_job(tmp_path, server.url, exp_name=name, **changes), timeout=900
            )
            found[name] = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
    finally:
        server.kill()
    shares = {name: [row["mark/arrived"] for row in rows] for name, rows in found.items()}
    last = {name: sum(values[-5:]) / 5 for name, values in shares.items()}
    rows = found["learns"]
    report(f"arrive: {shares['learns'][0]:.2f} -> {last['learns']:.2f}, control {last['control']:.2f}")
    seconds = sum(row["seconds"] for row in rows) / STEPS
    report(f"versions of a rollout {max(row['weight_versions_mean'] for row in rows):.2f} at most in the mean")
    report(f"ratio of the first step {rows[0]['ratio_max']:.6f}, {seconds:.1f} s per step")
    assert last["learns"] > 0.5 and last["control"] < 0.2
    assert rows[0]["ratio_max"] == pytest.approx(1, abs=1e-4) and any(row["weight_versions_mean"] > 1 for row in rows)
