"""Keys that are accepted but do something else here than their writer may expect: each gets a notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.jobs.config.async_rules import idle_async_keys
from roll_batching.jobs.config.diagnostics import KeyPath, Notice, dotted
from roll_batching.jobs.config.engine_rules import idle_option, starts_servers, uses_engine
from roll_batching.jobs.config.job_keys import TRACKERS, JobKeys
from roll_batching.jobs.config.key_paths import field_at, given_keys
from roll_batching.jobs.config.layout_rules import sampling_role
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.objective_rules import idle_objective_keys
from roll_batching.jobs.config.stream_rules import idle_stream_keys
from roll_batching.jobs.config.supervised import idle_supervised_keys, supervised
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.planning.batching_spec import Mode
from roll_batching.settings.batching import PASSES_OF_ROLES
from roll_batching.settings.fields import Honoured, Noticed, Pass, Roles, use_of
from roll_batching.settings.strategy import ENGINE_STRATEGIES

_OF_STARTED = (("engine_args", "command"), ("engine_args", "start_timeout"))
_OF_HF = ("weights_folder", "gap_warning")
"""Keys of engine_args that an engine in the job's own processes reads."""
_DECODED = "rollouts are decoded, not batched by a plan; old log-probs follow actor_train's batching"
_NAMES: dict[Pass, str] = {"train": "training passes", "infer": "passes without gradient"}


def collect_notices(job: JobKeys, source: Source) -> tuple[Notice, ...]:
    """The notices of `job` as written in `source`, in the order of the file."""
    found = [Notice(dotted(path), text, source.place(path)) for path, text in _notices(job, source.data).items()]
    return tuple(sorted(found, key=lambda notice: notice.line or 10**9))


def unread_in(role: str, path: KeyPath) -> str | None:
    """What rules instead of the key at `path` (within a role), where `role` never reads it."""
    declared = _declared(role, path)
    if declared.roles is not None and role not in declared.roles.names:
        return declared.roles.otherwise
    if declared.passes is None or set(declared.passes) & set(PASSES_OF_ROLES[role]):
        return None
    if not PASSES_OF_ROLES[role]:
        return _DECODED
    return f"this role makes no {' and '.join(_NAMES[kind] for kind in declared.passes)}"


def _declared(role: str, path: KeyPath) -> Honoured:
    """Where the key at `path` (within `role`) applies: as its sections say, where it does not say it itself."""
    roles: Roles | None = None
    passes: tuple[Pass, ...] | None = None
    mode: Mode | None = None
    for end in range(1, len(path) + 1):
        field = field_at((role, *path[:end]))
        use = use_of(field) if field is not None else None
        if isinstance(use, Honoured):
            roles, passes, mode = use.roles or roles, use.passes or passes, use.mode or mode
    return Honoured(roles=roles, passes=passes, mode=mode)


def _notices(job: JobKeys, data: dict[str, Any]) -> dict[KeyPath, str]:
    found: dict[KeyPath, str] = {}
    for path, value in given_keys(data):
        if value is None:
            continue
        text = _for_key(job, path)
        if text is not None:
            found[path] = text
        elif path[0] in job.roles:
            found |= dict(_of_another_mode(job.roles[str(path[0])], path))
    for path, text in _combinations(job, data):
        found.setdefault(path, text)
    return found


def _for_key(job: JobKeys, path: KeyPath) -> str | None:
    """The notice for one given key, or None when it is honoured."""
    role = job.roles.get(str(path[0]))
    if role is not None:
        unread = unread_in(str(path[0]), path[1:])
        if unread is not None:
            return f"has no effect: {unread}"
        if role.strategy_args.strategy_name in ENGINE_STRATEGIES:
            text = _under_an_engine(job, role, path)
            if text is not None:
                return text
    if "system_envs" in path[:2] and str(path[-1]).startswith("NVTE_") and not _uses_engine(job):
        return (
            "is set for the workers, but only TransformerEngine reads it, which is not used here: "
            "transformer_impl: transformer_engine in strategy_config takes its layers, attention_backend its attention"
        )
    field = field_at(path)
    use = use_of(field) if field is not None else None
    return f"has no effect: {use.notice}" if isinstance(use, Noticed) else None


