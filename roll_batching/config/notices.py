"""Keys that are accepted but do something else here than their writer may expect: each gets a notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.config.fields import use_of
from roll_batching.config.job import JobConfig
from roll_batching.config.problems import Notice, dotted
from roll_batching.config.source import Source
from roll_batching.config.strategy import ENGINE_STRATEGIES
from roll_batching.config.walk import Path, field_at, given_keys
from roll_batching.config.worker import WorkerConfig

_ROLLOUT_BATCHING = "rollouts are decoded, not batched by a plan; old log-probs follow actor_train's batching"
_DATA = "prompts are described by actor_train.data_args"
_SAMPLING = "rollouts are sampled as actor_infer.generating_args says"
_NO_TRAINING = "this role is not trained"
_TRAIN_PASSES = "this role makes no training passes"

_BATCHING_KEYS = (
    "use_sequence_packing",
    "sequence_packing_args",
    "use_dynamic_batching",
    "use_dynamic_batching_in_train",
    "max_tokens_per_microbatch_in_train",
    "sequence_length_round_in_train",
    "use_dynamic_batching_in_infer",
    "max_tokens_per_microbatch_in_infer",
    "sequence_length_round_in_infer",
    "padded_length",
    "planning_args",
    "infer_batch_size",
)

UNREAD: dict[str, dict[str, str]] = {
    "actor_train": {"generating_args": _SAMPLING},
    "actor_infer": {
        "training_args": _NO_TRAINING,
        "data_args": _DATA,
        "logprob_plan": _NO_TRAINING,
        "apply_loss_scale": _NO_TRAINING,
        "backend_timeout": "actor_train's is used",
        **dict.fromkeys(_BATCHING_KEYS, _ROLLOUT_BATCHING),
    },
    "reference": {
        "training_args": _NO_TRAINING,
        "data_args": _DATA,
        "generating_args": _SAMPLING,
        "logprob_plan": _NO_TRAINING,
        "apply_loss_scale": _NO_TRAINING,
        "backend_timeout": "actor_train's is used",
        "use_dynamic_batching_in_train": _TRAIN_PASSES,
        "max_tokens_per_microbatch_in_train": _TRAIN_PASSES,
        "sequence_length_round_in_train": _TRAIN_PASSES,
    },
}
"""Sections and keys that a role does not read, with what rules instead."""


def collect_notices(job: JobConfig, source: Source) -> tuple[Notice, ...]:
    """The notices of `job` as written in `source`, in the order of the file."""
    found = [Notice(dotted(path), text, source.place(path)) for path, text in _notices(job, source.data)]
    return tuple(sorted(found, key=lambda notice: notice.line or 10**9))


def _notices(job: JobConfig, data: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for path, value in given_keys(data):
        text = _for_key(job, path, value)
        if text is not None:
            yield path, text
    yield from _combinations(job, data)


def _for_key(job: JobConfig, path: Path, value: Any) -> str | None:
    """The notice for one given key, or None when it is honoured."""
    if value is None:
        return None
    role = job.roles.get(str(path[0]))
    unread = UNREAD.get(str(path[0]), {}).get(str(path[1])) if len(path) > 1 else None
    if unread is not None:
        return f"has no effect: {unread}"
    if role is not None and role.strategy_args.strategy_name in ENGINE_STRATEGIES:
        engine = role.strategy_args.strategy_name
        if path[1:] == ("strategy_args", "strategy_name"):
            return f"{engine} is not started: rollouts run on the Megatron model itself, with its current weights"
        if path[1:3] == ("strategy_args", "strategy_config"):
            return f"has no effect: a setting of {engine}, which is not started"
        if path[1:] == ("device_mapping",) and role.device_mapping != job.actor_train.device_mapping:
            return "has no effect: rollouts run on actor_train's devices"
    if "system_envs" in path[:2] and str(path[-1]).startswith("NVTE_"):
        return "is set for the workers, but only TransformerEngine reads it; our attention core follows the device"
    field = field_at(path)
    if field is not None and use_of(field)["use"] == "noticed":
        return f"has no effect: {use_of(field)['notice']}"
    return None


def _combinations(job: JobConfig, data: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    if job.use_pg_clip_range and "pg_clip" in data and not job.dual_clip_loss:
        yield ("pg_clip",), "has no effect: use_pg_clip_range takes pg_clip_low and pg_clip_high"
    for key in ("pg_clip_low", "pg_clip_high"):
        if key in data and not job.use_pg_clip_range:
            yield (key,), "has no effect: set use_pg_clip_range: true, or pg_clip"
    if job.kl_loss_coef and not job.use_kl_loss:
        yield ("kl_loss_coef",), "has no effect: use_kl_loss is false"
    if job.use_kl_loss and not job.kl_loss_coef:
        yield ("use_kl_loss",), "has no effect: kl_loss_coef is 0"
    if job.reference is not None and not job.kl_coef:
        yield ("reference",), "is not built: use_kl_loss is false or kl_loss_coef is 0"
    sampling = data.get("actor_infer") or {}
    number = (sampling.get("generating_args") or {}).get("num_return_sequences")
    if number is not None and "num_return_sequences_in_group" in data and number != job.group_size:
        path = ("actor_infer", "generating_args", "num_return_sequences")
        yield path, f"has no effect: num_return_sequences_in_group = {job.group_size} is used"
    for name, role in job.roles.items():
        given = data.get(name) or {}
        if name == "actor_infer" or not isinstance(given, dict):
            continue
        for key, text in _idle_batching(name, role, given):
            yield (name, *key.split(".")), f"has no effect: {text}"
    yield from _lengths(job)


def _idle_batching(name: str, role: WorkerConfig, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of batching modes and passes that this role does not use."""
    packed = role.use_sequence_packing
    if not packed and "sequence_packing_args" in given:
        yield "sequence_packing_args", "use_sequence_packing is false"
    modes = {kind: "packed" if packed else "dynamic" if on else "padded" for kind, on in _dynamic_passes(role)}
    for kind, mode in modes.items():
        for key in (f"max_tokens_per_microbatch_in_{kind}", f"sequence_length_round_in_{kind}"):
            if key in given and mode != "dynamic" and key not in UNREAD[name]:
                yield key, f"use_dynamic_batching_in_{kind} is false"
    if "padded_length" in given and "padded" not in modes.values():
        yield "padded_length", "no pass of this role is padded"
    for key in ("dynamic_algorithm", "shared_shapes"):
        if key in (given.get("planning_args") or {}) and "dynamic" not in modes.values():
            yield f"planning_args.{key}", "no pass of this role is batched dynamically"
    if name == "actor_train" and role.logprob_plan != "own":
        yield from _borrowed_plans(role, given)
    elif "infer_batch_size" in given and modes["infer"] != "padded":
        yield "infer_batch_size", f"passes without gradient are {modes['infer']}, not padded"


