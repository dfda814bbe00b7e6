"""The runs of a check and their samples: what each run changes, how it places the samples, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import LossSpec
from roll_batching.samples import FieldKind, FieldSpec, SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS

PACKS = 4
REFERENCE = "reference"

Bins = list[list[list[int]]]
"""Samples by data-parallel rank and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run: its name says what it changes."""

    name: str
    bins: Bins
    mode: str = "packed"
    hint: str = ""
    """What usually makes a loss depend on it."""


@dataclass(frozen=True, kw_only=True)
class LayoutRuns:
    """Runs that share processes and a parallel layout."""

    scenarios: tuple[Scenario, ...]
    processes: int = 1
    strategy_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A loss, its samples and the runs."""

    loss: bytes
    """The pickled loss: each run has a new copy, so that none sees the state that another left."""
    samples: SampleBatch
    layouts: tuple[LayoutRuns, ...]
    seed: int
    seconds: float
    """Longest time of the runs of one layout."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run."""

    loss: float = 0.0
    metrics: dict[str, float] | None = None
    gradients: dict[str, torch.Tensor] | None = None
    error: str | None = None
    """Why the run has no result."""


_MICRO_BATCHES = (
    "a mean over the tensor that the loss sees, or a metric of the wrong kind: reduce with the view's mean, "
    "sequence_mean or sample_mean, and return Mean(numerator, denominator)"
)
_ORDER = "a state between calls, or an assumption about neighbouring samples"


def scenarios(units: Sequence[Sequence[int]]) -> list[LayoutRuns]:
    """All runs over samples in `units`, at least `PACKS` groups that stay in one micro-batch each.

    Each run changes one thing against the first. Packs have different numbers of samples.
    """
    packs = _uneven(units)
    reference = [packs]
    one_process = (
        Scenario(name=REFERENCE, bins=reference),
        Scenario(name="nothing: the same step again", bins=reference, hint="random numbers, or a state between calls"),
        Scenario(name=f"1 micro-batch instead of {PACKS}", bins=[[[i for p in packs for i in p]]], hint=_MICRO_BATCHES),
        Scenario(
            name=f"{len(units)} micro-batches instead of {PACKS}", bins=[[list(u) for u in units]], hint=_MICRO_BATCHES
        ),
        Scenario(name="the order of the micro-batches", bins=[packs[::-1]], hint=_ORDER),
        Scenario(name="the order of the samples in a micro-batch", bins=[[pack[::-1] for pack in packs]], hint=_ORDER),
        Scenario(
            name="padded instead of packed",
            bins=reference,
            mode="padded",
            hint="a sum over all positions of a tensor: filler counts in it; use the view's masks and reductions",
        ),
    )
    tensor_parallel = Scenario(
        name="tensor parallel size 2",
        bins=reference,
        hint="logits are shards of the vocabulary: reduce them with view.vocabulary. An all-reduce of "
        "torch.distributed.nn multiplies gradients",
    )
    name = "context parallel size 2"
    context_parallel = (
        Scenario(
            name=name,
            bins=reference,
            hint="ranks add up their parts of a sequence_loss, or compute one loss: return sums over positions "
            "(or set gather_cp = True)",
        ),
        Scenario(
            name=f"{name}, padded", bins=reference, mode="padded", hint="as for context parallelism, and for padding"
        ),
    )
    data_parallel = Scenario(
        name="data parallel size 2",
        bins=[packs[0::2], packs[1::2]],
        hint="counts of one rank: num_tokens, num_sequences and total count all ranks",
    )
    tensor_settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return [
        LayoutRuns(scenarios=one_process),
        LayoutRuns(scenarios=(tensor_parallel,), processes=2, strategy_config=tensor_settings),
        LayoutRuns(scenarios=context_parallel, processes=2, strategy_config={"context_parallel_size": 2}),
        LayoutRuns(scenarios=(data_parallel,), processes=2),
    ]


def _uneven(units: Sequence[Sequence[int]]) -> list[list[int]]:
    """`PACKS` packs of the samples of `units`: each takes about half of the rest, so that sizes differ."""
    packs, rest = [], list(units)
    for remaining in range(PACKS - 1, -1, -1):
        count = len(rest) if remaining == 0 else max((len(rest) - remaining + 1) // 2, 1)
        packs.append([sample for unit in rest[:count] for sample in unit])
        rest = rest[count:]
    return packs


# ---- samples


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
    """Samples of several lengths with the known fields, the loss's masks, sums, candidates and rollouts, and `fields`.

    One sample has a single token, and one no counted token; not in `pairs`, whose losses refuse them.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = [max(n, 3) for n in LENGTHS] if pairs else list(LENGTHS)
    sample_fields = dict(_KNOWN)
    sample_fields |= {name: _Field("sample", lambda n, g: torch.rand(n, generator=g)) for name in spec.sums}
    sample_fields |= {name: _Field("token", lambda n, g: torch.rand(n, generator=g) < 0.7) for name in spec.masks}
    if spec.rollouts:
        sample_fields[ROLLOUT_IDS] = _Field("sample", lambda n, g: torch.arange(n) % 4)
    if spec.candidates is not None:
        sample_fields[spec.candidates] = _Field("next_token", _ids)
    for name, kind in fields.items():
        if kind not in ("token", "next_token", "sample"):
            raise LossError(f"the field {name!r} has the kind {kind!r}: give token, next_token or sample")
        sample_fields[name] = _Field(kind, sample_fields[name].draw if name in sample_fields else _normal)
    tokens = sum(lengths)
    values = {
        name: field.draw(len(lengths) if field.kind == "sample" else tokens, g) for name, field in sample_fields.items()
    }
    kinds: dict[str, FieldKind] = {name: field.kind for name, field in sample_fields.items()}
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
