"""Filters for library warnings that users cannot act on."""

from __future__ import annotations

import logging
import warnings

_LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Prefixes of log records to drop, by logger: deprecations in Megatron 0.19, and torch without a GPU."""


def hide_known_warnings() -> None:
    """Hides Megatron's warnings of missing packages, and torch's of deprecated names that Megatron uses."""
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"\w+ is experimental and still under active development")
    # Megatron's own default of cuda_graph_scope.
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    # When one process loads a checkpoint of several; and Megatron passes torch's arguments in their old order.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")
    warnings.filterwarnings("ignore", message="The argument order of load has been changed")
    # Megatron's distributed optimizer reads `.grad` of views of parameters, and the CPU platform passes the read on.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for name, beginning in _LOGGED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(existing, _DropPrefix) for existing in logger.filters):
            logger.addFilter(_DropPrefix(beginning))


class _DropPrefix(logging.Filter):
    """Drops records whose message begins with `beginning`."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)
