"""Rules about models: their parts, adapters, heads of multi-token prediction, FP8, images, and directories."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import CONFIG, directory_of, find_directory, read_json
from roll_batching.huggingface.families import load_family
from roll_batching.huggingface.layer_rules import mtp_heads_problem
from roll_batching.jobs.config.diagnostics import KeyPath, Notice, Problem
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import (
    builds_sampling_model,
    differing_keys,
    parts_of,
    policy_cannot_sample,
    sampling_role,
)
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fields import TRAINED, Settings
from roll_batching.settings.fp8 import fp8_problems
from roll_batching.settings.idle_options import idle_options_of_model
from roll_batching.settings.model import ArchitectureConfig, describe_model
from roll_batching.settings.support import HEADS, ROLE_REFUSALS, refused_pairs

ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys that rollouts and reference take from actor_train."""
_CONFIG = ("strategy_args", "strategy_config")
_HEADS = (*_CONFIG, "mtp_num_layers")
"""Path within a role of the number of heads that takes precedence over the architecture's."""


def part_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of parts of models, adapters, precision and layouts that do not go together (`settings/support.py`).

    Problems of keys that a role inherits from actor_train are reported for actor_train only.
    """
    of_policy = set(_pairs_of_role("actor_train", job.actor_train))
    for name, role in job.roles.items():
        if role.strategy_args.runs_on_megatron and (name != "actor_infer" or builds_sampling_model(job)):
            for path, text in _pairs_of_role(name, role):
                if name == "actor_train" or (path, text) not in of_policy:
                    yield Problem((name, *path), text)


def _pairs_of_role(name: str, role: WorkerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the path within the role and the text of each problem."""
    parts = parts_of(role)
    if name in TRAINED.names:
        parts = parts._replace(training=role.training_args)
    for row in refused_pairs(ROLE_REFUSALS, parts):
        layout_sets_heads = row.feature is HEADS and parts.layout.mtp_num_layers is not None
        yield _HEADS if layout_sets_heads else row.path, row.message(parts)
    for key, text in fp8_problems(parts.layout, parts.architecture):
        yield (*_CONFIG, key), text


# ---- adapters


def adapter_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of adapter keys that differ between roles, or that a role without adapters sets."""
    model = job.actor_train.model_args
    for name, role in job.roles.items():
        if name in ("actor_infer", "reference"):
            for key in ADAPTER_KEYS:
                if getattr(role.model_args, key) != getattr(model, key):
                    text = "differs from actor_train's, whose adapters this role takes; leave it out here"
                    yield Problem((name, "model_args", key), text)
        elif name != "actor_train" and role.model_args.lora_target is not None:
            text = "is set, and actor_train alone trains adapters for now; leave it out here"
            yield Problem((name, "model_args", "lora_target"), text)
    if model.lora_target is None or job.reference is None or not wants_reference(job):
        return
    if job.own_devices("reference") is None:
        for key in differing_keys(job.reference, job.actor_train):
            text = "differs from actor_train's, and with lora_target the reference is the policy without its adapters"
            yield Problem(("reference", *_CONFIG, key), f"{text}; leave it out here")


def adapter_notices(job: JobKeys) -> Iterator[Notice]:
    """A notice if the policy starts from adapters and the reference does not."""
    if job.actor_train.model_args.adapter_name_or_path is None or job.reference is None or not wants_reference(job):
        return
    text = "the reference is the model without these adapters, not the policy as it starts. For that, start from a "
    text += "model directory with the adapters added (roll-batching export)"
    yield Notice(("actor_train", "model_args", "adapter_name_or_path"), text)


# ---- multi-token prediction


def mtp_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of heads that the model's directory does not have, and of settings of heads in a model without any."""
    model, layout = job.actor_train.model_args, job.actor_train.strategy_args.strategy_config
    path: tuple[str, ...] = _HEADS
    heads = layout.mtp_num_layers
    if heads is None and model.architecture is not None:
        path, heads = HEADS.path, model.architecture.mtp_num_layers
    if model.architecture is not None and not model.value_head:
        for key, text in idle_options_of_model(layout, model.architecture):
            yield Problem(("actor_train", *_CONFIG, key), text)
    if not heads or model.model_name_or_path is None or (folder := find_directory(model.model_name_or_path)) is None:
        return
    try:
        config = read_json(folder / CONFIG)
        problem = mtp_heads_problem(load_family(config.get("model_type"), model.family), config, heads)
    except ConfigError:  # `model_problems` tells
        return
    if problem is not None:
        yield Problem(("actor_train", *path), f"{problem} ({model.model_name_or_path})")


# ---- FP8


def models_that_cannot_sample(job: JobKeys) -> Iterator[Problem]:
    """Problems of models that sample without an engine: parallel sizes and FP8."""
    yield from policy_cannot_sample(job)
    sampler = sampling_role(job)
    fp8 = sampler.strategy_args.strategy_config.fp8
    if fp8 is None or job.is_supervised or not job.max_steps:
        return
    engine = "set actor_infer.strategy_args.strategy_name to sglang or vllm, with `pretrain`"
    if not uses_engine(job):
        name = "actor_infer" if sampler is job.actor_infer else "actor_train"
        yield Problem((name, *_CONFIG, "fp8"), f"is {fp8}, and a model does not sample in FP8; {engine}")


