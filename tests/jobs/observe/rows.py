"""Rows as a GRPO run writes them, for tests that need a whole run's worth."""

from __future__ import annotations

import math
import random

PHASES = {f"{name}_seconds" for name in ("plan", "pack", "forward_backward", "loss", "wait", "optimizer")}
TIMES = PHASES | {"seconds", "train_seconds", "rollout_seconds", "update_seconds"}
TIMES |= {"tokens_per_second", "flops_per_second", "unshared_flops_per_second", "generate_seconds", "reward_seconds"}
TIMES |= {"weights_seconds", "engine_sleep_seconds", "queue_wait_seconds", "sampler_seconds"}
TIMES |= {"reference_wait_seconds"}
TIMES |= {f"share/{part}" for part in ("rollout", "reward", "transfer", "train", "wait")}
"""Columns that no two runs have alike."""


def rl_rows(steps: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        shows = 1 / (1 + math.exp(-(step - 8) / 3))
        tokens = int(96 * (20 + 35 * shows))
        row = {
            "step": step,
            "phase": "rl",
            "reward": 0.1 + 0.6 * shows + rng.uniform(-0.05, 0.05),
            "loss": rng.uniform(-0.01, 0.01),
            "response_length_mean": 5 + 60 * shows,
            "response_length_max": 150 + rng.random() * 80,
            "mark/shows_work": shows,
            "tokens": tokens,
            "tokens_full": 96 * 320,
            "tokens_padded": tokens * 3.3 + rng.random() * 1000,
            "tokens_dynamic": tokens * 1.3,
            "tokens_packed": tokens + 8,
            "train_seconds": 0.5,
            "tokens_per_second": tokens / 0.5,
        }
        if step == 1 or step % 20 == 0:
            row |= {"eval_reward": 0.1 + 0.6 * shows, "eval_updates": 0 if step == 1 else step}
            row |= {"eval_mark/shows_work": shows, "eval_reward_with/shows_work": 0.75}
            row |= {"eval_reward_without/shows_work": 0.04}
        rows.append(row)
    return rows
