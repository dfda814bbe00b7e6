"""Three training steps of ROLL's RLVR actor on CPU: its worker, strategy and data protocol, as Ray actors.

    python -m tests.hosts.roll_actor FOLDER plain|planned|prefixes REPORT [key=value ...]

FOLDER gets a tiny model, REPORT (JSON) the metrics of each step on each rank and log-probs before and after. `plain` is
ROLL's own strategy, `prefixes` ROLL's own packing with prefixes shared behind it. Keys are those of strategy_config, or
begin with pipeline., role. or packing. RANKS sets the number of actors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

SEQUENCE, SAMPLES, VOCABULARY = 48, 16, 64
HOOK = "tests.hosts.roll_actor.prepare_process"
WORKERS = {
    "plain": "roll.pipeline.rlvr.actor_worker.ActorWorker",
    "planned": "roll_batching.integrations.roll_strategy.RLVRActorWorker",
    "prefixes": "roll_batching.integrations.roll_prefixes.RLVRActorWorker",
}


def make_model(folder: Path) -> None:
    """A tiny Qwen3 with a tokenizer of single characters, as a Hugging Face directory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        torch_dtype="float32",
        tie_word_embeddings=False,
        **sizes,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {chr(0x4E00 + i): i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def make_data(samples: int = SAMPLES) -> Any:
    """A rollout as ROLL's pipeline hands it to the actor: right-padded rows and fields of the next token."""
    import torch
    from roll.distributed.scheduler.protocol import DataProto

    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(8, SEQUENCE + 1, (samples,), generator=generator)
    prompts = (lengths * torch.rand(samples, generator=generator) * 0.6).long().clamp(min=2)
    place = torch.arange(SEQUENCE)
    attention = (place < lengths[:, None]).long()
    response = attention * (place >= prompts[:, None]).long()
    ids = torch.randint(2, VOCABULARY, (samples, SEQUENCE), generator=generator)
    ids[1::2, :30] = ids[::2, :30]  # pairs of samples begin alike
    ids = ids * attention
    mask = response[:, 1:].float()

    def noise() -> torch.Tensor:
        return 0.3 * torch.randn(samples, SEQUENCE - 1, generator=generator)

    base = torch.full((samples, SEQUENCE - 1), -4.2)
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": place.expand_as(ids).contiguous(),
        "response_mask": response,
        "final_response_mask": mask.long(),
        "prompt_mask": attention - response,
        "advantages": torch.randn(samples, 1, generator=generator) * mask,
        "old_log_probs": (base + noise()) * mask,
        "ref_log_probs": (base + noise()) * mask,
        "train_infer_is_weight": torch.ones(samples, SEQUENCE - 1),
    }
    meta = {
        "loss_mask_keys": ["response_mask", "final_response_mask"],
        "global_step": 0,
        "is_offload_states": False,
        "is_offload_optimizer_states_in_train_step": False,
    }
    return DataProto.from_dict(tensors=tensors, meta_info=meta)


def settings(folder: Path, planned: bool, changes: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
    """ROLL's configuration of the actor, and the pipeline settings that its worker and loss read."""
    from types import SimpleNamespace

    from roll.configs import ModelArguments
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import SequencePackingConfig, StrategyArguments, WorkerConfig

    config = WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(model_name_or_path=str(folder), dtype="fp32", disable_gradient_checkpointing=True),
        training_args=TrainingArguments(
            learning_rate=1e-3,
            weight_decay=0.0,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            warmup_steps=0,
            max_steps=100,
            lr_scheduler_type="constant",
            output_dir=str(folder / "out"),
        ),
        strategy_args=StrategyArguments(
            strategy_name="megatron_train",
            strategy_config={
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "use_distributed_optimizer": False,
                "transformer_impl": "local",
                "bf16": False,
                **changes["strategy"],
                "additional_configs": {
                    "gradient_accumulation_fusion": False,
                    "bias_activation_fusion": False,
                    "apply_rope_fusion": False,
                    "masked_softmax_fusion": False,
                    "bias_dropout_fusion": False,
                    "use_cpu_initialization": True,
                },
            },
        ),
        sequence_packing_args=SequencePackingConfig(
            **{
                "algorithm": "load_balance" if planned else "none",
                "max_packed_sequence_length_train": 96,
                "max_packed_sequence_length_forward": 128,
                **changes["packing"],
            }
        ),
        infer_batch_size=2,
        **{"use_sequence_packing": planned, **changes["role"]},
    )
    own = SimpleNamespace(
        **{
            **dict(
                sequence_length=SEQUENCE, max_grad_norm=1.0, seed=11, ppo_epochs=1, resume_from_checkpoint=False,
                output_dir=str(folder / "out"), enable_old_logprobs_recompute=True, importance_sampling="token",
                use_pg_clip_range=True, pg_clip=0.2, pg_clip_low=0.2, pg_clip_high=0.28, dual_clip_loss=True,
                use_kl_loss=True, kl_loss_coef=0.05, rl_loss_coef=1.0, entropy_loss_coef=0.01,
                loss_agg_mode="token-mean", difficulty_loss_weight=False, length_loss_weight=False,
                train_infer_correction=SimpleNamespace(is_weight=SimpleNamespace(enabled=True)),
                is_use_additional_prompts=False, max_running_requests=1, telemetry=None, system_envs={},
            ),
            **changes["pipeline"],
        }
    )  # fmt: skip
    return config, own


