"""Rules that compare several keys of a job. Each yields problems and raises nothing."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import (
    SERVED,
    corrects_engine,
    engine_problems,
    gym_problems,
    uses_engine,
)
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import (
    device_problems,
    differing_keys,
    layout_problems,
    sampling_problems,
    size_problems,
)
from roll_batching.jobs.config.model_rules import (
    adapter_problems,
    image_problems,
    missing_model,
    model_problems,
    models_that_cannot_sample,
    part_problems,
)
from roll_batching.jobs.config.objective_rules import objective_problems
from roll_batching.jobs.config.plain_data import withheld_problems
from roll_batching.jobs.config.rewards import reward_problems, share_problems
from roll_batching.jobs.config.rl_rules import (
    critic_problems,
    gigpo_problems,
    group_problems,
    length_problems,
    reward_shaping_problems,
    single_responses,
    train_infer_problems,
    uses_critic,
)
from roll_batching.jobs.config.rollout_keys import rollout_problems
from roll_batching.jobs.config.support import pair_problems
from roll_batching.jobs.config.task_rules import (
    missing_for_distillation,
    missing_for_supervised,
    stream_problems,
    supervised_problems,
    teacher_problems,
    token_budget_problems,
)
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.planning.registry import ALGORITHMS, algorithm_of
from roll_batching.secret_names import is_secret
from roll_batching.settings.batching import PASSES_OF_ROLES
from roll_batching.settings.fields import Pass
from roll_batching.settings.megatron_config import MEGATRON_STRATEGIES
from roll_batching.settings.training import rate_problem

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def broken_rules(job: JobKeys) -> list[Problem]:
    """All problems of `job`, each with the path of the key to change."""
    problems: list[Problem] = []
    for name, role in job.roles.items():
        problems += _strategy_name(name, role)
        if (problem := rate_problem(role.training_args)) is not None:
            problems.append(Problem((name, "training_args", problem[0]), problem[1]))
        if role.strategy_args.runs_on_megatron or name != "actor_infer":
            problems += _batching(name, role)
    problems += layout_problems("actor_train", job.actor_train)
    problems += critic_problems(job)
    problems += teacher_problems(job)
    problems += model_problems(job)
    problems += [*part_problems(job), *adapter_problems(job)]
    problems += _roles(job)
    problems += device_problems(job)
    problems += _environment(job)
    if not job.is_supervised:
        problems += _objective(job)
    problems += supervised_problems(job)
    problems += [*_chats(job), *image_problems(job)]
    problems += [*stream_problems(job), *token_budget_problems(job)]
    problems += objective_problems(job)
    problems += reward_problems(job.rewards, job.reward_function)
    problems += rollout_problems(job)
    if not job.is_supervised:
        shares = job.actor_train.data_args.domain_interleave_probs
        problems += share_problems(shares, job.rewards, job.rollout_batch_size)
    problems += train_infer_problems(job)
    problems += gigpo_problems(job)
    problems += group_problems(job)
    problems += reward_shaping_problems(job)
    problems += engine_problems(job)
    problems += length_problems(job)
    problems += pair_problems(job)
    return problems


def _strategy_name(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """Problems of the strategy of the role `name`."""
    path = (name, "strategy_args", "strategy_name")
    strategy = role.strategy_args.strategy_name
    if name == "actor_train" and strategy != "megatron_train":
        yield Problem(path, f"{strategy} cannot train; use megatron_train")
    if name == "critic" and strategy != "megatron_train":
        yield Problem(path, f"{strategy} cannot train the critic; use megatron_train")
    if name == "reference" and not role.strategy_args.runs_on_megatron:
        yield Problem(path, f"{strategy} cannot serve the reference; use megatron_infer")
    if role.use_sequence_packing and not role.strategy_args.runs_on_megatron:
        text = f"packing works only under {' and '.join(MEGATRON_STRATEGIES)}, not under {strategy}; set it to false"
        yield Problem((name, "use_sequence_packing"), text)


def _batching(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """Problems of the batching modes of the role `name`, and of their caps."""
    for kind, flag in (
        ("train", role.use_dynamic_batching_in_train),
        ("infer", role.use_dynamic_batching_in_infer),
    ):
        key = f"use_dynamic_batching_in_{kind}"
        is_given = key in role.model_fields_set
        if role.use_dynamic_batching is not None and is_given and flag != role.use_dynamic_batching:
            text = (
                f"differs from use_dynamic_batching: {str(role.use_dynamic_batching).lower()}, which sets both passes; "
                "keep one of the two"
            )
            yield Problem((name, key), text)
    if role.use_sequence_packing and (role.dynamic_in_train or role.dynamic_in_infer):
        keys = ["use_dynamic_batching"] if role.use_dynamic_batching else []
        keys += [
            f"use_dynamic_batching_in_{k}" for k in ("train", "infer") if getattr(role, f"use_dynamic_batching_in_{k}")
        ]
        text = f"packing and dynamic batching ({', '.join(keys)}) exclude each other; set one of them to false"
        yield Problem((name, "use_sequence_packing"), text)
        return
    if role.use_sequence_packing:
        yield from _packing_caps(name, role)
    passes: tuple[tuple[Pass, bool], ...] = (("train", role.dynamic_in_train), ("infer", role.dynamic_in_infer))
    for kind, on in passes:
        if on and (kind == "infer" or kind in PASSES_OF_ROLES[name]):
            yield from _dynamic(name, role, kind)
    if role.dynamic_in_train or role.dynamic_in_infer:
        yield from _shared_shapes(name, role)


def _packing_caps(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """The problem that packing has no cap."""
    packing = role.sequence_packing_args
    forward_only = "train" not in PASSES_OF_ROLES[name]
    cap = packing.max_packed_sequence_length_train
    if cap is None and not (forward_only and packing.max_packed_sequence_length_forward):
        key = f"max_packed_sequence_length_{'forward' if forward_only else 'train'}"
        text = "is missing: use_sequence_packing needs the most tokens that one pack may hold"
        yield Problem((name, "sequence_packing_args", key), text)


def _dynamic(name: str, role: WorkerConfig, kind: Pass) -> Iterator[Problem]:
    """Problems of the cap and the rounding of dynamic batching in passes of `kind`."""
    layout = role.strategy_args.strategy_config
    cap_key, round_key = f"max_tokens_per_microbatch_in_{kind}", f"sequence_length_round_in_{kind}"
    cap, step = role.dynamic_cap(kind), getattr(role, round_key)
    if cap is None:
        text = "is missing: dynamic batching needs the most tokens (rows x length) that one micro-batch may compute"
        yield Problem((name, cap_key), text)
    elif isinstance(cap, int) and cap < step:
        yield Problem((name, cap_key), f"is {cap}, below {round_key} = {step}: not even one row would fit; raise it")
    multiple = layout.tensor_model_parallel_size * layout.cp_size
    if step % multiple:
        text = (
            f"is {step}; it must be divisible by TP x CP = {layout.tensor_model_parallel_size} x "
            f"{layout.cp_size} = {multiple}; use {-(-step // multiple) * multiple}"  # the next multiple
        )
        yield Problem((name, round_key), text)


def _shared_shapes(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """The problem that the algorithm of dynamic batching cannot give all ranks the same shapes."""
    planning = role.planning_args
    if planning.shared_shapes and not algorithm_of("dynamic", planning.dynamic_algorithm).same_positions:
        able = " or ".join(entry.name for entry in ALGORITHMS["dynamic"] if entry.same_positions)
        text = (
            f"needs ranks that cut at the same positions, as dynamic_algorithm: {planning.dynamic_algorithm} does not"
        )
        yield Problem((name, "planning_args", "shared_shapes"), f"{text}; use {able}, or set this to false")


def _chats(job: JobKeys) -> Iterator[Problem]:
    """Problems of the keys of chats, chat templates and seeds."""
    data, path = job.actor_train.data_args, ("actor_train", "data_args")
    if data.chat and data.messages is not None:
        yield Problem((*path, "chat"), "is given beside messages, which hold whole chats; keep one of the two")
    for key in ("messages", "chat", "images"):
        if data.input_ids is not None and getattr(data, key):
            yield Problem((*path, key), "is given beside input_ids, which are read as they are; keep one of the two")
    if data.token_cache is not None and data.images is not None:
        yield Problem((*path, "token_cache"), "keeps texts without images; leave it out beside images")
    for key in ("query", "system"):
        if getattr(data, key) is not None and not data.chat:
            yield Problem((*path, key), "is a part of a chat: set chat to true, or leave it out")
    if "tools" in data.chat_template_columns:
        yield Problem(
            (*path, "chat_template_columns", "tools"), f"is set by {'.'.join(path)}.tools: name the key there"
        )
    has_chats = data.chat or data.messages is not None or (job.warmup is not None and job.warmup.messages is not None)
    for key in ("tools", "chat_template_columns", "chat_template_kwargs"):
        value = getattr(data, key)
        if value and value != type(data).model_fields[key].default and not has_chats:
            yield Problem((*path, key), "is for chats: set messages or chat, or leave it out")
    if data.seeds is not None:
        if job.rollout_function is None or job.is_supervised:
            yield Problem((*path, "seeds"), "is read by a rollout function only: set rollout_function, or leave it out")
        for key in ("file_name", "messages", "chat", "images"):
            if getattr(data, key):
                yield Problem((*path, "seeds"), f"makes the prompts, and {key} is given, too: leave out one of the two")


def _roles(job: JobKeys) -> Iterator[Problem]:
    """Problems of layouts and models of roles that differ from actor_train's and may not."""
    shared = job.actor_train.strategy_args.strategy_config
    for name, role in job.roles.items():
        if name == "actor_train" or not role.strategy_args.runs_on_megatron:
            continue
        different = differing_keys(role, job.actor_train)
        separate, samples = job.own_devices(name) is not None, name == "actor_infer"
        if samples and job.asynchronous and not separate:
            text = (
                "differs from actor_train's, but on actor_train's devices the sampler of async_generation_ratio is one "
            )
            text += "process; leave it out, or give actor_infer other devices (actor_infer.device_mapping)"
            for key in different:
                yield Problem((name, "strategy_args", "strategy_config", key), text)
        elif not separate and name != "teacher":  # `device_problems` checks the others, `teacher_problems` the teacher
            if different or role.model_args.architecture != job.actor_train.model_args.architecture:
                yield from size_problems(name, role)
            if different and samples and not job.is_supervised:
                yield from sampling_problems(name, role)
        implementation = role.strategy_args.strategy_config.transformer_impl
        if implementation != shared.transformer_impl and name != "teacher":
            text = f"is {implementation}, but {shared.transformer_impl} in actor_train, whose weights this role takes"
            yield Problem((name, "strategy_args", "strategy_config", "transformer_impl"), f"{text}; leave it out here")
    sampling, training = job.actor_infer.model_args, job.actor_train.model_args
    for key in ("model_name_or_path", "family", "vision_encoder", "architecture", "dtype"):
        if getattr(sampling, key) != getattr(training, key):
            text = "differs from actor_train's; rollouts run on actor_train's model; leave it out here"
            yield Problem(("actor_infer", "model_args", key), text)
    if job.reference is not None and job.reference.model_args.model_name_or_path != training.model_name_or_path:
        text = "differs from actor_train's; the reference is the policy at the start of RL; leave it out here"
        yield Problem(("reference", "model_args", "model_name_or_path"), text)


