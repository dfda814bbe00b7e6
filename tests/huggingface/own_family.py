"""A user's model family in one file: Seed-OSS, Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from roll_batching.huggingface.families import Family

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={"rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.02, "head_dim": 128},
    always={"attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.0},
    add_qkv_bias=True,
)
TINY = ("SeedOss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0})
"""An entry as in `tiny.MODELS`."""
NOT_A_FAMILY = "seed_oss"
