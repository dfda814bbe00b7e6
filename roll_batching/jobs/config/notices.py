"""Notices: keys that are accepted but have no effect, or another effect than in other frameworks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll_batching.jobs.config.auto_caps import with_open_caps
from roll_batching.jobs.config.diagnostics import KeyPath, Notice, NoticeKind, no_effect
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.foreign_keys import Verdict, given_foreign_keys
from roll_batching.jobs.config.job_keys import SUPERVISED_TASKS, JobKeys
from roll_batching.jobs.config.key_paths import field_at, given_keys
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.model_rules import adapter_notices, image_notices
from roll_batching.jobs.config.objective_rules import unread_reference
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import distills, uses_teacher
from roll_batching.jobs.config.unread_keys import replaced_keys, unread_by_engine, unread_keys
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.config.yaml_source import Source
from roll_batching.settings.batching import PASSES_OF_ROLES
from roll_batching.settings.fields import Pass, Scope, scope_of
from roll_batching.settings.megatron_config import ENGINE_STRATEGIES
from roll_batching.settings.training import TrainingArgs

_DECODED = "rollouts are decoded, not batched by a plan; old log-probs follow actor_train's batching"
_PASSES: dict[Pass, str] = {"train": "training passes", "infer": "passes without gradient"}
_RESOLVED: Mapping[KeyPath, Mapping[str, str]] = {
    ("adv_estimator",): {"distill": "reinforce"},
    ("actor_train", "logprob_plan"): dict.fromkeys(("distill", *SUPERVISED_TASKS), "none"),
}
"""By key, and by task that does not read the key: the value that the loader sets, which a run's config.yaml holds."""


def collect_notices(job: JobKeys, source: Source) -> tuple[Notice, ...]:
    """The notices of `job` as written in `source`, in the order of the file; at most one per key."""
    notices = _without_effect(job, source.data)
    for notice in _with_other_effect(job, source.data):
        notices.setdefault(notice.key, notice)
    placed = [replace(notice, place=source.place(notice.key)) for notice in notices.values()]
    return tuple(sorted(placed, key=lambda notice: notice.line or 10**9))


def _without_effect(job: JobKeys, data: dict[str, Any]) -> dict[KeyPath, Notice]:
    """Notices on given keys that nothing reads, by path; an unread section gets one notice."""
    foreign = {path: key.reason for path, _, key in given_foreign_keys(data) if key.verdict is Verdict.NO_EFFECT}
    # Reversed, so that of several reasons for one key the first is kept.
    unread_beside, replaced = dict(reversed(list(unread_keys(job)))), dict(replaced_keys(job))
    notices: dict[KeyPath, Notice] = {}
    for path, value in given_keys(data):
        if value is None:
            continue
        unread: tuple[KeyPath, str] | None = None
        if _is_changed(job, path, value):
            unread = _switched_off(job, path)
        if unread is None and (role := job.roles.get(str(path[0]))) is not None:
            reason = unread_in(str(path[0]), path[1:]) or unread_by_engine(job, role, path[1:])
            unread = (path, reason) if reason else None
        if unread is None and path in foreign:
            unread = path, foreign[path]
        if unread is None and path[0] in job.roles:
            unread = _of_other_mode(job.roles[str(path[0])], path)
        if unread is None and path in replaced and value != _value_at(job, path):
            unread = path, replaced[path]
        if unread is None and _is_changed(job, path, value):
            sections = [path[:end] for end in range(1, len(path) + 1) if path[:end] in unread_beside]
            unread = (sections[0], unread_beside[sections[0]]) if sections else None
        if unread is not None:
            notices[unread[0]] = no_effect(*unread)
    return notices


def _is_changed(job: JobKeys, path: KeyPath, value: Any) -> bool:
    """Whether the `value` of a key is neither its default nor what the loader makes of it."""
    field = field_at(path)
    return field is None or value not in (
        field.get_default(call_default_factory=True),
        _RESOLVED.get(path, {}).get(job.task),
    )


def _value_at(job: JobKeys, path: KeyPath) -> Any:
    """The section or value of the job at `path`, or None."""
    value: Any = job
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list):
            value = value[int(part)]
        else:
            value = getattr(value, str(part), None)
    return value


def _switched_off(job: JobKeys, path: KeyPath) -> tuple[KeyPath, str] | None:
    """The outermost key on `path` with a switch that is off, and why."""
    for end in range(1, len(path) + 1):
        field = field_at(path[:end])
        for switch in scope_of(field).switches if field is not None else ():
            section = job if switch.of_job else _value_at(job, path[: end - 1])
            if section is not None and not switch.is_on(section):
                return path[:end], switch.otherwise.format(section)
    return None


