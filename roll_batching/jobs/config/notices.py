"""Notices: keys that are accepted but have no effect, or another effect than in other frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roll_batching.jobs.config.diagnostics import KeyPath, Notice, no_effect
from roll_batching.jobs.config.engine_rules import ignored_option, starts_servers, uses_engine
from roll_batching.jobs.config.foreign_keys import Verdict, given_foreign_keys
from roll_batching.jobs.config.idle_rules import idle_notices
from roll_batching.jobs.config.job_keys import TRACKERS, JobKeys
from roll_batching.jobs.config.key_paths import field_at, given_keys
from roll_batching.jobs.config.layout_rules import sampling_role
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.model_rules import adapter_notices, image_notices
from roll_batching.jobs.config.objective_rules import AGGREGATIONS, objective_notices
from roll_batching.jobs.config.rl_rules import async_notices, dynamic_sampling_notices
from roll_batching.jobs.config.stream_rules import stream_notices
from roll_batching.jobs.config.supervised import supervised, supervised_notices
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.planning.batching_spec import Mode
from roll_batching.settings.batching import PASSES_OF_ROLES
from roll_batching.settings.fields import Pass, Roles, Scope, scope_of
from roll_batching.settings.megatron_config import ENGINE_STRATEGIES

_SERVER_KEYS = (("engine_args", "command"), ("engine_args", "start_timeout"))
"""Keys for servers that the job starts."""
_HF_KEYS = ("weights_folder", "gap_warning")
"""Keys of engine_args that `hf_infer`, an engine in the job's own processes, reads."""
_DECODED = "rollouts are decoded, not batched by a plan; old log-probs follow actor_train's batching"
_CONSTANT = tuple(mode for mode, how in AGGREGATIONS.items() if how.startswith("constant_"))
_BIAS_RATE = "moe_router_bias_update_rate"
_PASSES: dict[Pass, str] = {"train": "training passes", "infer": "passes without gradient"}


def collect_notices(job: JobKeys, source: Source) -> tuple[Notice, ...]:
    """The notices of `job` as written in `source`, in the order of the file."""
    notices = [replace(notice, place=source.place(notice.key)) for notice in _notices(job, source.data)]
    return tuple(sorted(notices, key=lambda notice: notice.line or 10**9))


def unread_in(role: str, path: KeyPath) -> str | None:
    """Why `role` never reads the key at `path` (within a role); None where it does."""
    scope = _scope(role, path)
    if scope.roles is not None and role not in scope.roles.names:
        return scope.roles.otherwise
    if scope.passes is None or set(scope.passes) & set(PASSES_OF_ROLES[role]):
        return None
    if not PASSES_OF_ROLES[role]:
        return _DECODED
    return f"this role makes no {' and '.join(_PASSES[kind] for kind in scope.passes)}"


def _scope(role: str, path: KeyPath) -> Scope:
    """The scope of the key at `path` (within `role`); enclosing sections supply what it leaves open."""
    roles: Roles | None = None
    passes: tuple[Pass, ...] | None = None
    mode: Mode | None = None
    for end in range(1, len(path) + 1):
        field = field_at((role, *path[:end]))
        if field is not None:
            scope = scope_of(field)
            roles, passes, mode = scope.roles or roles, scope.passes or passes, scope.mode or mode
    return Scope(roles=roles, passes=passes, mode=mode)


def _notices(job: JobKeys, data: dict[str, Any]) -> list[Notice]:
    """At most one notice per key: on the key alone, else on a combination of keys."""
    notices: dict[KeyPath, Notice] = {}
    foreign = {path: key for path, _, key in given_foreign_keys(data) if key.verdict is Verdict.NO_EFFECT}
    for path, value in given_keys(data):
        if value is None:
            continue
        notice = _notice_of_key(job, path)
        if notice is None and path in foreign:
            notice = no_effect(path, foreign[path].reason)
        if notice is None and path[0] in job.roles:
            notice = _notice_of_mode(job.roles[str(path[0])], path)
        if notice is not None:
            notices[notice.key] = notice
    for notice in _combinations(job, data):
        notices.setdefault(notice.key, notice)
    return list(notices.values())


