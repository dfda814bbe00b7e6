"""Rules of heads of multi-token prediction (`mtp_num_layers`) in the policy."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import CONFIG, find_directory, read_json
from roll_batching.huggingface.families import load_family
from roll_batching.huggingface.mtp_layer_rules import mtp_heads_problem
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.settings.idle_options import idle_options_of_model
from roll_batching.settings.model_parts import problems_of_heads

_LAYOUT = ("actor_train", "strategy_args", "strategy_config")


def mtp_problems(job: JobKeys) -> Iterator[Problem]:
    """Heads that the model, its directory or the layout cannot have, and settings of heads without any."""
    model, layout = job.actor_train.model_args, job.actor_train.strategy_args.strategy_config
    path = (*_LAYOUT, "mtp_num_layers")
    heads = layout.mtp_num_layers
    if heads is None and model.architecture is not None:
        path, heads = ("actor_train", "model_args", "architecture", "mtp_num_layers"), model.architecture.mtp_num_layers
    if model.architecture is not None and not model.value_head:
        for key, text in idle_options_of_model(layout, model.architecture):
            yield Problem((*_LAYOUT, key), text)
    if not heads:
        return
    if model.lora_target is not None:
        yield Problem(path, "is set, and lora_target freezes the model, heads too; leave one of them out")
    if model.architecture is not None:
        engine = layout.transformer_impl == "transformer_engine"
        stages = layout.pipeline_model_parallel_size
        for text in problems_of_heads(model.architecture, engine_layers=engine, rotates=True, stages=stages):
            yield Problem(path, f"is {heads}, but {text}")
    if model.model_name_or_path is None or (folder := find_directory(model.model_name_or_path)) is None:
        return
    try:
        config = read_json(folder / CONFIG)
        problem = mtp_heads_problem(load_family(config.get("model_type"), model.family), config, heads)
    except ConfigError:  # `model_problems` tells
        return
    if problem is not None:
        yield Problem(path, f"{problem} ({model.model_name_or_path})")