def prepare_process() -> None:
    """Lets a process without a GPU run ROLL's actor; called in each before it imports ROLL."""
    from tests.hosts import stand_ins

    stand_ins.install()
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from roll.distributed.strategy import megatron_strategy
    from roll.pipeline import base_worker

    from roll_batching.megatron_patches import cpu_platform

    torch.set_num_threads(1)
    cpu_platform.install()  # ROLL has a CPU platform, Megatron's seeds and buffers have none
    for moved in ("offload_states", "load_states"):  # to pinned memory and back, which a machine without GPU lacks
        setattr(megatron_strategy.MegatronTrainStrategy, moved, lambda *_, **__: None)
    base_worker.state_offload_manger = lambda **_: contextlib.nullcontext()  # measures a GPU's memory
    own_attention = DotProductAttention.forward
    # ROLL's mask of padding is TransformerEngine's; to the right of causal rows it changes nothing.
    DotProductAttention.forward = lambda self, q, k, v, mask, **options: own_attention(self, q, k, v, None, **options)


def load(path: str) -> Any:
    """The class of a dotted path, as ROLL's cluster loads a role's `worker_cls` on its driver."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    folder, kind, report_file, *overrides = sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]
    ranks = int(os.environ.get("RANKS", 2))
    changes: dict[str, dict[str, Any]] = {"strategy": {}, "pipeline": {}, "role": {}, "packing": {}}
    for text in overrides:
        key, _, value = text.partition("=")
        group, _, name = key.rpartition(".")
        changes[group or "strategy"][name] = json.loads(value)
    if not (Path(folder) / "config.json").exists():
        make_model(Path(folder))
    from tests.hosts import stand_ins

    stand_ins.install()
    import ray

    ray.init(
        address="local",  # also beside another cluster on this machine
        num_cpus=ranks + 1,
        include_dashboard=False,
        namespace="ROLL",
        log_to_driver=bool(os.environ.get("LOUD")),
        runtime_env={"worker_process_setup_hook": HOOK},
    )
    config, own = settings(Path(folder), kind != "plain", changes)
    port = str(stand_ins.free_port())
    remote = ray.remote(num_cpus=1)(load(WORKERS[kind]))
    workers = []
    for rank in range(ranks):
        env = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "WORKER_NAME": f"actor_train-{rank}", "CLUSTER_NAME": "actor_train",
            "FIXED_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        workers.append(remote.options(runtime_env={"env_vars": env, "worker_process_setup_hook": HOOK}).remote(config))

    def everywhere(method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(worker, method).remote(*arguments) for worker in workers])

    def on_shares(method: str) -> list[Any]:
        """Calls with the share of each rank's replica, as ROLL dispatches it."""
        calls = []
        for worker, place in zip(workers, places, strict=True):
            calls.append(getattr(worker, method).remote(make_data().chunk(place.dp_size)[place.dp_rank]))
        return ray.get(calls)

    everywhere("initialize", own)
    places = everywhere("get_rank_info")
    reports: list[dict[str, Any]] = [{"dp_rank": place.dp_rank, "metrics": []} for place in places]

    def add_log_probs(name: str) -> None:
        for report, answer in zip(reports, on_shares("compute_log_probs"), strict=True):
            if answer.batch is not None and "log_probs" in answer.batch.keys():  # where ROLL collects from
                report[name] = answer.batch["log_probs"].tolist()
                report[f"entropy_{name}"] = answer.batch["entropy"].tolist()

    add_log_probs("before")
    for _ in range(int(os.environ.get("STEPS", 3))):
        for report, answer in zip(reports, on_shares("train_step"), strict=True):
            report["metrics"].append(answer.meta_info["metrics"])
    add_log_probs("after")
    report_file.write_text(json.dumps(reports))
    ray.shutdown()


if __name__ == "__main__":
    main()
