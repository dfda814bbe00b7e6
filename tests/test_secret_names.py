"""Secrets are told by exact names and by the form of their values, and nothing else is."""

from __future__ import annotations

import pytest

from roll_batching.secret_names import REDACTED, is_secret, redact, redact_forms

HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
MIXED = "q7ZrVbX9nTkLw5GdYhaJcP4sMfAe6U1oRi"
SECRETS = {
    "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
    "sk-proj-abcdefGHIJKL0123456789",
    "sk-ant-api03-abcdefGHIJKL0123456789_x",
    "sk-ant-api03-a-b_cdefGHIJKL0123456789-x-YZ-tail_of_the_key",
    "ms-3fa85f64-5717-4562-b3fc-2c963f66afa6",
    "Bearer sk-abcdefghijklmnopqrst",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "AKIAIOSFODNN7EXAMPLE",
    "http://user:pass@proxy:3128",
    "postgres://:pass@db/runs",
    "https://trackio.example.com/?write_token=abc",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    HEX,
    f"Bearer {MIXED}",
}
PLAIN = {
    "Qwen3-30B-A3B-GRPO-dapo-math-17k-lr1e-6-bs512",
    "Qwen3MoeForCausalLMWithValueHead",
    f"/root/.cache/huggingface/hub/models--Qwen--Qwen3/snapshots/{HEX}",
    "hf_model",
    "sk-learn-baseline-run-3",
    "sk-learn-something_very_long_name",
    "http://10.0.0.1:8000/v1",
    "s3://bucket/key@2024",
    "123e4567-e89b-12d3-a456-426614174000",
    "1234567890123456789012345678901234567890",
    "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz",
    "a long sentence of ordinary words, in which nothing is secret",
}


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "api_key", "apiKey", "x-api-key", "--wandb-key",
     "OPENAI_APIKEY", "DB_PASSWD", "client_secret", "Authorization", "aws.credentials", "token", "judge keys",
     "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "private-key",
     "MLFLOW_TRACKING_TOKEN", "DASHSCOPE_KEY", "GITLAB_PAT", "TRACKIO_WRITE_TOKEN", "DATABRICKS_TOKEN"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "keyboard", "HF_HOME", "", 3, "tokenizer", "secretary",
     "PYTHONPATH", "key", "--reward-key", "reward_key", "token_budget", "additional_eos_token_ids", "eos_token",
     "pad_token_id", "image_token", "prompt_key", "tools_key", "input-key", "metadata-key", "eval_reward_key",
     "sort_key", "max_token_len_per_gpu", "actor_ppo_max_token_len", "per_token", "think_end_token", "HF_TOKEN_PATH"],
)  # fmt: skip
def test_names_that_only_end_like_one(name):
    assert not is_secret(name)


@pytest.mark.parametrize("value", sorted(SECRETS))
def test_a_secret_is_told_by_its_value_under_any_name(value):
    assert is_secret("login", value)
    assert redact({"a": [{"login": value}]}) == {"a": [{"login": REDACTED}]}


@pytest.mark.parametrize("value", sorted(PLAIN))
def test_a_plain_value_is_kept(value):
    assert redact({"login": value}) == {"login": value} and redact_forms(value) == value


def test_a_digest_is_random_but_public():
    digests = {"revision": HEX, "code_revision": HEX, "git-sha": HEX, "run_id": HEX}
    assert redact(digests) == digests and redact({"login": HEX}) == {"login": REDACTED}


def test_a_message_keeps_its_other_words():
    text = "http://user:pass@proxy:3128/v1 refused sk-proj-abcdefGHIJKL0123456789 twice"
    assert redact_forms(text) == f"{REDACTED}proxy:3128/v1 refused {REDACTED} twice"
    assert redact_forms("refused sk-ant-api03-a-b_cdefGHIJ-0123456789-tail.") == f"refused {REDACTED}."
