"""Versions of the weights that sampled the tokens of a rollout's samples."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from roll_batching.jobs.engines.protocol import SampledTokens
from roll_batching.samples import FieldSpec

WEIGHT_VERSIONS = "weight_versions"
"""token, int64: version of the weights that sampled a token, where they change within rollouts; -1 for others."""
VERSIONS_SPEC = FieldSpec("token", pad=-1)


class TokenVersions:
    """What a rollout's client has sampled, by token and log-prob in fp32, which samples pass on."""

    def __init__(self) -> None:
        self._versions: defaultdict[tuple[int, float], deque[int]] = defaultdict(deque)
        self._oldest = -1

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._versions)

    def add(self, sampled: SampledTokens) -> None:
        """Adds the tokens of one call."""
        for token, log_prob, version in zip(sampled.tokens, sampled.log_probs, sampled.versions, strict=False):
            self._versions[token, float(np.float32(log_prob))].append(version)
            self._oldest = version if self._oldest < 0 else min(version, self._oldest)

    def take(self, tokens: np.ndarray, mask: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """The version of each of a sample's tokens, int64 [n]: those in `mask`; others have -1.

        Equal pairs are found in the order of the calls. A token that the client did not sample with that log-prob
        counts as sampled by the rollout's first weights.
        """
        versions = np.full(len(tokens), -1, dtype=np.int64)
        for place in np.flatnonzero(mask).tolist():
            known = self._versions.get((int(tokens[place]), float(np.float32(log_probs[place])))) or deque(
                [self._oldest]
            )
            versions[place] = known.popleft() if len(known) > 1 else known[0]
        return versions
