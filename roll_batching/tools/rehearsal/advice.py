"""Search for the largest caps, and for other settings, with which a job fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from roll_batching.errors import RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.auto_caps import longest_sample, with_value
from roll_batching.jobs.config.layout_rules import differing_keys, model_fits
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.planning import ParallelDims
from roll_batching.planning.batching_spec import Mode
from roll_batching.settings.batching import CAP_KEYS
from roll_batching.settings.fields import MOST_TOKENS, Pass
from roll_batching.tools.rehearsal.job import Rehearsal
from roll_batching.tools.rehearsal.rollout import has_local_rollouts, sizes_of
from roll_batching.tools.rehearsal.task import (
    CRITIC_GRADIENTS,
    GRADIENTS,
    LOG_PROBS,
    MISMATCHED,
    MISMATCHED_REFERENCE,
    REFERENCE,
    ROLLOUT,
    TEACHER,
    VALUES,
)

Rehearse = Callable[[JobConfig], Rehearsal]
_PROBES = 6
"""Most rehearsals of a search."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bounds on the largest value of a cap with which a job fits."""

    key: str
    value: int
    """Value in the job."""
    fits: int | None
    """Largest rehearsed value that fits; None: not even one longest sample fits."""
    too_large: int | None
    """Smallest rehearsed value that does not fit; None: every rehearsed value fits."""
    need: float
    """Bytes of the phases that the cap bounds, at `fits`, or at the smallest rehearsed value."""


@dataclass(frozen=True, kw_only=True)
class TriedChange:
    """A rehearsed change of settings."""

    change: Change
    need: float
    """Bytes that the changed job needs on its fullest rank."""


