"""Keys of ROLL, Megatron-Core and cosmos-rl that do nothing in a job: one table, and how the loader applies it.

A file with these keys loads unchanged. Each key gets a notice that it has no effect, or an error that says why its
value is refused. Keys that are neither here nor in the schema are unknown, which is an error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from roll_batching.jobs.config.diagnostics import KeyPath, shortened
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.job_sections import TrainPolicy, TrainSection
from roll_batching.jobs.config.key_paths import all_keys
from roll_batching.jobs.config.worker import DataArgs, GeneratingArgs, WorkerConfig
from roll_batching.settings.fields import Settings, nested_settings
from roll_batching.settings.megatron_config import ENGINE_STRATEGIES, MegatronConfig
from roll_batching.settings.model import ArchitectureConfig, ModelArgs
from roll_batching.settings.training import TrainingArgs


class Verdict(enum.Enum):
    """The treatment of a foreign key."""

    NO_EFFECT = "no effect"
    """Any value is accepted, with a notice."""
    REFUSED = "refused"
    """Values other than the allowed ones are errors."""


@dataclass(frozen=True)
class ForeignKey:
    """A key of another framework, in the section where its files have it."""

    name: str
    verdict: Verdict
    why: str = ""
    """What happens instead, or why it cannot be done."""
    instead: str = ""
    """The key to use here, where there is one: below the job, the role or its section; perhaps with its value."""
    allowed: tuple[Any, ...] = ()
    """Values of a refused key that mean what happens anyway. Null is one of them."""

    @property
    def reason(self) -> str:
        """`why` and the key to use, for messages."""
        return "; ".join(part for part in (self.why, self.instead and f"use {self.instead}") if part)

    def refuses(self, value: Any) -> bool:
        """Whether `value` is an error. True and 1 are different values."""
        if self.verdict is not Verdict.REFUSED or value is None:
            return False
        return not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.allowed)

    def refusal(self, value: Any) -> str:
        """The error for a refused `value`."""
        return f"{shown(value)} is refused: {self.reason}"


class GivenForeignKey(NamedTuple):
    """A foreign key in a file."""

    path: KeyPath
    value: Any
    key: ForeignKey


def given_foreign_keys(
    data: Mapping[str, Any], prefix: KeyPath = (), settings: type[Settings] = JobKeys
) -> Iterator[GivenForeignKey]:
    """The foreign keys that `data` gives, at any depth. Null counts as given."""
    foreign = FOREIGN_KEYS.get(settings, {})
    for name, value in data.items():
        path = (*prefix, name)
        field = settings.model_fields.get(name)
        if field is None:
            if name in foreign:
                yield GivenForeignKey(path, value, foreign[name])
            continue
        # Under an engine, strategy_config holds options of the engine's own command line, whatever their names.
        is_engine_options = name == "strategy_config" and data.get("strategy_name") in ENGINE_STRATEGIES
        below = nested_settings(field)
        if below is not None and isinstance(value, dict) and not is_engine_options:
            yield from given_foreign_keys(value, path, below)


@cache
def foreign_paths() -> tuple[KeyPath, ...]:
    """The paths of all foreign keys, in every section of the schema that may hold them."""
    sections = {(): JobKeys} | {key.path: key.section for key in all_keys() if key.section is not None}
    return tuple((*path, name) for path, section in sections.items() for name in FOREIGN_KEYS.get(section, ()))


def shown(value: Any) -> str:
    """`value` in a message."""
    if isinstance(value, dict):
        return "this section"
    return str(value).lower() if isinstance(value, bool) else shortened(repr(value))


def _no_effect(name: str, why: str = "", instead: str = "") -> ForeignKey:
    return ForeignKey(name, Verdict.NO_EFFECT, why, instead)


def _refused(name: str, why: str = "", *allowed: Any, instead: str = "") -> ForeignKey:
    return ForeignKey(name, Verdict.REFUSED, why, instead, allowed)


_STUDENT = "the student has the roles actor_train and actor_infer (docs/distillation.md)"
_OPD = "a teacher's divergence is a loss here, task: distill, and not a reward (docs/distillation.md)"
MEDIA = "only images are read, from paths relative to the data file or absolute ones (docs/vision.md)"
_FP8_WEIGHTS = "weights are kept in bf16, and their copies in FP8 made once per step (docs/kernels.md)"
_DELAYED = "it belongs to delayed scaling, which is not supported"
_MTP = "heads train where strategy_config has mtp_num_layers; joint is the default there (docs/models.md)"
_HYBRID_CP = "Megatron's scheduler of context-parallel sizes runs each sequence alone"
_MOE = "model_args.architecture.moe"
_CHAT_TEMPLATE = "messages go through the tokenizer's own chat template, prompts are used as the file has them"
_NCCL = "roles share one process and its NCCL buffers"

_ROLL: Mapping[type[Settings], tuple[ForeignKey, ...]] = {
    JobKeys: (
        _no_effect("logging_dir", "logs lie in the run's folder", "output_dir"),
        _no_effect("checkpoint_config", "checkpoints lie in the run's folder", "output_dir"),
        _no_effect("num_gpus_per_node", "the number of processes is that of the devices", "actor_train.device_mapping"),
        _no_effect("num_nodes", "Ray, or one torchrun per machine, decides"),
        _no_effect("rpc_timeout", "collectives have a timeout instead", "backend_timeout"),
        _no_effect("val_batch_size", instead="eval_samples"),
        _no_effect("hydra", "Hydra is not used"),
        _no_effect("reward_pretrain", "rewards are Python functions; a critic starts from critic.model_args"),
        _no_effect("global_template", _CHAT_TEMPLATE),
        _no_effect("offload_nccl", _NCCL),
        _no_effect("rollout_dump_dir", "rollouts.jsonl lies in the run's folder", "rollout_samples"),
        _no_effect("is_num_return_sequences_expand", "the responses to a prompt are sampled in one request"),
        _no_effect("enable_reference", "the reference is built when use_kl_loss is true"),
        _no_effect("enable_old_logprobs_recompute", instead="actor_train.logprob_plan"),
        _refused("whiten_rewards", "use norm_mean_type and norm_std_type", False),
        _refused("error_max_len_clip", "it is not supported", False),
        _refused("difficulty_loss_weight", "it is not supported", False),
        _refused("length_loss_weight", "it is not supported", False),
        _refused("student_train", _STUDENT),
        _refused("student_infer", _STUDENT),
        _refused("is_pure_opd", _OPD, False),
        _refused("use_opd", _OPD, False),
        _refused("reward", "rewards are Python functions, not workers", instead="reward_function"),
        _refused("sft_train", "write task: sft, and put its keys into actor_train"),
    ),
    WorkerConfig: (
        _no_effect("logits_in_fp32", "log-probs and entropy are always computed in fp32, from logits of any precision"),
        _no_effect("name", "the name of a role is its key in the file"),
        _no_effect("worker_cls", "there are no worker classes", "loss_function"),
        _no_effect("num_gpus_per_worker", "one process drives one device"),
        _no_effect("world_size", instead="device_mapping"),
        _no_effect("max_concurrency", "a rank processes one request at a time"),
        _no_effect("offload_nccl", _NCCL),
        _refused("model_update_frequency", "rollouts always use the current weights; use 1", 1),
        _refused("mtp_training_mode", _MTP, "disabled", instead="strategy_config.mtp_detach_heads"),
        _refused("opd_kl_coef", _OPD),
    ),
    DataArgs: (
        _no_effect("template", _CHAT_TEMPLATE),
        _no_effect("id", "samples are numbered by the job"),
        _no_effect("preprocessing_num_workers", "prompts are tokenised in the job's own process"),
        _no_effect("dataset_dir", "file_name holds the whole path"),
        _no_effect("interleave_probs", "all prompts are drawn with equal probability"),
        _refused("dataset_type", "only JSON lines are read", "json", "jsonl"),
        _refused("image_folder", MEDIA),
        _refused("video_folder", MEDIA),
    ),
    GeneratingArgs: (
        _no_effect("max_length", "prompt and response have a limit each", "max_new_tokens"),
        _no_effect("include_stop_str_in_output", "a response ends at the end token, which is kept"),
        _no_effect("logprobs", "log-probs of the sampled tokens are always kept"),
        _refused("num_beams", "beam search is not supported; use 1", 1),
        _refused("repetition_penalty", "sampled log-probs would differ from those of the model; use 1.0", 1.0),
        _refused("length_penalty", "it belongs to beam search, which is not supported; use 1.0", 1.0),
        _refused("stop_strings", "a response ends at the tokenizer's end token; leave it out"),
    ),
    ModelArgs: (
        _no_effect(
            "disable_gradient_checkpointing",
            "activations are recomputed as under ROLL's Megatron strategies",
            "strategy_config.recompute_granularity",
        ),
        _no_effect("attn_implementation", instead="strategy_config.attention_backend"),
        _no_effect("flash_attn", instead="strategy_config.attention_backend"),
        _refused("model_type", "only causal language models are trained; leave it empty (~)"),
        _refused("lora_dropout", "adapters have no dropout: the first ratio would differ from 1; use 0", 0),
        _refused("additional_target", "with lora_target everything but the adapters is frozen"),
        _refused("vision_config", "the vision encoder is that of the model directory"),
    ),
    TrainingArgs: (
        _no_effect("num_train_epochs", "the job's length is max_steps, that of the warm-up warmup.num_train_epochs"),
        _no_effect("bf16", instead="model_args.dtype"),
        _no_effect("dataloader_num_workers", "prompts are held in memory and need no loader processes"),
        _no_effect("seed", "one seed serves all roles: the job's"),
        _no_effect("output_dir", "all roles write into one folder: the job's"),
        _refused("fp16", "the precision belongs to the model", False, instead="model_args.dtype: fp16"),
    ),
}

_MEGATRON: Mapping[type[Settings], tuple[ForeignKey, ...]] = {
    MegatronConfig: (
        _no_effect("variable_seq_lengths", "pipeline stages know the shapes from the plan"),
        _no_effect("apply_rope_fusion", "it is on under transformer_impl: transformer_engine only"),
        _no_effect("bias_activation_fusion", "activations are fused on CUDA and not on the CPU"),
        _no_effect("bias_dropout_fusion", "no linear layer before a residual has a bias; dropout is added unfused"),
        _no_effect("masked_softmax_fusion", "no attention core here holds the scores that it would mask"),
        _no_effect("gradient_accumulation_fusion", "it is on where APEX is installed (CUDA)"),
        _no_effect("bf16", instead="model_args.dtype"),
        _no_effect("moe_grouped_gemm", "it is on under transformer_impl: transformer_engine only"),
        _no_effect("moe_permute_fusion", "it is on under transformer_impl: transformer_engine only"),
        _no_effect("moe_router_fusion", "it is on under transformer_impl: transformer_engine only"),
        _no_effect("moe_shared_expert_overlap", "the shared expert is computed after the others"),
        _no_effect("moe_token_dispatcher_type", "it is alltoall: all dispatchers give the same results"),
        _no_effect("moe_enable_deepep", "tokens go to experts by torch's all-to-all, with the same results"),
        _refused(
            "moe_router_enable_expert_bias", "the model's configuration decides", instead=f"{_MOE}.router_expert_bias"
        ),
        _refused(
            "moe_router_load_balancing_type",
            "aux_loss is on where its weight is",
            "none",
            instead=f"{_MOE}.aux_loss_coeff",
        ),
        _refused(
            "moe_aux_loss_coeff", "the loss of routers belongs to the model", 0, 0.0, instead=f"{_MOE}.aux_loss_coeff"
        ),
        _refused(
            "moe_z_loss_coeff", "the loss of routers belongs to the model", 0, 0.0, instead=f"{_MOE}.z_loss_coeff"
        ),
        _no_effect("moe_layer_recompute", "recompute_granularity: selective with recompute_modules: [moe] does it"),
        _no_effect("cross_entropy_loss_fusion", "log-probs come from kernels of this package"),
        # The next three corrupt or mispair planned transfers: strategy/compatibility.py refuses them in given models.
        _refused("overlap_p2p_comm", "transfers with planned shapes are not overlapped; leave it out", False),
        _refused("batch_p2p_comm", "batched transfers pair wrongly with two stages under VPP; leave it out", False),
        _refused("deallocate_pipeline_outputs", "it races with transfers before Megatron-Core 0.18", False),
        _refused("mtp_use_repeated_layer", "each head has its own layer", False),
        _refused("fp8_param", _FP8_WEIGHTS, False),
        _refused("fp8_param_gather", _FP8_WEIGHTS, False),
        _no_effect("fp8_margin", _DELAYED),
        _no_effect("fp8_amax_history_len", _DELAYED),
        _no_effect("fp8_amax_compute_algo", _DELAYED),
        _no_effect("moe_router_padding_for_fp8", "TransformerEngine's layers align the tokens of each expert"),
        _no_effect("moe_enable_routing_replay", "routers replay without it", "router_replay.mode"),
        _refused("hybrid_context_parallel", _HYBRID_CP, False, instead="context_parallel_size: auto"),
        _refused(
            "max_seqlen_per_dp_cp_rank",
            "under context_parallel_size: auto the cap of a pack is that of one rank",
            instead="sequence_packing_args.max_packed_sequence_length_train",
        ),
        _refused("min_dynamic_context_parallel_size", "packs may have every size from 1 on; leave it out", 1),
        _no_effect("sequence_packing_scheduler", "packs are planned here", "sequence_packing_args.algorithm"),
    ),
    ArchitectureConfig: (_refused("attention_dropout", "attention kernels for packs have no dropout; use 0", 0.0),),
}

_COSMOS: Mapping[type[Settings], tuple[ForeignKey, ...]] = {
    TrainSection: (_no_effect("epoch", "epochs order the data and do not end the job", "train.max_num_steps"),),
    TrainPolicy: (_refused("type", "RL is batched by the keys of actor_train", "sft"),),
}

_TABLES: Mapping[str, Mapping[type[Settings], tuple[ForeignKey, ...]]] = {
    "ROLL": _ROLL,
    "Megatron-Core": _MEGATRON,
    "cosmos-rl": _COSMOS,
}
FOREIGN_KEYS: Mapping[type[Settings], Mapping[str, ForeignKey]] = {
    section: {key.name: key for key in keys} for table in _TABLES.values() for section, keys in table.items()
}
"""Foreign keys by section of the schema and by name. No section has keys of two frameworks."""
FRAMEWORK_OF: Mapping[type[Settings], str] = {section: name for name, table in _TABLES.items() for section in table}
"""The framework that the foreign keys of a section come from."""
