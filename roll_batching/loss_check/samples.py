"""Random samples with the fields that a loss reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import LossSpec
from roll_batching.samples import FieldKind, FieldSpec, SampleBatch

VOCABULARY = 61
"""Odd, so that tensor parallelism pads it."""
LENGTHS = (9, 1, 24, 6, 3, 17, 12, 5, 21, 8, 4, 14)
_TOKENS_OF_K = 3
_LOG_PROB = -4.1
"""About the mean log-prob of a token under the tiny model's random weights."""

Draw = Callable[[int, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class _Field:
    kind: FieldKind
    draw: Draw
    """Makes n values."""


def _normal(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, generator=g)


def _log_probs(n: int, g: torch.Generator) -> torch.Tensor:
    return _LOG_PROB + 0.3 * torch.randn(n, generator=g)


def _ids(n: int, g: torch.Generator) -> torch.Tensor:
    # Different ids at each position, as of a teacher's most likely tokens.
    return torch.rand(n, VOCABULARY, generator=g).argsort(1)[:, :_TOKENS_OF_K]


def _top_probabilities(n: int, g: torch.Generator) -> torch.Tensor:
    return 0.9 * torch.randn(n, _TOKENS_OF_K, generator=g).softmax(1)


def _mask(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(n, generator=g) < 0.7


_KNOWN: Mapping[str, _Field] = {
    "advantages": _Field("sample", _normal),
    "rewards": _Field("sample", _normal),
    "rollout_log_probs": _Field("next_token", _log_probs),
    "old_log_probs": _Field("next_token", _log_probs),
    "ref_log_probs": _Field("next_token", _log_probs),
    "returns": _Field("next_token", _normal),
    "old_values": _Field("next_token", _normal),
    "desirable": _Field("sample", lambda n, g: torch.rand(n, generator=g) < 0.5),
    "reference_point": _Field("sample", lambda n, g: torch.full((n,), 0.7)),
    "teacher_ids": _Field("next_token", _ids),
    "teacher_log_probs": _Field("next_token", lambda n, g: _top_probabilities(n, g).log()),
    "teacher_probabilities": _Field("next_token", _top_probabilities),
}
"""Fields that samples have unless the caller says otherwise: those of jobs and of the package's losses."""
PAIR_FIELDS = ("pair", "chosen")
"""Fields of losses over pairs; with them samples are planned in pairs."""


def random_samples(spec: LossSpec, fields: Mapping[str, FieldKind], seed: int, *, pairs: bool) -> SampleBatch:
    """Samples of several lengths with the known fields, the loss's masks, sums and candidates, and `fields`.

    One sample has a single token, and one no counted token; not in `pairs`, whose losses refuse them.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = [max(n, 3) for n in LENGTHS] if pairs else list(LENGTHS)
    wanted = dict(_KNOWN)
    wanted |= {name: _Field("sample", lambda n, g: torch.rand(n, generator=g)) for name in spec.sums}
    wanted |= {name: _Field("token", _mask) for name in spec.masks}
    if spec.candidates is not None:
        wanted[spec.candidates] = _Field("next_token", _ids)
    for name, kind in fields.items():
        if kind not in ("token", "next_token", "sample"):
            raise LossError(f"the field {name!r} has the kind {kind!r}: give token, next_token or sample")
        wanted[name] = _Field(kind, wanted[name].draw if name in wanted else _normal)
    tokens = sum(lengths)
    values = {name: field.draw(len(lengths) if field.kind == "sample" else tokens, g) for name, field in wanted.items()}
    kinds: dict[str, FieldKind] = {name: field.kind for name, field in wanted.items()}
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    for name in spec.masks:
        values[name][starts + torch.tensor([min(1, n - 1) for n in lengths])] = True  # a counted token each
        if not pairs:
            values[name][starts[3] : starts[4]] = False
    if pairs:
        values |= {"pair": torch.arange(len(lengths)) // 2, "chosen": torch.arange(len(lengths)) % 2 == 0}
        kinds |= dict.fromkeys(PAIR_FIELDS, "sample")
    values["input_ids"] = torch.randint(0, VOCABULARY, (tokens,), generator=g)
    kinds["input_ids"] = "token"
    ids = torch.arange(len(lengths)) * 7 + 100
    schema = {name: FieldSpec(kind) for name, kind in kinds.items()}
    return SampleBatch(ids, torch.tensor(lengths), values, schema)
