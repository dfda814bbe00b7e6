"""Warning for KTO data whose labels are all equal."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from roll_batching.jobs.texts.texts import Judged

logger = logging.getLogger(__name__)


def warn_if_labels_are_equal(texts: Iterable[Judged], paths: Any, key: str) -> None:
    """Warn on rank 0 if all `texts`, read from the files `paths`, have the same label under `key`."""
    labels = [text.desirable for text in texts]
    if len(set(labels)) != 1 or os.environ.get("RANK", "0") != "0":
        return
    kind = "desirable" if labels[0] else "undesirable"
    logger.warning(
        "all %s answers of %s are %s: KTO compares both kinds; look at the key %r (actor_train.data_args.label)",
        *(f"{len(labels):,}", paths, kind, key),
    )
