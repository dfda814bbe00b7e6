"""How responses are sampled: the settings, and from logits to next tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import DataError
from roll_batching.planning.plain_values import integer_of, switch_of

_LOWEST = {"max_new_tokens": 1, "num_return_sequences": 1, "eos_token_id": -1, "top_k": 0, "seed": 0}
"""Of whole numbers; -1 is no token, so that nothing but length ends a response."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How responses are sampled."""

    max_new_tokens: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample among this many likeliest tokens; 0: all."""
    greedy: bool = False
    seed: int = 0
    num_return_sequences: int = 1
    """Responses per prompt, on consecutive rows."""
    max_tokens_in_cache: int | None = None
    """Positions that the cache of keys and values may hold on a rank, over all rows that are sampled together: rows x
    (their longest prompt + max_new_tokens). More rows wait for their turn; what they sample does not depend on it.
    None: all rows at once."""
    vocab_size: int | None = None
    """Of the model: token ids of rollout engines must lie below it. None: not known."""

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            object.__setattr__(self, name, integer_of(name, getattr(self, name), lowest, error=DataError))
        if self.max_tokens_in_cache is not None:
            bound = integer_of("max_tokens_in_cache", self.max_tokens_in_cache, error=DataError)
            object.__setattr__(self, "max_tokens_in_cache", bound)
        if not isinstance(self.stop_token_ids, list | tuple):
            raise DataError(f"stop_token_ids={self.stop_token_ids!r} must be a tuple of token ids")
        stops = tuple(integer_of("stop_token_ids", token, 0, error=DataError) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stops)
        object.__setattr__(self, "greedy", switch_of("greedy", self.greedy, error=DataError))
        for name, largest in (("temperature", sys.float_info.max), ("top_p", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= largest:
                raise DataError(f"{name}={value!r} must be a number above 0 and at most {largest:g}")
            object.__setattr__(self, name, float(value))


def draws_of(
    settings: GenerationSettings, rows: int, *, part: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, max_new_tokens] uniform numbers for the rows of the data-parallel rank `part`; greedy: [0, ...]."""
    generator = torch.Generator(device=device).manual_seed(settings.seed * 1_000_003 + part)
    shape = 0 if settings.greedy else rows, settings.max_new_tokens
    return torch.rand(shape, generator=generator, device=device, dtype=dtype)


class Sampler:
    """Next tokens and their log-probs from full-vocabulary logits.

    `draws` are the random numbers of all rows, as `draws_of` gives them: each row has its own, so that its tokens do
    not depend on which rows are sampled beside it. Ranks of `groups`, which hold the same rows and logits, take the
    tokens of the groups' first rank: CUDA's float `cumsum` may differ between them.
    """

    def __init__(
        self, settings: GenerationSettings, vocab_size: int, draws: torch.Tensor, groups: Sequence[Any] = ()
    ) -> None:
        self.settings, self.vocab_size = settings, vocab_size
        self._uniform = draws
        self._groups = [group for group in groups if group.size() > 1]

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, vocabulary] of these rows -> tokens [n], log-probs [n] of the untruncated distribution."""
        wide = logits[:, : self.vocab_size]
        wide = wide if wide.dtype is torch.float64 else wide.float()
        log_probs = (wide / self.settings.temperature).log_softmax(-1)
        if self.settings.greedy:
            tokens = log_probs.argmax(-1)
        else:
            tokens = self._drawn(self._truncate(log_probs).exp_(), self._uniform[rows, step].to(log_probs.dtype))
        for group in self._groups:
            dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)
        return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

    def _drawn(self, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Inverse transform sampling: the first token up to which more than `uniform` of all weight lies."""
        reached = weights.cumsum(-1)
        total = reached[:, -1]
        # Below the total, whatever rounding does: above it lies no token, and tokens without weight end there.
        aim = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        drawn = torch.searchsorted(reached, aim[:, None], right=True)[:, 0]
        return drawn.clamp_(max=reached.shape[-1] - 1)  # weights that are not finite: their log-probs tell

    def _truncate(self, log_probs: torch.Tensor) -> torch.Tensor:
        """With what is not to be sampled at minus infinity; a tensor of its own."""
        top_k, top_p = self.settings.top_k, self.settings.top_p
        kept = log_probs.clone()
        if top_k and top_k < log_probs.shape[-1]:
            bound = log_probs.topk(top_k, -1).values[:, -1:]
            kept = kept.masked_fill_(log_probs < bound, float("-inf"))
        if top_p < 1.0:
            ordered, index = kept.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p
            kept = kept.masked_fill_(beyond.scatter(1, index, beyond), float("-inf"))
        return kept
