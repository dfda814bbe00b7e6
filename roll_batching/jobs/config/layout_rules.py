"""Rules for the parallel layout of a role, and for its model under that layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roll_batching.errors import LayoutError
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.contradictions import recurrent_misfit
from roll_batching.settings.idle_options import idle_options
from roll_batching.settings.megatron_config import SPLIT_KEYS, MegatronConfig
from roll_batching.settings.model import ArchitectureConfig
from roll_batching.settings.pipeline_split import split_problems
from roll_batching.settings.support import Parts

PARALLEL_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    *SPLIT_KEYS,
)


def parts_of(role: WorkerConfig) -> Parts:
    """The model that `role` builds, with its layout; the architecture is None where it is not known."""
    layout, model, built = role.strategy_args.strategy_config, role.model_args, None
    if model.architecture is not None:
        built = model.architecture_to_build(layout.mtp_num_layers)
    return Parts(model, built, layout, layout.transformer_impl)


def differing_keys(role: WorkerConfig, train: WorkerConfig) -> list[str]:
    """Keys of the parallel layout that differ in effect between `role` and `train`."""
    layout, shared = role.strategy_args.strategy_config, train.strategy_args.strategy_config
    keys = [key for key in PARALLEL_KEYS if getattr(layout, key) != getattr(shared, key)]
    if layout.tensor_model_parallel_size == shared.tensor_model_parallel_size == 1:
        keys = [key for key in keys if key != "sequence_parallel"]  # has no effect without TP
    if layout.vpp_size == shared.vpp_size:
        keys = [key for key in keys if key != "virtual_pipeline_model_parallel_size"]  # 1 and None are the same
    return keys


def sampling_role(job: JobKeys) -> WorkerConfig:
    """The role whose layout the sampling model has: actor_train for an asynchronous sampler on shared devices."""
    may_differ = job.own_devices("actor_infer") is not None or not job.asynchronous
    return job.actor_infer if may_differ and job.actor_infer.strategy_args.runs_on_megatron else job.actor_train


def samples_apart(job: JobKeys) -> bool:
    """Whether a second copy of the model, in another layout on the same ranks, samples rollouts."""
    return not job.has_sampler and bool(differing_keys(sampling_role(job), job.actor_train))


def layout_problems(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """Problems of the layout of a role that trains: sizes that do not fit, and options without effect."""
    yield from size_problems(name, role)
    layout, path = role.strategy_args.strategy_config, (name, "strategy_args", "strategy_config")
    for key, text in idle_options(layout):
        yield Problem((*path, key), text)


def size_problems(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """Problems of parallel sizes of `role` that exclude each other, or do not divide its model or devices."""
    layout = role.strategy_args.strategy_config
    path = (name, "strategy_args", "strategy_config")
    pp = layout.pipeline_model_parallel_size
    if layout.vpp_size > 1 and pp == 1:
        text = f"{layout.vpp_size} chunks per stage need pipeline_model_parallel_size of at least 2, which is 1"
        yield Problem((*path, "virtual_pipeline_model_parallel_size"), text)
    group = layout.microbatch_group_size_per_vp_stage
    if isinstance(group, int) and group < pp and layout.vpp_size > 1:
        yield Problem((*path, "microbatch_group_size_per_vp_stage"), f"is {group}; it must be at least PP = {pp}")
    if role.device_mapping is not None and len(role.device_mapping) % layout.model_size:
        yield Problem((name, "device_mapping"), layout.misfit(len(role.device_mapping)))
    model = role.model_args.architecture
    for key, text in split_problems(layout, None if model is None else model.num_layers):
        yield Problem((*path, key), text)
    if model is not None:
        yield from model_fits(name, model, layout)


ONE_WHEN_SAMPLING = ("virtual_pipeline_model_parallel_size", "context_parallel_size")
"""Sizes that must be 1 in a model that samples."""


def fixed_size(layout: MegatronConfig, key: str) -> int:
    """The size under `key`, one of `ONE_WHEN_SAMPLING`; 1 for a size per pack (auto), which concerns no sampling."""
    size = layout.vpp_size if key == "virtual_pipeline_model_parallel_size" else getattr(layout, key)
    return 1 if size in (None, "auto") else int(size)


def builds_sampling_model(job: JobKeys) -> bool:
    """Whether actor_infer has a model with its own settings: on its own devices, or a copy in another layout."""
    return job.own_devices("actor_infer") is not None or samples_apart(job)


def policy_cannot_sample(job: JobKeys) -> Iterator[Problem]:
    """Problems of sizes of actor_train that rule out sampling, where the training model itself samples."""
    if job.has_sampler or uses_engine(job) or samples_apart(job):
        return
    layout = job.actor_train.strategy_args.strategy_config
    cure = "set it to 1 in actor_infer.strategy_args.strategy_config, so that a copy in that layout samples"
    for key in ONE_WHEN_SAMPLING:
        if (size := fixed_size(layout, key)) > 1:
            text = f"is {size}, and models sample only with 1; the training model samples: {cure}"
            yield Problem(("actor_train", "strategy_args", "strategy_config", key), text)


def sampling_problems(name: str, role: WorkerConfig) -> Iterator[Problem]:
    """Problems of sizes that rule out sampling in `role`, which samples with a model of its own layout."""
    path = (name, "strategy_args", "strategy_config")
    for key in ONE_WHEN_SAMPLING:
        if (size := fixed_size(role.strategy_args.strategy_config, key)) > 1:
            yield Problem((*path, key), f"is {size}, and models sample only with 1; set it to 1 here")


def model_fits(name: str, model: ArchitectureConfig, layout: MegatronConfig) -> Iterator[Problem]:
    """Problems of dimensions of `model` that the parallel sizes of `layout` do not divide."""
    path = (name, "model_args", "architecture")
    tp, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size * layout.vpp_size
    if model.num_layers % stages and not layout.has_uneven_stages:
        text = (
            f"{model.num_layers} layers do not divide into PP x VPP = {stages} equal parts; use a multiple of {stages}"
            ", or give stages other numbers of layers (num_layers_in_first_pipeline_stage and the like)"
        )
        yield Problem((*path, "num_layers"), text)
    if model.num_attention_heads % tp:
        text = f"{model.num_attention_heads} heads do not divide among TP = {tp} ranks; use a multiple of {tp}"
        yield Problem((*path, "num_attention_heads"), text)
    if model.kv_heads % tp and tp % model.kv_heads:
        text = f"{model.kv_heads} query groups and TP = {tp} ranks: one must be a multiple of the other"
        yield Problem((*path, "num_query_groups"), text)
    elif 2 * model.kv_heads * model.head_dim % tp:
        text = (
            f"the rows of {model.kv_heads} keys and values of {model.head_dim} channels do not divide among TP = {tp}"
        )
        yield Problem((*path, "num_query_groups"), f"{text} ranks; use fewer ranks")
    if model.num_attention_heads % model.kv_heads:
        text = f"{model.num_attention_heads} heads do not divide among {model.kv_heads} query groups"
        yield Problem((*path, "num_query_groups"), text)
    divides_hidden = model.kv_channels is None and model.multi_latent_attention is None
    if divides_hidden and model.hidden_size % model.num_attention_heads:
        text = f"{model.hidden_size} does not divide among {model.num_attention_heads} heads; set kv_channels"
        yield Problem((*path, "hidden_size"), text)
    if (latent := model.multi_latent_attention) is not None:
        widths = {"kv_lora_rank": latent.kv_lora_rank + latent.qk_pos_emb_head_dim}
        for key, width in (widths | {"q_lora_rank": latent.q_lora_rank or 0}).items():
            if width % tp:
                rest = " + qk_pos_emb_head_dim" if key == "kv_lora_rank" else ""
                text = f"{key}{rest} = {width} does not divide among TP = {tp} ranks"
                yield Problem((*path, "multi_latent_attention", key), text)
    divide = layout.recurrent_context_parallel
    if (misfit := recurrent_misfit(model, tp_size=tp, cp_size=layout.cp_size, divide=divide)) is not None:
        yield Problem((*path, *misfit[0]), misfit[1])
    if model.ffn_width % tp:
        yield Problem(
            (*path, "ffn_hidden_size"), f"{model.ffn_width} does not divide among TP = {tp} ranks; use fewer ranks"
        )
    experts = layout.expert_model_parallel_size
    where = (name, "strategy_args", "strategy_config", "expert_model_parallel_size")
    if experts > 1 and model.moe is None:
        yield Problem(where, f"is {experts}, but the model has no mixture of experts (architecture.moe); use 1")
    elif model.moe is not None and model.moe.num_experts % experts:
        yield Problem(
            where, f"{model.moe.num_experts} experts do not divide among EP = {experts} ranks; use fewer ranks"
        )
    if model.moe is not None and tp > 1 and not layout.sequence_parallel:
        where = (name, "strategy_args", "strategy_config", "sequence_parallel")
        yield Problem(where, "is false; Megatron trains experts with tensor parallelism only with it; set it to true")
    if model.moe is not None and model.moe.router_topk > model.moe.num_experts:
        yield Problem((*path, "moe", "router_topk"), f"is more than the {model.moe.num_experts} experts; lower it")


# ---- device


def device_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the devices and layouts of roles that do not share actor_train's devices."""
    for name in job.roles:
        if (own := job.own_devices(name)) is not None:
            yield from _role_problems(job, name, own)
    sampler, reference = job.own_devices("actor_infer"), job.own_devices("reference")
    if sampler is not None and reference is not None and _overlap_partly(reference, sampler):
        text = "names some of actor_infer's devices: two roles share all of them, in the same order, or none"
        yield Problem(("reference", "device_mapping"), text)


def _role_problems(job: JobKeys, name: str, own: Sequence[int]) -> Iterator[Problem]:
    """Problems of the role `name` on its own devices `own`."""
    role, train, where = job.roles[name], job.actor_train.device_mapping, (name, "device_mapping")
    if job.is_supervised:
        text = f"differs from actor_train's, but all roles of task: {job.task} run on the same devices"
        yield Problem(where, f"{text}; leave it out here")
        return
    if train is None:
        text = "names devices, but actor_train names none that they could differ from"
        yield Problem(where, f"{text}; name those in actor_train.device_mapping")
    elif _overlap_partly(own, train):
        text = "names some of actor_train's devices: a role shares all of them, in the same order, or none"
        yield Problem(where, f"{text}; leave it out here to share them, or name others")
    problems = list(size_problems(name, role))
    yield from problems
    layout, sizes = role.strategy_args.strategy_config, (name, "strategy_args", "strategy_config")
    if not problems:
        try:
            layout.parallel_dims(len(own))
        except LayoutError as error:
            yield Problem(sizes, str(error))
    if name == "actor_infer":
        yield from sampling_problems(name, role)


def _overlap_partly(own: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two lists share devices without being equal."""
    return tuple(own) != tuple(other) and bool(set(own) & set(other))
