"""Warnings of libraries that a user can do nothing about."""

from __future__ import annotations

import warnings


def hide_known_warnings() -> None:
    """What Megatron says several times per process that it lacks, and torch of old names that Megatron uses."""
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