def _environment(job: JobKeys) -> Iterator[Problem]:
    """Problems of environment variables that the launcher sets, or that roles set to different values."""
    values: dict[str, tuple[str, str]] = {}  # by variable: the section that sets it first, and the value there
    scopes = [((), job.system_envs), *(((name,), role.system_envs) for name, role in job.roles.items())]
    for scope, variables in scopes:
        for variable, value in variables.items():
            path = (*scope, "system_envs", variable)
            if variable in LAUNCHER_VARIABLES:
                yield Problem(path, "is set by torchrun; leave it out")
            owner, before = values.setdefault(variable, (".".join(scope) or "the top level", value))
            if scope and before != value and owner != "the top level":
                hidden = is_secret(variable, value) or is_secret(variable, before)
                difference = "differs from that" if hidden else f"is {value!r}, but {before!r}"
                text = f"{difference} in {owner}; the roles share one process and its environment: set it once"
                yield Problem(path, text)


def _objective(job: JobKeys) -> Iterator[Problem]:
    """Problems of old log-probs, clips, masks, and norms of rewards."""
    train = job.actor_train
    model = train.model_args.architecture
    if model is not None and model.hidden_dropout and train.logprob_plan == "train" and job.max_steps:
        text = (
            f"dropout of {model.hidden_dropout} together with logprob_plan: train would make the first ratio differ "
            "from 1; set it to 0, or logprob_plan to own or none"
        )
        yield Problem(("actor_train", "model_args", "architecture", "hidden_dropout"), text)
    size = train.strategy_args.strategy_config.model_size
    if job.world_size is not None and job.world_size % size == 0:  # else checked when the job starts
        problem = job.logprob_problem(job.world_size // size)
        if problem is not None:
            yield problem
    sampled, trained = job.actor_infer.generating_args.temperature, train.logprob_temperature
    reads_sampled = train.logprob_plan == "rollout" or corrects_engine(job) or job.train_infer_correction is not None
    if trained not in (None, sampled) and reads_sampled and not _samples_from_servers(job):
        text = f"is {trained}, but the loss reads log-probs of the rollouts, at the sampling temperature {sampled}"
        yield Problem(("actor_train", "logprob_temperature"), f"{text}; leave it out, or use logprob_plan: train")
    if job.difficulty_mask and job.difficulty_low_threshold >= job.difficulty_high_threshold:
        text = f"is {job.difficulty_low_threshold}, not below difficulty_high_threshold {job.difficulty_high_threshold}"
        yield Problem(("difficulty_low_threshold",), f"{text}: no prompt would be left")
    if job.loss_function in ("policy", "clip_cov") and job.clip_range[0] >= 1:
        key = "pg_clip_low" if job.use_pg_clip_range else "pg_clip"
        yield Problem(
            (key,),
            f"is {job.clip_range[0]}; the ratio's lower bound 1 - {job.clip_range[0]} must stay above 0",
        )
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    for key, value in (estimator.implied if estimator else {}).items():
        if key in job.model_fields_set and getattr(job, key) not in (None, value):
            text = (
                f"is {str(value).lower()} under adv_estimator: {job.adv_estimator}; leave it out, or choose reinforce"
            )
            yield Problem((key,), text)
    yield from _reward_norm(job)


def _samples_from_servers(job: JobKeys) -> bool:
    """Whether servers sample; `engine_rules` has the rules for their log-probs."""
    return uses_engine(job) and job.actor_infer.strategy_args.strategy_name in SERVED


def _reward_norm(job: JobKeys) -> Iterator[Problem]:
    """Problems of ROLL's former key reward_norm beside the keys that replaced it."""
    if job.reward_norm is None:
        return
    given = {"norm_mean_type", "norm_std_type"} & job.model_fields_set
    derived = {key: getattr(job, key) for key in given}  # config.yaml of a run has both, and they agree
    if given and derived != job.norms_of_reward_norm:
        yield Problem(("reward_norm",), "is a short form of norm_mean_type and norm_std_type; keep one of the two")
    elif job.adv_estimator == "grpo" and job.reward_shift:
        text = "grpo divides by the group's deviation; use adv_estimator: reinforce, or set this to false"
        yield Problem(("reward_shift",), text)


def missing_for_a_run(job: JobKeys) -> list[Problem]:
    """Problems of keys that a run needs, although a file without them is valid."""
    problems = withheld_problems(job.model_dump(mode="json"))

    def need(present: object, path: tuple[str, ...], text: str) -> None:
        if not present:
            problems.append(Problem(path, text))

    model = job.actor_train.model_args
    if model.model_name_or_path is not None:
        problems += missing_model(job, "actor_train", model.model_name_or_path)
    else:
        need(
            model.architecture,
            ("actor_train", "model_args", "architecture"),
            "is missing: the model's shape (hidden_size, num_layers, ...); or name a model directory in pretrain",
        )
    need(
        job.is_supervised or job.max_steps or job.warmup,
        ("max_steps",),
        "is 0 and there is no warmup section: nothing to do",
    )
    tokenizer = job.tokenizer
    if tokenizer.type == "char":
        text = "is missing: give the characters, or vocabulary_file, or type: hf"
        need(tokenizer.vocabulary or tokenizer.vocabulary_file, ("tokenizer", "vocabulary"), text)
        need(tokenizer.eos_token, ("tokenizer", "eos_token"), "is missing: the character that ends a response")
    else:
        need(tokenizer.name_or_path, ("tokenizer", "name_or_path"), "is missing: folder or name of the tokenizer")
    problems += missing_for_distillation(job)
    critic = job.critic.model_args.model_name_or_path if job.critic is not None and uses_critic(job) else None
    if critic is not None and critic != model.model_name_or_path:
        problems += missing_model(job, "critic", critic)
    if job.is_supervised:
        return [*problems, *missing_for_supervised(job)]
    if not job.max_steps:
        return problems
    data = job.actor_train.data_args
    need(data.prompts, ("actor_train", "data_args", "file_name"), "is missing: the JSONL file of prompts")
    need(
        job.has_reward or job.rollout_function or job.task == "distill",
        ("reward_function",),
        "is missing: the name or the dotted path of the function that scores responses; or a section `rewards`; or a "
        "rollout_function that returns rewards",
    )
    need(job.response_length, ("response_length",), "is missing: the longest response in tokens")
    if job.eval_samples and (job.has_reward or job.rollout_function):
        text = "is missing: the JSONL file of held-out prompts; or set eval_samples: 0"
        need(data.held_out_prompts(job.eval_samples), ("actor_train", "data_args", "eval_file_name"), text)
    problems += single_responses(job)
    if job.norm_std_type == "batch":
        text = "is batch, and a step has one response, which has no deviation: raise rollout_batch_size"
        need(job.rollout_batch_size * job.group_size > 1, ("norm_std_type",), text)
    return [*problems, *gym_problems(job), *models_that_cannot_sample(job)]
