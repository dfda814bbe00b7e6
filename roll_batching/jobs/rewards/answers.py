"""Parts of responses that rewards by rules share: the answer after the thoughts, and repetition."""

from __future__ import annotations

from itertools import islice

from roll_batching.registry import printable

END_OF_THOUGHTS = "</think>"
_REPEATED_WORDS = 3
"""Words of a repeated sequence. Source: ROLL's reward workers (8eb27cc), `ngram_size=3`."""


def answer_text(response: str) -> str:
    """The text after the last `</think>`, or all of it, without surrounding white space."""
    return response.rpartition(END_OF_THOUGHTS)[2].strip()


def repeated_share(text: str) -> float:
    """Share of the sequences of three words that occur earlier in `text`, ignoring case; 0 for shorter texts."""
    words = text.lower().split()
    count = len(words) - _REPEATED_WORDS + 1
    if count < 1:
        return 0.0
    return 1 - len(set(zip(words, islice(words, 1, None), islice(words, 2, None), strict=False))) / count


def check_penalty(penalty: object) -> None:
    """Raises ValueError unless `repetition_penalty` is a number from 0 up to 1e6."""
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0 <= penalty <= 1e6:
        raise ValueError(
            f"reward_args.repetition_penalty is {printable(repr(penalty))}: write a number of at least 0, which is "
            "subtracted times the share of repeated words (ROLL: 0.5)"
        )