def _dynamic_passes(role: WorkerConfig) -> tuple[tuple[str, bool], ...]:
    return ("train", role.dynamic_in_train), ("infer", role.dynamic_in_infer)


def _borrowed_plans(role: WorkerConfig, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys for passes without gradient that differ from training's, whose plans the old log-probs use."""
    text = f"old log-probs use training's plans under logprob_plan: {role.logprob_plan}; own would use this"
    if "infer_batch_size" in given:
        yield "infer_batch_size", text
    if role.use_dynamic_batching is None and role.dynamic_in_infer != role.dynamic_in_train:
        if not role.use_sequence_packing:
            yield "use_dynamic_batching_in_infer", text
    for key in ("max_tokens_per_microbatch", "sequence_length_round"):
        if role.dynamic_in_infer and getattr(role, f"{key}_in_infer") != getattr(role, f"{key}_in_train"):
            yield f"{key}_in_infer", text
    packing = role.sequence_packing_args
    for key in ("max_packed_sequence_length", "min_num_micro_batches"):
        forward, train = getattr(packing, f"{key}_forward"), getattr(packing, f"{key}_train")
        if role.use_sequence_packing and f"{key}_forward" in packing.model_fields_set and forward != train:
            yield f"sequence_packing_args.{key}_forward", text


def _lengths(job: JobConfig) -> Iterator[tuple[Path, str]]:
    longest = job.sequence_length
    if longest is None:
        return
    model = job.actor_train.model_args.architecture
    if model is not None and longest > model.max_position_embeddings:
        text = f"is below the job's sequence_length {longest}; longer sequences are rotated all the same"
        yield ("actor_train", "model_args", "architecture", "max_position_embeddings"), text
    batching = job.actor_train.batching()
    for kind, passes in (("train", batching.train), ("infer", batching.infer)):
        if passes.max_tokens is not None and longest > passes.max_tokens and passes.oversize == "error":
            text = f"sequences may reach {longest} tokens, over the cap of {passes.max_tokens} in {kind} passes"
            yield ("actor_train", "planning_args", "oversize"), f"{text}; such a one ends the job"
            return