def unread_in(role: str, path: KeyPath) -> str | None:
    """Why `role` never reads the key at `path` (within a role), or None if it does."""
    scope = _scope(role, path)
    if scope.roles is not None and role not in scope.roles.names:
        return scope.roles.otherwise
    if scope.passes is None or set(scope.passes) & set(PASSES_OF_ROLES[role]):
        return None
    if not PASSES_OF_ROLES[role]:
        return _DECODED
    return f"this role makes no {' and '.join(_PASSES[kind] for kind in scope.passes)}"


def _scope(role: str, path: KeyPath) -> Scope:
    """The scope of the key at `path` (within `role`); what the key leaves open comes from the sections around it."""
    scope = Scope()
    for end in range(1, len(path) + 1):
        if (field := field_at((role, *path[:end]))) is not None:
            inner = scope_of(field)
            scope = Scope(
                roles=inner.roles or scope.roles, passes=inner.passes or scope.passes, mode=inner.mode or scope.mode
            )
    return scope


def _of_other_mode(role: WorkerConfig, path: KeyPath) -> tuple[KeyPath, str] | None:
    """The outermost section or key on `path` that only another batching mode than the role's reads, and why."""
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
        return path[:end], reason
    return None


# ---- keys with another effect


def _with_other_effect(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Notices on keys that are read, with a consequence worth knowing, and on roles that are not built."""
    yield from _of_engines(job, data)
    if data.get("export_model") and job.actor_train.model_args.model_name_or_path is None:
        text = "the model starts from an architecture; only one that starts from a model directory (pretrain) is"
        yield no_effect(("export_model",), f"{text} exported")
    yield from _of_roles_not_built(job)
    yield from _of_loss(job, data)
    yield from _of_greedy_answers(job, data)
    yield from _of_short_warmups(job)
    yield from adapter_notices(job)
    yield from image_notices(job)
    yield from _of_derived_caps(job, data)
    if not job.is_supervised:
        yield from _of_old_log_probs(job.actor_train, data.get("actor_train") or {})
    yield from _of_lengths(job)


def _of_engines(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Notices on engines that are not started, and on variables of TransformerEngine where it is not used."""
    for name, role in job.roles.items():
        engine = role.strategy_args.strategy_name
        if engine in ENGINE_STRATEGIES and not uses_engine(job) and not (name == "actor_infer" and job.is_supervised):
            text = (
                f"{engine} is not started: rollouts run on the Megatron model itself, with its current weights; "
                "engines read model directories, and the model starts from none (pretrain)"
            )
            yield Notice((name, "strategy_args", "strategy_name"), text)
    layouts = [role.strategy_args.strategy_config for role in job.roles.values()]
    if any("transformer_engine" in (layout.transformer_impl, layout.attention_backend) for layout in layouts):
        return
    for path, _ in given_keys(data):
        if "system_envs" in path[:2] and str(path[-1]).startswith("NVTE_"):
            text = (
                "is set for the workers, but only TransformerEngine reads it, which is not used here: "
                "transformer_impl: transformer_engine in strategy_config takes its layers, attention_backend its "
                "attention"
            )
            yield Notice(path, text)


def _of_roles_not_built(job: JobKeys) -> Iterator[Notice]:
    """Notices on roles that the file describes and the job does not build, with the cause."""
    causes: dict[str, str | None] = {"reference": unread_reference(job)}
    if not uses_critic(job):
        causes["critic"] = f"adv_estimator is {job.adv_estimator}, not gae" if job.max_steps else "max_steps is 0"
        if job.task != "grpo":
            causes["critic"] = f"task is {job.task}"
    if not uses_teacher(job):
        unread = f"the loss {job.loss_function} does not read it"
        causes["teacher"] = "max_steps is 0" if distills(job) else unread
    for name, cause in causes.items():
        if cause is not None and name in job.roles:
            yield Notice((name,), f"is not built: {cause}", kind=NoticeKind.NOT_BUILT)


def _of_loss(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Notices on a loss that reads no advantages, and on kl_loss_bound where the loss has no k3 to bound."""
    loss = LOSSES.get(job.loss_function)
    if loss is None:
        return
    if job.task == "grpo" and "advantages" not in loss.reads:
        text = f"{loss.name} reads no advantages: rewards are measured and change nothing"
        yield Notice(("loss_function",), text)
    estimator, default = job.loss_args.get("kl_estimator", "k3"), JobKeys.model_fields["kl_loss_bound"].default
    is_read = "kl_bound" in loss.keys and "kl_loss_bound" in data and job.kl_loss_bound != default
    if is_read and not (job.kl_coef and estimator == "k3"):
        cause = f"kl_estimator is {estimator}" if job.kl_coef else "use_kl_loss is false or kl_loss_coef is 0"
        yield Notice(("kl_loss_bound",), f"bounds the metric approx_kl alone: {cause}")


def _of_greedy_answers(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """The notice that several greedy answers to a held-out prompt cost time and are equal."""
    args = job.validation.generating_args
    answers = ((data.get("validation") or {}).get("generating_args") or {}).get("num_return_sequences")
    if isinstance(answers, int) and answers > 1 and args.greedy is not None and job.without_evaluation is None:
        text = f"decoding is greedy: the {answers} answers to a prompt are equal, and 1 measures the same"
        yield Notice(("validation", "generating_args", "num_return_sequences"), text)


def _of_short_warmups(job: JobKeys) -> Iterator[Notice]:
    """Notices on warm-ups of the learning rate that are longer than their phase."""
    phases: list[tuple[Sequence[str], TrainingArgs, int | None]] = []
    dp_size = 1  # if it is not known yet: no size has more optimizer steps, so a notice is true for each
    size = job.actor_train.strategy_args.strategy_config.model_size
    if job.world_size is not None and job.world_size % size == 0:
        dp_size = job.world_size // size
    phases.append((("actor_train",), job.actor_train.training_args, job.optimizer_steps(dp_size)))
    if uses_critic(job) and job.critic is not None:
        args = job.critic.training_args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size
        phases.append(
            (("critic",), args, job.max_steps * math.ceil(job.samples_per_rollout / size) * job.critic_epochs)
        )
    if job.warmup is not None:
        steps = job.warmup.training_args.max_steps if job.warmup.num_train_epochs is None else None
        phases.append((("warmup",), job.warmup.training_args, steps))
    for path, args, steps in phases:
        text = args.unfinished_warmup(steps) if steps else None
        if text is not None:
            yield Notice((*path, "training_args", "warmup_steps"), text)


def _of_derived_caps(job: JobKeys, data: dict[str, Any]) -> Iterator[Notice]:
    """Notices on caps of packs that no key gives, so that they are derived from sequence_length."""
    for name, role in job.roles.items():
        caps = (data.get(name) or {}).get("sequence_packing_args") or {}
        if not role.use_sequence_packing or not PASSES_OF_ROLES[name] or job.stream is not None:
            continue
        is_budgeted = name == "actor_train" and job.token_budget > 0
        if not is_budgeted and not any(caps.get(f"max_packed_sequence_length_{kind}") for kind in ("train", "forward")):
            cap = role.sequence_packing_args.max_packed_sequence_length_train
            rows = "per_device_train_batch_size" if name == "actor_train" else "infer_batch_size"
            text = f"no cap is given: packs hold up to {cap} tokens, {rows} x sequence_length"
            key = "sequence_packing_args.max_packed_sequence_length_train"
            yield Notice((name, "use_sequence_packing"), f"{text} ({key})")


def _of_old_log_probs(role: WorkerConfig, given: dict[str, Any]) -> Iterator[Notice]:
    """Notices on micro-batch keys for passes without gradient: `logprob_plan` decides if old log-probs use them."""
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


def _of_lengths(job: JobKeys) -> Iterator[Notice]:
    """Notices on sequences that may exceed the model's positions, or a cap."""
    longest = job.sequence_length
    if longest is None:
        return
    model = job.actor_train.model_args.architecture
    if model is not None and longest > model.max_position_embeddings:
        text = f"is below the job's sequence_length {longest}; longer sequences are rotated all the same"
        yield Notice(("actor_train", "model_args", "architecture", "max_position_embeddings"), text)
    batching = with_open_caps(job).actor_train.batching()
    if job.actor_train.strategy_args.strategy_config.has_cp_per_pack:
        return  # the cap is that of one rank of a pack, and how many there may be depends on the job's processes
    for kind, passes in (("train", batching.train), ("infer", batching.infer)):
        if passes.max_tokens is not None and longest > passes.max_tokens and passes.oversize == "error":
            text = f"sequences may reach {longest} tokens, over the cap of {passes.max_tokens} in {kind} passes"
            yield Notice(("actor_train", "planning_args", "oversize"), f"{text}; a longer one ends the job")
            return