def _uses_engine(job: JobKeys) -> bool:
    return any(
        "transformer_engine" in (config.transformer_impl, config.attention_backend)
        for config in (role.strategy_args.strategy_config for role in job.roles.values())
    )


def _under_an_engine(job: JobKeys, role: WorkerConfig, path: KeyPath) -> str | None:
    engine, asked = role.strategy_args.strategy_name, uses_engine(job)
    if path[1:] == ("strategy_args", "strategy_name") and not asked:
        return (
            f"{engine} is not started: rollouts run on the Megatron model itself, with its current weights; engines "
            "read model directories, and the model starts from none (pretrain)"
        )
    if path[1:3] == ("strategy_args", "strategy_config") and not starts_servers(job):
        return f"has no effect: a setting of {engine}, which is not started here"
    if path[1:3] == ("strategy_args", "strategy_config"):
        idle = idle_option(str(path[-1]), role.strategy_args.engine_options.get(str(path[-1])))
        return None if idle is None else f"has no effect: {idle}"
    if path[1:] in _OF_STARTED and asked and not starts_servers(job):
        return "has no effect: the job starts no server"
    if path[1] == "engine_args" and (not asked or (engine == "hf_infer" and path[2] not in _OF_HF)):
        return f"has no effect: {engine} asks no server"
    if path[1:] == ("engine_args", "weights_folder") and role.engine_args.update_weights_from == "distributed":
        return "has no effect: weights go to the engine without a file (update_weights_from: distributed)"
    if path[1:] == ("generating_args", "max_tokens_in_cache") and asked:
        return "has no effect: it bounds the Megatron model's cache; the engine has a limit of its own"
    if path[1:] == ("device_mapping",) and role.device_mapping != job.actor_train.device_mapping:
        if starts_servers(job):
            return None
        where = "where the engine's servers do" if engine != "hf_infer" and asked else "on actor_train's devices"
        return f"has no effect: rollouts run {where}"
    return None


