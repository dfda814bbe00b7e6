"""Recognises secrets by exact names and by the form of values, and redacts them in files, trackers and messages."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<secret, not kept>"
"""Replacement of a redacted value."""
_NAMES = re.compile(
    r"(.*(password|passwd|passphrase|apikey)s?|(.*_)?(secrets?|credentials?|authorization|pwd)|token"
    r"|(.*_)?(api|access|secret|private|auth|account|master|encryption|signing|ssh|license)_keys?|(.*_)?access_key_id"
    r"|(.*_)?(hf|hub|hugging_?face|api|access|auth|write|bearer|oauth|refresh|session|github|gh|gitlab|slack)_tokens?"
    r"|(wandb|swanlab|mlflow|mlflow_tracking|databricks|comet|neptune|openai|anthropic|azure|aws|modelscope|dashscope|judge)"
    r"_(key|token)s?|(gh|github|gitlab)_pat)"
)
"""Whole names, in lower case with `_` between words. No rule for endings: reward_key and eos_token are no secrets."""
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9]{20,}|sk-(?=[\w-]*\d[\w-]*\d)[\w-]{16,}|gh[opsur]_\w{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r"|(?<=[?&]write_token=)[^&\s]+|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@)"
)
"""Forms of keys of Hugging Face, OpenAI and Anthropic, GitHub, GitLab, Slack, AWS, Google, NVIDIA and ModelScope; JWT;
PEM; URLs with passwords or Trackio's write_token."""
_DIGESTS = re.compile(r"(.*_)?(revision|commit|sha\d*|hash|digest|checksum|md5|u?u?id)")
"""Names of values that are random, but public."""
_RUN = re.compile(r"[A-Za-z0-9]{32,}")
_FEWEST_DIGITS = 3
_CLASS_CHANGES = 0.45
"""Least share of neighbours of two classes (upper, lower, digit). Random keys have 0.62, names in CamelCase 0.3."""


def is_secret(name: object, value: object = None) -> bool:
    """Whether the variable or setting `name` is a secret, by its name (WANDB_API_KEY) or the form of `value`."""
    if _NAMES.fullmatch(_normal(name)):
        return True
    return isinstance(value, str) and (_FORMS.search(value) is not None or _is_random(value, name))


def redact(value: Any, *, name: object = "", secret: bool = False) -> Any:
    """`value`, plain data called `name`, with secrets replaced; `secret`: replace all texts and integers."""
    secret = secret or is_secret(name)
    if isinstance(value, dict):
        return {key: redact(item, name=key, secret=secret) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item, name=name, secret=secret) for item in value]
    if isinstance(value, str):
        return REDACTED if secret or is_secret(name, value) else value
    return REDACTED if secret and isinstance(value, int) and not isinstance(value, bool) else value


def redact_forms(value: Any) -> Any:
    """`value`, a message or plain data under names that are no secrets', with keys of known forms replaced."""
    if isinstance(value, list):
        return [redact_forms(item) for item in value]
    return _FORMS.sub(REDACTED, value) if isinstance(value, str) else value


def _normal(name: object) -> str:
    words = re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", str(name))
    return "_".join(word.lower() for word in words if word)


def _is_random(text: str, name: object) -> bool:
    """Whether a word of `text` is a long run of letters and digits without a pattern, and `name` is no digest's."""
    runs = (word for word in text.split() if _RUN.fullmatch(word))
    return any(map(_is_random_run, runs)) and _DIGESTS.fullmatch(_normal(name)) is None


def _is_random_run(run: str) -> bool:
    digits = sum(map(str.isdigit, run))
    if re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", run):
        return _FEWEST_DIGITS <= digits < len(run)
    classes = [(letter.isdigit(), letter.isupper()) for letter in run]
    changes = sum(before != after for before, after in zip(classes, classes[1:], strict=False))
    return len(set(classes)) == 3 and digits >= _FEWEST_DIGITS and changes >= _CLASS_CHANGES * len(run)
