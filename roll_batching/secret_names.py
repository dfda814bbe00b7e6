"""Redaction of values whose names look like secrets, in files, trackers and messages."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<secret, not kept>"
"""Replacement of a redacted value."""
_ENDINGS = (
    *("KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "AUTHORIZATION"),
)
"""Endings of a word in such a name. Without TOKENS, which are counts (max_tokens)."""


def is_secret(name: object) -> bool:
    """Whether `name`, of a variable or a setting, looks like a secret's: WANDB_API_KEY, hf_token, PGPASSWORD."""
    words = re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", str(name))
    return any(word.upper().endswith(_ENDINGS) for word in words)


def redact(value: Any, *, secret: bool = False) -> Any:
    """`value`, plain data, with texts and integers under secret names replaced; `secret`: replace all of them."""
    if isinstance(value, dict):
        return {key: redact(item, secret=secret or is_secret(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, secret=secret) for item in value]
    return REDACTED if secret and isinstance(value, (str, int)) and not isinstance(value, bool) else value
