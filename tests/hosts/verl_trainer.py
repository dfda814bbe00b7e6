"""Steps of verl's PPO trainer on two CPU ranks, from its own YAML: balance, log-probs and actor updates.

    python -m tests.hosts.verl_trainer FOLDER REPORT [override ...]

verl composes the configuration, places the workers (Ray), registers and builds the engine, loads the weights (mbridge),
balances the batch, deals it to ranks, and steps the optimizer. Rollouts are given: they need vLLM or SGLang. REPORT (a
pickle) gets the order of samples, metrics of the updates, log-probs of each pass, and the functions of ours that ran.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from tests.hosts import stand_ins

STEPS, SAMPLES, MINI_BATCH, RANKS = 2, 12, 6, 2
LEARNING_RATE = 1e-3
HOOK = "tests.hosts.verl_trainer.prepare_process"
FUSIONS = (
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
"""Kernels of TransformerEngine and Apex."""
OVERRIDES = [
    "actor_rollout_ref.model.external_lib=[roll_batching.integrations.verl,roll_batching.integrations.verl_engine]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=80",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.actor.optim.total_training_steps=100",  # which the trainer reads from its data loader
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=true",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false",
    "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=auto",
    *(f"+actor_rollout_ref.actor.megatron.override_transformer_config.{key}=false" for key in FUSIONS),
]
"""verl's keys, as on its command line."""


def make_fields() -> dict[str, torch.Tensor]:
    """The samples of `tests.hosts.losses` that ranks can share evenly."""
    from tests.hosts.losses import batch

    return {name: values[:SAMPLES] for name, values in batch().items()}


def make_batch(fields: dict[str, torch.Tensor]) -> Any:
    """A rollout as verl's trainer has it (DataProto): prompts padded to the left, responses to the right."""
    from verl import DataProto

    lengths, prompts = fields["lengths"], fields["prompts"]
    left, right = int(prompts.max()), int((lengths - prompts).max())

    def response(values: torch.Tensor) -> torch.Tensor:
        """[samples, right]: of columns that speak of the next token."""
        padded = torch.nn.functional.pad(values, (0, right))
        return torch.stack([row[p - 1 : p - 1 + right] for row, p in zip(padded, prompts.tolist(), strict=True)])

    ids = torch.nn.functional.pad(fields["input_ids"], (left, right))
    attention = torch.nn.functional.pad(fields["attention_mask"], (left, right))
    windows = [slice(p, p + left + right) for p in prompts.tolist()]
    ids = torch.stack([row[window] for row, window in zip(ids, windows, strict=True)])
    attention = torch.stack([row[window] for row, window in zip(attention, windows, strict=True)])
    return DataProto.from_dict(
        {
            "row": torch.arange(SAMPLES),
            "input_ids": ids,
            "prompts": ids[:, :left],
            "responses": ids[:, left:],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attention[:, left:],
            "ref_log_prob": response(fields["ref"]),
            "advantages": response(fields["advantages"]),
        }
    )


def prepare_process() -> None:
    """Lets a process without GPU run verl's Megatron worker; called in each before it imports verl's workers."""
    stand_ins.install()
    from mbridge.core import llm_bridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from verl.utils.torch_dtypes import PrecisionType

    from roll_batching.megatron_patches import cpu_platform

    torch.set_num_threads(1)
    join = torch.distributed.init_process_group

    def join_group(backend: str, **options: Any) -> None:
        join("gloo", **options)  # verl names it twice: for the CPU and for the platform's device
        cpu_platform.install()  # in the thread that runs the worker's methods

    torch.distributed.init_process_group = join_group
    # verl's YAML allows bf16 and fp16 alone, whose rounding would hide a wrong sample.
    PrecisionType.to_dtype = staticmethod(lambda precision: torch.float32)
    # Layers without TransformerEngine, whose norms are modules of their own.
    spec = llm_bridge.get_gpt_decoder_block_spec
    llm_bridge.get_gpt_decoder_block_spec = lambda config, use_transformer_engine, vp_stage=None: spec(
        config, use_transformer_engine=False, vp_stage=vp_stage
    )
    attention, mlp = Qwen2Bridge._ATTENTION_MAPPING, Qwen2Bridge._MLP_MAPPING
    Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": attention["self_attention.linear_qkv.layer_norm_weight"]}
    mlp["pre_mlp_layernorm.weight"] = mlp["mlp.linear_fc1.layer_norm_weight"]
    from verl.workers.engine.megatron import utils

    utils.is_cuda_available = True  # verl's main seeds Megatron's generators only where it sees a GPU


def make_trainer(folder: Path, overrides: list[str]) -> Any:
    """verl's trainer with its worker group of actors, without data loaders and rollout servers."""
    import ray
    import verl.trainer.config
    from hydra import compose, initialize_config_dir
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker

    with initialize_config_dir(str(Path(verl.trainer.config.__file__).parent), version_base=None):
        config = compose("ppo_megatron_trainer", [f"actor_rollout_ref.model.path={folder}", *OVERRIDES, *overrides])
    omega_conf_to_dataclass(config.actor_rollout_ref.model)  # as main_ppo does, which imports external_lib here too
    trainer = object.__new__(RayPPOTrainer)
    trainer.config = config
    actors = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor")
    pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
    trainer.actor_rollout_wg = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actors, device_name="cpu")
    trainer.actor_rollout_wg.init_model()
    return trainer


def main() -> None:
    folder, report_file, *overrides = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    stand_ins.install()
    import ray

    names = ("PYTHONPATH", "OMP_NUM_THREADS", "VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_USE_EXTERNAL_MODULES")
    env = {name: os.environ[name] for name in names}
    ray.init(
        num_cpus=RANKS + 1, include_dashboard=False, runtime_env={"worker_process_setup_hook": HOOK, "env_vars": env}
    )
    trainer = make_trainer(folder, overrides)
    from verl.trainer.ppo import ray_trainer

    balance = ray_trainer.get_seqlen_balanced_partitions.__module__
    report: dict[str, Any] = {"balance": balance, "orders": [], "updates": [], "passes": []}

    for step in range(STEPS + 1):
        batch = make_batch(make_fields())
        batch.meta_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
        trainer._balance_batch(batch, metrics=(metrics := {}))
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        answer, _ = trainer._compute_old_log_prob(batch)
        report["passes"].append((batch.batch["row"], answer.batch["old_log_probs"], answer.batch["entropys"]))
        if step == STEPS:
            break
        answer.batch.pop("entropys")
        report["orders"].append(batch.batch["row"])
        update = trainer._update_actor(batch.union(answer))
        found = update.meta_info["metrics"]
        report["updates"].append({name: found[f"actor/{name}"] for name in ("loss", "grad_norm", "lr")} | metrics)
    report_file.write_bytes(pickle.dumps(report))
    ray.shutdown()


if __name__ == "__main__":
    main()