# ---- images


_DATA = ("actor_train", "data_args")
_WITH_IMAGES = "Qwen2.5-VL, Qwen3-VL and Qwen3.5"


def image_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of settings that exclude images, or have no effect without them."""
    data, path = job.actor_train.data_args, (*_DATA, "images")
    if data.images is None:
        for key in ("image_min_pixels", "image_max_pixels"):
            if getattr(data, key) is not None:
                yield Problem((*_DATA, key), "has no effect without images: set images to their key, or leave it out")
        return
    low, high = data.image_min_pixels, data.image_max_pixels
    if low is not None and high is not None and low > high:
        yield Problem((*_DATA, "image_min_pixels"), f"is {low}, above image_max_pixels = {high}; lower it")
    model = job.actor_train.model_args
    if model.model_name_or_path is None:
        text = f"needs the image processor of a model directory: set pretrain to one of {_WITH_IMAGES}"
        yield Problem(path, f"{text}, or leave it out")
    elif model.architecture is not None and model.architecture.vision is None:
        text = f"is given, and {model.model_name_or_path} has no vision encoder that is trained"
        yield Problem(path, f"{text}: those of {_WITH_IMAGES} are")


def image_notices(job: JobKeys) -> Iterator[Notice]:
    """The notice that a model with a vision encoder trains on texts alone."""
    model = job.actor_train.model_args
    if job.actor_train.data_args.images is None and model.architecture is not None and model.architecture.vision:
        text = "the model reads images, and this job none: for images set actor_train.data_args.images to their key in "
        text += "the data (docs/vision.md)"
        yield Notice(("actor_train", "model_args", "model_name_or_path"), text)


# ---- model directories


TRAINED_WITH = (
    "hidden_dropout", "init_std", "aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate", "mtp_num_layers",
)  # fmt: skip
"""Settings of an architecture that concern training alone: they may differ from the model directory's."""


def model_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of models' directories: unsupported fields of config.json, settings that differ from it, and heads."""
    yield from mtp_problems(job)
    reported: list[tuple[object, ...]] = []  # models that several roles share are reported once
    has_images = job.actor_train.data_args.images is not None  # sets the key in all roles, and is refused by itself

    def asks_for_encoder(worker: WorkerConfig) -> bool:
        return worker.model_args.vision_encoder and not has_images

    for role, worker in job.roles.items():
        name = worker.model_args.model_name_or_path
        family = worker.model_args.family
        if name is None:
            if family is not None and (name, family) not in reported:
                reported.append((name, family))
                text = "has no effect without a model directory: set model_name_or_path, or leave it out"
                yield Problem((role, "model_args", "family"), text)
            if asks_for_encoder(worker) and (name, "encoder") not in reported:
                reported.append((name, "encoder"))
                text = "has no effect without a model directory: give architecture.vision in its place"
                yield Problem((role, "model_args", "vision_encoder"), text)
            continue
        described = describe_model(name, family, vision_encoder=worker.model_args.vision_encoder)
        if described is None:  # reported when the job starts (`missing_model`): another machine may have the directory
            continue
        given = worker.model_args.architecture
        if (name, given) in reported:
            continue
        reported.append((name, given))
        if described.problems:
            yield Problem(_place(job, role, name), f"{name}: {'; '.join(described.problems)}")
        elif asks_for_encoder(worker) and described.family is not None and described.family.encoder is None:
            text = f"{name} has no vision encoder (model_type {described.family.model_type}): leave it out"
            yield Problem((role, "model_args", "vision_encoder"), text)
        elif given is not None:
            path = (role, "model_args", "architecture")
            yield from _differences(given, ArchitectureConfig.model_validate(described.architecture), path, name)


def missing_model(job: JobKeys, role: str, name: str) -> list[Problem]:
    """The problem that the model directory `name` of `role` does not exist, or none."""
    try:
        directory_of(name)
    except ConfigError as error:
        return [Problem(_place(job, role, name), str(error))]
    return []


def _place(job: JobKeys, role: str, name: str) -> KeyPath:
    """The key that gives `role` the model `name`."""
    return ("pretrain",) if job.pretrain == name else (role, "model_args", "model_name_or_path")


def _differences(architecture: Settings, described: Settings, path: KeyPath, name: str) -> Iterator[Problem]:
    """Problems of settings of `architecture` that differ from `described`, the config.json of the directory `name`."""
    for key in type(architecture).model_fields:
        given_value, stored_value = getattr(architecture, key), getattr(described, key)
        if given_value == stored_value or key in TRAINED_WITH:
            continue
        if isinstance(given_value, Settings) and isinstance(stored_value, Settings):
            yield from _differences(given_value, stored_value, (*path, key), name)
        else:
            text = f"is {given_value}, and config.json of {name} says {stored_value}; leave it out here"
            yield Problem((*path, key), text)
