"""Sampling settings, and next tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge, Le

from roll_batching.checked_fields import LARGEST, CheckedFields, Count, Positive, PositiveShare, Seed
from roll_batching.errors import DataError
from roll_batching.planning.arrays import integer_of


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(CheckedFields, error=DataError):
    """Sampling settings of responses. Raises `DataError` for values out of range."""

    max_new_tokens: Count
    eos_token_id: Annotated[int, Ge(-1), Le(LARGEST)]
    """-1 is no token: only max_new_tokens ends a response then."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a response."""
    temperature: Positive = 1.0
    top_p: PositiveShare = 1.0
    top_k: Annotated[int, Ge(0), Le(LARGEST)] = 0
    """Sample among the k most likely tokens; 0: all."""
    greedy: bool = False
    seed: Seed = 0
    num_return_sequences: Count = 1
    """Responses per prompt, on consecutive rows."""
    max_tokens_in_cache: Count | None = None
    """Most positions of the key-value cache on a rank: sequences in the batch x (their longest prompt +
    max_new_tokens). Further sequences wait for the next batch; results do not depend on it. None: no limit."""
    vocab_size: Count | None = None
    """Vocabulary size of the model, an upper bound of token ids from rollout engines. None: unknown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stop_token_ids, list | tuple):
            raise DataError(f"stop_token_ids={self.stop_token_ids!r} must be a tuple of token ids")
        stops = tuple(integer_of("stop_token_ids", token, 0, error=DataError) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stops)


def uniform_draws(
    settings: GenerationSettings, rows: int, *, dp_rank: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """[rows, max_new_tokens] uniform numbers in [0, 1) for the sequences of `dp_rank`; greedy: [0, max_new_tokens]."""
    generator = torch.Generator(device=device).manual_seed(settings.seed * 1_000_003 + dp_rank)
    shape = 0 if settings.greedy else rows, settings.max_new_tokens
    return torch.rand(shape, generator=generator, device=device, dtype=dtype)


class Sampler:
    """Samples next tokens, with their log-probs, from full-vocabulary logits.

    Args:
        settings: the sampling settings.
        vocab_size: real vocabulary; padded columns of the logits are never sampled.
        draws: uniform numbers of all sequences (`uniform_draws`). Each sequence has its own, so that its tokens do not
            depend on the others in its batch.
        groups: process groups whose ranks have the same sequences and logits. They take the tokens of the group's first
            rank: CUDA's floating-point `cumsum` may differ between ranks.
    """

    def __init__(
        self, settings: GenerationSettings, vocab_size: int, draws: torch.Tensor, groups: Sequence[Any] = ()
    ) -> None:
        self.settings, self.vocab_size = settings, vocab_size
        self._uniform = draws
        self._groups = [group for group in groups if group.size() > 1]

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [n], their log-probs [n]) from logits [n, vocabulary] of the sequences `rows` [n].

        Log-probs are those before top-k and top-p: a training pass computes the same.
        """
        real = logits[:, : self.vocab_size]
        real = real if real.dtype is torch.float64 else real.float()
        log_probs = (real / self.settings.temperature).log_softmax(-1)
        if self.settings.greedy:
            tokens = log_probs.argmax(-1)
        else:
            tokens = self._draw(self._truncate(log_probs).exp_(), self._uniform[rows, step].to(log_probs.dtype))
        for group in self._groups:
            dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)
        return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

    def _draw(self, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Inverse transform sampling: the first token with a cumulative weight above `uniform` x total weight."""
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1]
        # Rounding may lift uniform * total to the total, where only tokens without weight are left.
        threshold = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
        return tokens.clamp_(max=cumulative.shape[-1] - 1)  # for NaN weights; the check of the log-probs reports them

    def _truncate(self, log_probs: torch.Tensor) -> torch.Tensor:
        """A copy of `log_probs` with tokens outside top-k and top-p at minus infinity."""
        top_k, top_p = self.settings.top_k, self.settings.top_p
        truncated = log_probs.clone()
        if top_k and top_k < log_probs.shape[-1]:
            bound = log_probs.topk(top_k, -1).values[:, -1:]
            truncated = truncated.masked_fill_(log_probs < bound, float("-inf"))
        if top_p < 1.0:
            ordered, index = truncated.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p
            truncated = truncated.masked_fill_(beyond.scatter(1, index, beyond), float("-inf"))
        return truncated