def _of_another_mode(role: WorkerConfig, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """The outermost section or key on `path` that belongs to a batching mode in which none of its passes runs."""
    name = str(path[0])
    for end in range(2, len(path) + 1):
        declared = _declared(name, path[1:end])
        if declared.mode is None or declared.passes is None:
            continue
        modes = {kind: role.mode_of(kind) for kind in PASSES_OF_ROLES[name] if kind in declared.passes}
        if declared.mode not in modes.values():
            if len(modes) == 1:
                ((kind, mode),) = modes.items()
                text = f"{_NAMES[kind]} are {mode}, not {declared.mode}"
                if declared.mode == "dynamic":
                    text += f" (use_dynamic_batching_in_{kind})"
            else:
                text = f"no pass of this role is {declared.mode}"
            if declared.mode == "packed":
                text += " (use_sequence_packing)"
            yield path[:end], f"has no effect: {text}"
            return


def _combinations(job: JobKeys, data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    loss = LOSSES.get(job.loss_function)
    if loss is not None:
        yield from _policy(job, data, set(loss.keys))
    yield from idle_objective_keys(job, data)
    yield from idle_supervised_keys(job, data)
    yield from idle_stream_keys(job, data)
    if job.track_with not in TRACKERS:
        names = " and ".join(TRACKERS)
        if "track_with" in data:
            yield ("track_with",), f"has no effect: metrics go to metrics.jsonl and TensorBoard; {names} add to them"
        if data.get("tracker_kwargs"):
            yield ("tracker_kwargs",), f"has no effect: track_with is neither of {names}"
    yield from idle_async_keys(job, data)
    sampling = data.get("actor_infer") or {}
    number = (sampling.get("generating_args") or {}).get("num_return_sequences")
    if number is not None and "num_return_sequences_in_group" in data and number != job.group_size:
        path = ("actor_infer", "generating_args", "num_return_sequences")
        yield path, f"has no effect: num_return_sequences_in_group = {job.group_size} is used"
    stages = sampling_role(job).strategy_args.strategy_config.pipeline_model_parallel_size
    if job.actor_infer.generating_args.max_tokens_in_cache is not None and stages > 1:
        path = ("actor_infer", "generating_args", "max_tokens_in_cache")
        yield path, f"has no effect: with {stages} pipeline stages generation keeps no cache"
    if data.get("export_model") and job.actor_train.model_args.model_name_or_path is None:
        text = "the model starts from an architecture; one that starts from a model directory (pretrain) is written"
        yield ("export_model",), f"has no effect: {text}"
    yield from _derived(job, data)
    if not supervised(job):
        yield from _old_log_probs(job.actor_train, data.get("actor_train") or {})
    yield from _lengths(job)


def _derived(job: JobKeys, data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Caps that follow from sequence_length, sequence parallelism of one rank, bounds of a mask that is not there."""
    for name, role in job.roles.items():
        given = data.get(name) or {}
        caps = given.get("sequence_packing_args") or {}
        if role.use_sequence_packing and PASSES_OF_ROLES[name] and job.stream is None:
            if not any(caps.get(f"max_packed_sequence_length_{kind}") for kind in ("train", "forward")):
                cap = role.sequence_packing_args.max_packed_sequence_length_train
                rows = "per_device_train_batch_size" if name == "actor_train" else "infer_batch_size"
                text = f"no cap is given: packs hold up to {cap} tokens, {rows} x sequence_length"
                yield (name, "use_sequence_packing"), f"{text} (sequence_packing_args.max_packed_sequence_length_train)"
        layout = (given.get("strategy_args") or {}).get("strategy_config") or {}
        if layout.get("sequence_parallel") and role.strategy_args.strategy_config.tensor_model_parallel_size == 1:
            path = (name, "strategy_args", "strategy_config", "sequence_parallel")
            yield path, "has no effect: tensor_model_parallel_size is 1"
    for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
        if key in data and not job.difficulty_mask:
            yield (key,), "has no effect: difficulty_mask is false"


def _policy(job: JobKeys, data: dict[str, Any], settings: set[str]) -> Iterator[tuple[KeyPath, str]]:
    """Keys of the `settings` that the loss has, which other keys put out of effect."""
    if "clip_low" in settings:
        if job.use_pg_clip_range and "pg_clip" in data and not (job.dual_clip_loss and "dual_clip" in settings):
            yield ("pg_clip",), "has no effect: use_pg_clip_range takes pg_clip_low and pg_clip_high"
        for key in ("pg_clip_low", "pg_clip_high"):
            if key in data and not job.use_pg_clip_range:
                yield (key,), "has no effect: set use_pg_clip_range: true, or pg_clip"
    if "dual_clip" in settings and job.dual_clip_ratio is not None and not job.dual_clip_loss:
        yield ("dual_clip_ratio",), "has no effect: dual_clip_loss is false"
    if "aggregation" in settings and job.loss_agg_length is not None and not job.loss_agg_mode.endswith("-norm"):
        yield ("loss_agg_length",), "has no effect: loss_agg_mode is not seq-mean-token-sum-norm"
    if "kl_coef" in settings and job.kl_loss_coef and not job.use_kl_loss:
        yield ("kl_loss_coef",), "has no effect: use_kl_loss is false"
    if "kl_coef" in settings and job.use_kl_loss and not job.kl_loss_coef:
        yield ("use_kl_loss",), "has no effect: kl_loss_coef is 0"


def _old_log_probs(role: WorkerConfig, given: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys for passes without gradient that differ from training's, and whether old log-probs use them."""
    if role.logprob_plan != "own":
        text = f"has no effect: old log-probs use training's plans under logprob_plan: {role.logprob_plan}"
        text += "; own would use this"
    elif "logprob_plan" not in given:
        text = "is used for old log-probs, whose first ratio is then 1 up to rounding; logprob_plan: train makes it "
        text += "exactly 1, on training's plans"
    else:
        return
    for key in role.infer_keys:
        yield ("actor_train", *key), text


def _lengths(job: JobKeys) -> Iterator[tuple[KeyPath, str]]:
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
