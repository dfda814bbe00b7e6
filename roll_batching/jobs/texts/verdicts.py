"""A warning for judged answers that are all desirable, or all undesirable."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from roll_batching.jobs.texts.texts import Judged

logger = logging.getLogger(__name__)


def warn_of_one_verdict(texts: Iterable[Judged], paths: Any, key: str) -> None:
    """Warns, on rank 0, if all `texts` of the files `paths` have the same verdict under `key`."""
    verdicts = [text.desirable for text in texts]
    if len(set(verdicts)) != 1 or os.environ.get("RANK", "0") != "0":
        return
    kind = "desirable" if verdicts[0] else "undesirable"
    logger.warning(
        "all %s answers of %s are %s: KTO compares both kinds; look at the key %r (actor_train.data_args.label)",
        *(f"{len(verdicts):,}", paths, kind, key),
    )