@dataclass
class Search:
    """Search for the largest cap that fits, by regula falsi: memory grows almost linearly with a cap."""

    cap: Cap
    gpu_memory: float
    needs: dict[int, float] = field(default_factory=dict)
    """Bytes by value of the cap."""

    @property
    def below(self) -> int | None:
        """Largest rehearsed value that fits."""
        return max((value for value, need in self.needs.items() if need <= self.gpu_memory), default=None)

    @property
    def above(self) -> int | None:
        """Smallest rehearsed value that does not fit."""
        return min((value for value, need in self.needs.items() if need > self.gpu_memory), default=None)

    def guess(self) -> int | None:
        """Next value to rehearse; None when the bounds are close enough or the search is exhausted."""
        below, above, step = self.below, self.above, self.cap.step
        if above is None:
            assert below is not None
            guess = min(self._guess_beyond(below), self.cap.most or MOST_TOKENS)
            return guess if guess > below and len(self.needs) < _PROBES else None
        if below is None:
            return self.cap.least if above > self.cap.least else None
        if above - below <= max(step, below // 50):  # 2% is close enough
            return None
        share = (self.gpu_memory - self.needs[below]) / (self.needs[above] - self.needs[below])
        guess = int(below + share * (above - below)) // step * step
        return guess if below + step <= guess < above else below + step

    def _guess_beyond(self, below: int) -> int:
        """A value that is probably 2% too large, on the line through the two largest values so far, which fit."""
        smaller = max((value for value in self.needs if value < below), default=None)
        if smaller is None or self.needs[smaller] >= self.needs[below]:
            return 2 * below
        room, slope = self.gpu_memory - self.needs[below], (self.needs[below] - self.needs[smaller]) / (below - smaller)
        return below + int(1.02 * room / slope) // self.cap.step * self.cap.step + self.cap.step

    def limit(self) -> Limit:
        """The bounds that the rehearsals so far give."""
        at = self.below if self.below is not None else min(self.needs)
        return Limit(key=self.cap.key, value=self.cap.value, fits=self.below, too_large=self.above, need=self.needs[at])


def find_limits(rehearsal: Rehearsal, gpu_memory: float, rehearse: Rehearse) -> list[Limit]:
    """Searches the limits of the caps whose phases do not fit; for a job that fits, of the training cap.

    The memory of a phase depends on its own cap only, so one rehearsal serves the searches of all caps.
    """
    searches = [
        Search(cap, gpu_memory, {cap.value: need})
        for cap in caps_of(rehearsal.config, rehearsal.dims)
        if (need := rehearsal.need_in(cap.phases)) > gpu_memory
    ]
    if rehearsal.fits(gpu_memory):
        training = caps_of(rehearsal.config, rehearsal.dims)[0]
        searches = [Search(training, gpu_memory, {training.value: rehearsal.need_in(training.phases)})]
    for _ in range(_PROBES):
        guesses = [(search, guess) for search in searches if (guess := search.guess()) is not None]
        if not guesses:
            break
        changed = Change(settings={search.cap.key: guess for search, guess in guesses})
        outcome = rehearse(changed.of(rehearsal.config))
        for search, guess in guesses:
            search.needs[guess] = outcome.need_in(search.cap.phases)
    return [search.limit() for search in searches]


def largest_fitting_caps(rehearsal: Rehearsal, limits: Sequence[Limit], gpu_memory: float) -> Change | None:
    """Largest caps with which a job fits; None when lower caps alone are not enough."""
    capped = {phase for cap in caps_of(rehearsal.config, rehearsal.dims) for phase in cap.phases}
    others = [phase for stage in rehearsal.stages for phase in stage.report.peaks if phase not in capped]
    if not limits or rehearsal.need_in(others) > gpu_memory:
        return None
    settings = {limit.key: limit.fits for limit in limits}
    return None if None in settings.values() else Change(settings=settings)


def try_changes(
    rehearsal: Rehearsal, gpu_memory: float, rehearse: Rehearse, *, last_resort: bool = True
) -> list[TriedChange]:
    """Rehearse changes that save memory; changes of one kind are tried until one fits.

    Layouts that the model does not support are skipped. If no change fits and `last_resort` is set, the change with the
    smallest need is rehearsed again with the smallest caps.
    """
    tried: list[TriedChange] = []
    for candidates in candidate_changes(rehearsal.config, rehearsal.dims.world_size):
        for change in candidates:
            try:
                tried.append(TriedChange(change=change, need=rehearse(change.of(rehearsal.config)).worst.need))
            except RollBatchingError:
                continue
            if tried[-1].need <= gpu_memory:
                break
    nearest = min(tried, key=lambda change: change.need, default=None)
    if nearest is None or nearest.need <= gpu_memory or not last_resort:
        return tried
    changed = nearest.change.of(rehearsal.config)
    dims = changed.actor_train.strategy_args.strategy_config.parallel_dims(rehearsal.dims.world_size)
    least = {cap.key: cap.least for cap in caps_of(changed, dims) if cap.least < cap.value}
    if not least:
        return tried
    both = Change(settings={**nearest.change.settings, **least})
    return [*tried, TriedChange(change=both, need=rehearse(both.of(rehearsal.config)).worst.need)]


# ---- changed copies of a job


_LAYOUT = "actor_train.strategy_args.strategy_config."
_ROWS = "training_args.per_device_train_batch_size"
_STEPS = "training_args.gradient_accumulation_steps"
_KEYS: dict[tuple[Mode, Pass], str] = {
    **CAP_KEYS,
    ("padded", "train"): _ROWS,
    ("padded", "infer"): "infer_batch_size",
}
"""Key of the cap on a micro-batch by mode and kind of pass: tokens, or rows in padded mode."""
_COARSE, _FINE = 1024, 64
"""Granularity of caps in tokens: of large caps, and of the smallest."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changed settings of a job by dotted path. Keys of the policy's layout also change roles that share it."""

    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """The settings as overrides for the command line."""
        words: dict[Any, str] = {True: "true", False: "false", None: "null"}
        texts = {key: words[v] if v is None or isinstance(v, bool) else v for key, v in self.settings.items()}
        return " ".join(f"{path}={text}" for path, text in texts.items())

    def of(self, config: JobConfig) -> JobConfig:
        """Copy of `config` with this change. Roles whose layout differs from the policy's keep theirs."""
        followers = [name for name in config.roles if name != "actor_train" and follows(config, name)]
        for path, value in self.settings.items():
            config = with_value(config, path, value)
            for role in followers if path.startswith(_LAYOUT) else ():
                config = with_value(config, path.replace("actor_train", role, 1), value)
        return config


def follows(config: JobConfig, name: str) -> bool:
    """Whether the role `name` has the layout of the policy."""
    return not differing_keys(config.roles[name], config.actor_train)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A key that bounds the memory of some phases."""

    key: str
    """Dotted path in the job."""
    value: int
    """Value in the job."""
    least: int
    """Smallest value that still holds the longest sample."""
    step: int
    """Granularity of the search."""
    phases: tuple[str, ...]
    """Phases whose memory the cap bounds."""
    most: int | None = None
    """Largest useful value: a larger one holds no more samples. None: not known."""


def caps_of(config: JobConfig, dims: ParallelDims) -> list[Cap]:
    """Caps of all passes of a step, the training cap first."""
    plan = config.actor_train.logprob_plan
    in_training = (*GRADIENTS, *((LOG_PROBS,) if plan == "train" else ()))
    taught = [_cap(config, "teacher", "infer", (TEACHER,))] if uses_teacher(config) else []
    if config.is_supervised:
        caps = [_cap(config, "actor_train", "train", (*in_training, REFERENCE)), *taught]
        if config.reference is not None and not follows(config, "reference"):  # else it runs on the plans of training
            caps[0] = _cap(config, "actor_train", "train", in_training)
            caps.append(_cap(config, "reference", "infer", (REFERENCE,)))
        if config.task == "kto":
            caps.append(_cap(config, "actor_train", "infer", (MISMATCHED,)))
            caps.append(_cap(config, "reference", "infer", (MISMATCHED_REFERENCE,)))
        return caps
    caps = [_cap(config, "actor_train", "train", in_training), *taught]
    if plan == "own":
        caps.append(_cap(config, "actor_train", "infer", (LOG_PROBS,)))
    if has_local_rollouts(config) and dims.pp_size == dims.cp_size == 1:
        sizes, key = sizes_of(config, dims), "actor_infer.generating_args.max_tokens_in_cache"
        value = config.actor_infer.generating_args.max_tokens_in_cache or sizes.rows * sizes.room
        caps.append(Cap(key=key, value=value, least=sizes.room, step=sizes.room, phases=ROLLOUT))
    if config.reference is not None:
        caps.append(_cap(config, "reference", "infer", (REFERENCE,)))
    if uses_critic(config):
        caps += [_cap(config, "critic", "train", CRITIC_GRADIENTS), _cap(config, "critic", "infer", (VALUES,))]
    return caps


def _cap(config: JobConfig, name: str, kind: Pass, phases: tuple[str, ...]) -> Cap:
    role = getattr(config, name)
    spec = role.batching_spec(kind, train_rows=role.training_args.per_device_train_batch_size)
    unit = 2 if config.task == "dpo" else 1
    key = f"{name}.{_KEYS[spec.mode, kind]}"
    if spec.mode == "padded":
        return Cap(key=key, value=spec.rows or 1, least=unit, step=unit, phases=phases)
    value = spec.max_tokens or 1
    step = max(_FINE, min(_COARSE, value // 16 // _FINE * _FINE))
    least = -(-unit * longest_sample(config) // step) * step
    return Cap(key=key, value=value, least=least, step=step, phases=phases)


def candidate_changes(config: JobConfig, world_size: int) -> Iterator[list[Change]]:
    """Changes that save memory without changing results, by kind from cheap to expensive, each kind in growing size.

    Layouts with fewer data-parallel ranks accumulate more micro-batches, so that the mini-batch stays the same.
    """
    train = config.actor_train
    megatron, model = train.strategy_args.strategy_config, train.model_args.architecture
    assert model is not None
    if not megatron.use_distributed_optimizer:
        yield [_layout({"use_distributed_optimizer": True})]
    full = {"recompute_granularity": "full"} if megatron.recompute_granularity != "full" else {}
    if full:
        yield [_layout(full)]
    roles = ("actor_train", *(("critic",) if uses_critic(config) else ()))
    steps = {f"{role}.{_STEPS}": getattr(config, role).training_args.gradient_accumulation_steps for role in roles}
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    teacher = config.teacher if uses_teacher(config) and follows(config, "teacher") else None
    other = None if teacher is None else teacher.model_args.architecture
    shapes = [model] if other is None else [model, other]
    factors = [factor for factor in (2, 4, 8, 16) if world_size % (factor * megatron.model_size) == 0]
    divided = {
        factor: {"tensor_model_parallel_size": factor * tensor, "sequence_parallel": True, **full} for factor in factors
    }
    yield [
        _layout(sizes, _times(factor, steps))
        for factor, sizes in divided.items()
        if not any(list(model_fits("actor_train", one, megatron.model_copy(update=sizes))) for one in shapes)
    ]
    if has_local_rollouts(config) and pipeline == 1:
        return  # without a KV cache, rollouts under a pipeline recompute the whole sequence for every token
    if megatron.has_uneven_stages:
        return  # another number of stages needs another split
    yield [
        _layout({"pipeline_model_parallel_size": factor * pipeline, **full}, _times(factor, steps))
        for factor in factors
        if model.num_layers % (factor * pipeline * megatron.vpp_size) == 0
    ]


def _times(factor: int, steps: Mapping[str, int]) -> dict[str, int]:
    return {key: factor * count for key, count in steps.items()}


def _layout(settings: Mapping[str, Any], steps: Mapping[str, int] | None = None) -> Change:
    return Change(settings={_LAYOUT + key: value for key, value in settings.items()} | dict(steps or {}))


def layout_changes(config: JobConfig, world_size: int) -> Iterator[Change]:
    """Other tensor, pipeline and context parallel sizes (powers of two) of the same ranks, with equal mini-batches.

    Sizes that the model or the mini-batch does not allow are left out. A pipeline of another size has no model chunks.
    """
    train = config.actor_train
    megatron, model, args = train.strategy_args.strategy_config, train.model_args.architecture, train.training_args
    assert model is not None
    own = (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.cp_size)
    batch = config.mini_batch_size(config.dp_size(world_size)) // args.per_device_train_batch_size
    powers = [1 << power for power in range(world_size.bit_length())]
    for tensor, pipeline, context in product(powers, repeat=3):
        sizes: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        sizes |= {"sequence_parallel": tensor > 1} if tensor != own[0] else {}
        sizes |= {"context_parallel_size": context} if context != own[2] else {}
        sizes |= {"virtual_pipeline_model_parallel_size": None} if pipeline != own[1] else {}
        sizes = {key: value for key, value in sizes.items() if value != getattr(megatron, key)}
        ranks, rest = divmod(world_size, tensor * pipeline * context)
        fits = not rest and not batch % ranks and (pipeline == own[1] or not megatron.has_uneven_stages)
        if not fits or (tensor, pipeline, context) == own:
            continue
        if not list(model_fits("actor_train", model, megatron.model_copy(update=sizes))):
            roles = ("actor_train", *(("critic",) if uses_critic(config) else ()))
            steps = {} if batch // ranks == args.gradient_accumulation_steps else {_STEPS: batch // ranks}
            yield _layout(sizes, {f"{role}.{key}": count for role in roles for key, count in steps.items()})