def _notice_of_key(job: JobKeys, path: KeyPath) -> Notice | None:
    """The notice that one given key gets by its place in the file and by the strategy of its role."""
    role = job.roles.get(str(path[0]))
    if role is not None:
        unread = unread_in(str(path[0]), path[1:])
        if unread is not None:
            return no_effect(path, unread)
        if role.strategy_args.strategy_name in ENGINE_STRATEGIES:
            notice = _notice_of_engine(job, role, path)
            if notice is not None:
                return notice
    if "system_envs" in path[:2] and str(path[-1]).startswith("NVTE_") and not _uses_transformer_engine(job):
        text = (
            "is set for the workers, but only TransformerEngine reads it, which is not used here: "
            "transformer_impl: transformer_engine in strategy_config takes its layers, attention_backend its attention"
        )
        return Notice(path, text)
    return None


def _uses_transformer_engine(job: JobKeys) -> bool:
    return any(
        "transformer_engine" in (config.transformer_impl, config.attention_backend)
        for config in (role.strategy_args.strategy_config for role in job.roles.values())
    )


def _notice_of_engine(job: JobKeys, role: WorkerConfig, path: KeyPath) -> Notice | None:
    """The notice of a key of a role whose strategy is an engine."""
    engine, used = role.strategy_args.strategy_name, uses_engine(job)
    if path[1:] == ("strategy_args", "strategy_name") and not used:
        text = (
            f"{engine} is not started: rollouts run on the Megatron model itself, with its current weights; engines "
            "read model directories, and the model starts from none (pretrain)"
        )
        return Notice(path, text)
    if path[1:3] == ("strategy_args", "strategy_config") and not starts_servers(job):
        return no_effect(path, f"a setting of {engine}, which is not started here")
    if path[1:3] == ("strategy_args", "strategy_config"):
        ignored = ignored_option(str(path[-1]), role.strategy_args.engine_options.get(str(path[-1])))
        return None if ignored is None else no_effect(path, ignored)
    if path[1:] in _SERVER_KEYS and used and not starts_servers(job):
        return no_effect(path, "the job starts no server")
    if path[1:2] == ("engine_args",) and (not used or (engine == "hf_infer" and path[-1] not in _HF_KEYS)):
        return no_effect(path, f"{engine} sends no requests to servers")
    if path[1:] == ("engine_args", "weights_folder") and role.engine_args.update_weights_from == "distributed":
        return no_effect(path, "weights go to the engine without a file (update_weights_from: distributed)")
    if path[1:] == ("generating_args", "max_tokens_in_cache") and used:
        return no_effect(path, "it limits the Megatron model's cache; the engine has its own limit")
    if path[1:] == ("device_mapping",) and role.device_mapping != job.actor_train.device_mapping:
        if starts_servers(job):
            return None
        where = "where the engine's servers do" if engine != "hf_infer" and used else "on actor_train's devices"
        return no_effect(path, f"rollouts run {where}")
    return None


def _notice_of_mode(role: WorkerConfig, path: KeyPath) -> Notice | None:
    """The notice of the outermost section or key on `path` for a batching mode that no pass of `role` has."""
    name = str(path[0])
    for end in range(2, len(path) + 1):
        scope = _scope(name, path[1:end])
        if scope.mode is None or scope.passes is None:
            continue
        modes = {kind: role.mode_of(kind) for kind in PASSES_OF_ROLES[name] if kind in scope.passes}
        if scope.mode in modes.values():
            continue
        if len(modes) == 1:
            ((kind, mode),) = modes.items()
            reason = f"{_PASSES[kind]} are {mode}, not {scope.mode}"
            if scope.mode == "dynamic":
                reason += f" (use_dynamic_batching_in_{kind})"
        else:
            reason = f"no pass of this role is {scope.mode}"
        if scope.mode == "packed":
            reason += " (use_sequence_packing)"
        return no_effect(path[:end], reason)
    return None


