"""Rules of prompts and texts with images (`actor_train.data_args.images`)."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.critic_rules import uses_critic
from roll_batching.jobs.config.diagnostics import Notice, Problem
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.objective_rules import wants_reference

_DATA = ("actor_train", "data_args")
_TASKS = ("sft", "grpo")
ENGINES = ("sglang",)
"""Engines that take images."""


def image_problems(job: JobKeys) -> Iterator[Problem]:
    """Settings that exclude images, or have no effect without them."""
    data, path = job.actor_train.data_args, (*_DATA, "images")
    if data.images is None:
        for key in ("image_min_pixels", "image_max_pixels"):
            if getattr(data, key) is not None:
                yield Problem((*_DATA, key), "has no effect without images: set images to their key, or leave it out")
        return
    low, high = data.image_min_pixels, data.image_max_pixels
    if low is not None and high is not None and low > high:
        yield Problem((*_DATA, "image_min_pixels"), f"is {low}, above image_max_pixels = {high}")
    model = job.actor_train.model_args
    if model.model_name_or_path is None:
        text = "needs the image processor of a model directory: set pretrain to one of Qwen2.5-VL, or leave it out"
        yield Problem(path, text)
    elif model.architecture is not None and model.architecture.vision is None:
        text = f"is given, and {model.model_name_or_path} has no vision encoder that is trained: Qwen2.5-VL's are"
        yield Problem(path, text)
    if job.tokenizer.type != "hf":
        yield Problem(("tokenizer", "type"), "is char, which has no tokens of images; leave it out")
    if job.task not in _TASKS:
        yield Problem(path, f"is not supported under task: {job.task} for now; tasks with images: {', '.join(_TASKS)}")
    for where, what in _unsupported(job):
        yield Problem(where, f"{what} is not supported with images (actor_train.data_args.images) for now")


def image_notices(job: JobKeys) -> Iterator[Notice]:
    """The notice that a model with a vision encoder trains on texts alone."""
    model = job.actor_train.model_args
    if job.actor_train.data_args.images is None and model.architecture is not None and model.architecture.vision:
        text = "the model reads images, and this job none: for images set actor_train.data_args.images to their key in "
        text += "the data (docs/vision.md)"
        yield Notice(("actor_train", "model_args", "model_name_or_path"), text)


def _unsupported(job: JobKeys) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of this job that are not tested with images, each with what it sets."""
    if job.stream is not None:
        yield ("train",), "a stream of texts"
    if job.task != "grpo" or not job.max_steps:
        return
    if job.asynchronous:
        yield ("async_generation_ratio",), "sampling ahead of training"
    if job.rollout_function is not None:
        yield ("rollout_function",), "a rollout function"
    if uses_critic(job):
        yield ("adv_estimator",), "an advantage estimator with a critic"
    if job.own_devices("actor_infer") is not None and not job.asynchronous:
        yield ("actor_infer", "device_mapping"), "a sampler on other devices"
    if uses_engine(job) and (name := job.actor_infer.strategy_args.strategy_name) not in ENGINES:
        yield ("actor_infer", "strategy_args", "strategy_name"), f"{name}"
    if job.reference is not None and wants_reference(job) and job.own_devices("reference") is not None:
        yield ("reference", "device_mapping"), "a reference on other devices"
