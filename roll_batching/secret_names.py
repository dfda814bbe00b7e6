"""Names that look like those of secrets, whose values no file, tracker or message of a run shows."""

from __future__ import annotations

import re
from typing import Any

WITHHELD = "<secret, not kept>"
"""In place of a value whose name looks like a secret's."""
_ENDINGS = (
    *("KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "AUTHORIZATION"),
)
"""What a word of such a name ends with. TOKENS is missing: it counts them (max_tokens)."""


def is_secret(name: object) -> bool:
    """Whether `name`, of a variable or a setting, looks like a secret's: WANDB_API_KEY, hf_token, PGPASSWORD."""
    words = re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", str(name))
    return any(word.upper().endswith(_ENDINGS) for word in words)


def withhold(value: Any, *, secret: bool = False) -> Any:
    """`value`, plain data, with `WITHHELD` for texts and whole numbers under names of secrets; `secret`: for all."""
    if isinstance(value, dict):
        return {key: withhold(item, secret=secret or is_secret(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [withhold(item, secret=secret) for item in value]
    return WITHHELD if secret and isinstance(value, (str, int)) and not isinstance(value, bool) else value