def _combinations(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Notices that depend on several keys."""
    loss = LOSSES.get(job.loss_function)
    if loss is not None:
        yield from _policy_notices(job, data, set(loss.keys))
    yield from objective_notices(job, data)
    yield from idle_notices(job, data)
    yield from supervised_notices(job, data)
    yield from stream_notices(job, data)
    if job.track_with not in TRACKERS:
        names = " and ".join(TRACKERS)
        if "track_with" in data:
            yield no_effect(("track_with",), f"metrics go to metrics.jsonl and TensorBoard; {names} add to them")
        if data.get("tracker_kwargs"):
            yield no_effect(("tracker_kwargs",), f"track_with is neither of {names}")
    yield from async_notices(job, data)
    yield from dynamic_sampling_notices(job, data)
    yield from adapter_notices(job)
    yield from image_notices(job)
    sampling = data.get("actor_infer") or {}
    number = (sampling.get("generating_args") or {}).get("num_return_sequences")
    if number is not None and "num_return_sequences_in_group" in data and number != job.group_size:
        key = ("actor_infer", "generating_args", "num_return_sequences")
        yield no_effect(key, f"num_return_sequences_in_group = {job.group_size} is used")
    stages = sampling_role(job).strategy_args.strategy_config.pipeline_model_parallel_size
    if job.actor_infer.generating_args.max_tokens_in_cache is not None and stages > 1:
        key = ("actor_infer", "generating_args", "max_tokens_in_cache")
        yield no_effect(key, f"with {stages} pipeline stages generation keeps no cache")
    if data.get("export_model") and job.actor_train.model_args.model_name_or_path is None:
        text = "the model starts from an architecture; only one that starts from a model directory (pretrain) is"
        yield no_effect(("export_model",), f"{text} exported")
    yield from _derived_values(job, data)
    if not supervised(job):
        yield from _old_log_probs(job.actor_train, data.get("actor_train") or {})
    yield from _lengths(job)


def _derived_values(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Packing caps derived from sequence_length; unread keys of TP, warm-up and difficulty_mask."""
    for name, role in job.roles.items():
        given = data.get(name) or {}
        caps = given.get("sequence_packing_args") or {}
        if role.use_sequence_packing and PASSES_OF_ROLES[name] and job.stream is None:
            budgeted = name == "actor_train" and job.token_budget > 0
            if not budgeted and not any(
                caps.get(f"max_packed_sequence_length_{kind}") for kind in ("train", "forward")
            ):
                cap = role.sequence_packing_args.max_packed_sequence_length_train
                rows = "per_device_train_batch_size" if name == "actor_train" else "infer_batch_size"
                text = f"no cap is given: packs hold up to {cap} tokens, {rows} x sequence_length"
                key = "sequence_packing_args.max_packed_sequence_length_train"
                yield Notice((name, "use_sequence_packing"), f"{text} ({key})")
        layout = (given.get("strategy_args") or {}).get("strategy_config") or {}
        if layout.get("sequence_parallel") and role.strategy_args.strategy_config.tensor_model_parallel_size == 1:
            path = (name, "strategy_args", "strategy_config", "sequence_parallel")
            yield no_effect(path, "tensor_model_parallel_size is 1")
        if (given.get("training_args") or {}).get("lr_warmup_init") and not role.training_args.warms_up:
            yield no_effect((name, "training_args", "lr_warmup_init"), "there is no warm-up: warmup_steps is 0")
        yield from _routers(name, role, layout)
    for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
        if key in data and not job.difficulty_mask:
            yield no_effect((key,), "difficulty_mask is false")


def _routers(name: str, role: WorkerConfig, layout: dict[str, Any]) -> Iterator[Notice]:
    """Keys of routers in the `layout` of a model that has none, or none with expert biases."""
    model = role.model_args.architecture
    if model is None:
        return
    reasons = dict.fromkeys(
        ("moe_router_dtype", "freeze_moe_router", _BIAS_RATE), "the model has no mixture of experts"
    )
    if model.moe is not None:
        reasons = {} if model.moe.router_expert_bias else {_BIAS_RATE: "the model's routers have no expert biases"}
    for key, reason in reasons.items():
        if (value := layout.get(key)) is not None and value is not False:
            yield no_effect((name, "strategy_args", "strategy_config", key), reason)


def _policy_notices(job: JobKeys, data: dict[str, Any], fields: set[str]) -> Iterator[Notice]:
    """Keys of the loss's `fields` that other keys switch off."""
    if "clip_low" in fields:
        if job.use_pg_clip_range and "pg_clip" in data and not (job.dual_clip_loss and "dual_clip" in fields):
            yield no_effect(("pg_clip",), "use_pg_clip_range takes pg_clip_low and pg_clip_high")
        for key in ("pg_clip_low", "pg_clip_high"):
            if key in data and not job.use_pg_clip_range:
                yield no_effect((key,), "set use_pg_clip_range: true, or pg_clip")
    if "dual_clip" in fields and job.dual_clip_ratio is not None and not job.dual_clip_loss:
        yield no_effect(("dual_clip_ratio",), "dual_clip_loss is false")
    if "aggregation" in fields and job.loss_agg_length is not None and job.loss_agg_mode not in _CONSTANT:
        yield no_effect(("loss_agg_length",), f"loss_agg_mode is neither of {' and '.join(_CONSTANT)}")
    if "kl_coef" in fields and job.kl_loss_coef and not job.use_kl_loss:
        yield no_effect(("kl_loss_coef",), "use_kl_loss is false")
    if "kl_coef" in fields and job.use_kl_loss and not job.kl_loss_coef:
        yield no_effect(("use_kl_loss",), "kl_loss_coef is 0")


def _old_log_probs(role: WorkerConfig, given: dict[str, Any]) -> Iterator[Notice]:
    """Whether old log-probs use the keys for passes without gradient that differ from those for training."""
    for path in role.infer_keys:
        key = ("actor_train", *path)
        if role.logprob_plan != "own":
            reason = f"old log-probs use training's plans under logprob_plan: {role.logprob_plan}; own would use this"
            yield no_effect(key, reason)
        elif "logprob_plan" not in given:
            text = (
                "is used for old log-probs, whose first ratio is then 1 up to rounding; logprob_plan: train makes it "
            )
            yield Notice(key, f"{text}exactly 1, on training's plans")


def _lengths(job: JobKeys) -> Iterator[Notice]:
    """Sequences that may exceed the model's positions, or a cap."""
    longest = job.sequence_length
    if longest is None:
        return
    model = job.actor_train.model_args.architecture
    if model is not None and longest > model.max_position_embeddings:
        text = f"is below the job's sequence_length {longest}; longer sequences are rotated all the same"
        yield Notice(("actor_train", "model_args", "architecture", "max_position_embeddings"), text)
    batching = job.actor_train.batching()
    if job.actor_train.strategy_args.strategy_config.has_cp_per_pack:
        return  # the cap is that of one rank of a pack, and how many there may be depends on the job's processes
    for kind, passes in (("train", batching.train), ("infer", batching.infer)):
        if passes.max_tokens is not None and longest > passes.max_tokens and passes.oversize == "error":
            text = f"sequences may reach {longest} tokens, over the cap of {passes.max_tokens} in {kind} passes"
            yield Notice(("actor_train", "planning_args", "oversize"), f"{text}; a longer one ends the job")
            return
