"""Warnings of libraries that a user can do nothing about."""

from __future__ import annotations

import logging
import warnings

_LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""How such records begin, by logger: of Megatron 0.19 on what it is used through, and of torch without a GPU."""


def hide_known_warnings() -> None:
    """What Megatron says several times per process that it lacks, and torch of old names that Megatron uses."""
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"\w+ is experimental and still under active development")
    # One process reads a checkpoint of many, and Megatron calls torch in an older order.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")
    warnings.filterwarnings("ignore", message="The argument order of load has been changed")
    for name, beginning in _LOGGED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Without) for one in logger.filters):
            logger.addFilter(_Without(beginning))


class _Without(logging.Filter):
    """Drops records whose message begins with `beginning`."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)
