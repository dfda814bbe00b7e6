"""Abuses of a job with a critic."""

from __future__ import annotations

from typing import Any

from tests.campaigns.abuse.runner import DONE, REFUSED, Abuse
from tests.campaigns.abuse.scenes import complete, not_begun

PPO: dict[str, Any] = {
    "adv_estimator": "gae",
    "value_clip": 0.5,
    "whiten_advantages": True,
    "critic.training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "critic.use_sequence_packing": True,
    "critic.sequence_packing_args": {"max_packed_sequence_length_train": 512},
}
"""Settings of a small job with a critic."""
SMALLER = {"vocab_size": 5, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4}

CRITICS = [
    Abuse(name="critic: an ordinary job", code=DONE, settings=PPO, scene=complete),
    Abuse(
        name="critic: a smaller vocabulary",
        code=REFUSED,
        settings={**PPO, "critic.model_args.architecture": SMALLER},
        words=("critic.model_args.architecture.vocab_size", "is 5", "9"),
        lines=3,
        scene=not_begun,
    ),
]
