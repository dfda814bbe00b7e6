"""slime's options: their types, their defaults, and the reasons for leaving some out (commit 624b824a).

Defaults are those of `slime/utils/arguments.py`, else of Megatron-Core's `megatron/training/arguments.py`, which slime
passes all other options to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.foreign_file import ROUTERS, ForeignFile, reasons_of
from roll_batching.tools.conversion.nemo_rl_file import STOP


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in text.split())


COUNTS = _names(
    "actor-num-nodes actor-num-gpus-per-node rollout-num-gpus-per-engine rollout-batch-size n-samples-per-prompt "
    "global-batch-size num-steps-per-rollout micro-batch-size max-tokens-per-gpu log-probs-max-tokens-per-gpu "
    "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
    "rollout-max-response-len rollout-max-prompt-len rollout-max-context-len num-rollout num-epoch eval-interval "
    "save-interval n-samples-per-eval-prompt eval-max-response-len update-weights-interval over-sampling-batch-size"
)
INTEGERS = (
    *COUNTS,
    *_names(
        "rollout-num-gpus rollout-top-k eval-top-k seed rollout-seed lr-warmup-iters lr-decay-iters "
        "recompute-num-layers virtual-pipeline-model-parallel-size expert-tensor-parallel-size num-critic-only-steps "
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16"
    ),
)
FLOATS = _names(
    "lr min-lr lr-warmup-init weight-decay adam-beta1 adam-beta2 adam-eps clip-grad lr-warmup-fraction eps-clip "
    "eps-clip-high eps-clip-c kl-coef kl-loss-coef entropy-coef gamma lambd value-clip rollout-temperature "
    "rollout-top-p eval-temperature eval-top-p tis-clip tis-clip-low attention-dropout hidden-dropout "
    "moe-aux-loss-coeff moe-z-loss-coeff moe-router-bias-update-rate opsm-delta"
)
TEXTS = _names(
    "hf-checkpoint load save ref-load prompt-data input-key label-key rm-type advantage-estimator loss-type "
    "kl-loss-type lr-decay-style optimizer recompute-granularity recompute-method wandb-project wandb-group "
    "rollout-function-path custom-generate-function-path custom-rm-path eval-config moe-token-dispatcher-type "
    "pipeline-model-parallel-layout dynamic-sampling-filter-path fp8-format fp8-recipe"
)
LISTS = _names("eval-prompt-data recompute-modules rollout-stop rollout-stop-token-ids")
FLAGS = _names(
    "colocate offload offload-train offload-rollout use-dynamic-batch-size balance-data balance-by-flops "
    "calculate-per-token-loss use-kl-loss use-unbiased-kl normalize-advantages disable-grpo-std-normalization "
    "disable-rewards-normalization use-tis use-rollout-logprobs sequence-parallel apply-chat-template rollout-shuffle "
    "partial-rollout use-opsm use-opd use-routing-replay use-rollout-routing-replay use-wandb fp16 bf16 async-save "
    "use-distributed-optimizer overlap-grad-reduce overlap-param-gather accumulate-allreduce-grads-in-fp32 "
    "debug-train-only debug-rollout-only skip-eval-before-train reset-optimizer-states "
    "moe-router-enable-expert-bias account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
    "first-last-layers-bf16 fp8-param-gather"
)

DEFAULTS: Mapping[str, Any] = {
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--rollout-num-gpus-per-engine": 1,
    "--n-samples-per-prompt": 1,
    "--micro-batch-size": 1,
    "--use-dynamic-batch-size": False,
    "--calculate-per-token-loss": False,
    "--sequence-parallel": False,
    "--use-distributed-optimizer": True,
    "--seed": 1234,
    "--lr": 1e-6,
    "--min-lr": 0.0,
    "--lr-decay-style": "linear",
    "--lr-warmup-iters": 0,
    "--weight-decay": 0.01,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--clip-grad": 1.0,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--input-key": "input",
    "--save-interval": None,
}
"""Defaults in every task."""
RL_DEFAULTS: Mapping[str, Any] = {
    "--advantage-estimator": "grpo",
    "--eps-clip": 0.2,
    "--kl-loss-type": "k1",
    "--kl-loss-coef": 0.0,
    "--kl-coef": 0.0,
    "--value-clip": 0.2,
    "--lambd": 1.0,
    "--num-critic-only-steps": 0,
    "--use-kl-loss": False,
    "--entropy-coef": 0.0,
    "--gamma": 1.0,
    "--normalize-advantages": False,
    "--use-rollout-logprobs": False,
    "--rollout-temperature": 1.0,
    "--rollout-top-p": 1.0,
    "--rollout-top-k": -1,
    "--n-samples-per-eval-prompt": 1,
    "--apply-chat-template": False,
    "--colocate": False,
}
"""Further defaults in reinforcement learning."""

_OWN_CODE = "code for slime's data structures does not run here"
_IDLE: Mapping[str, str] = {
    "changes speed or memory, not results": (
        "balance-data balance-by-flops optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d log-probs-chunk-size "
        "recompute-loss-function use-precision-aware-optimizer moe-permute-fusion moe-grouped-gemm moe-enable-deepep "
        "no-rope-fusion no-masked-softmax-fusion no-gradient-accumulation-fusion no-bias-swiglu-fusion bf16 "
        "attention-softmax-in-fp32 transformer-impl attention-backend deterministic-mode data-pad-size-multiplier "
        "offload offload-train offload-rollout no-offload-train no-offload-rollout moe-token-dispatcher-type "
        "expert-tensor-parallel-size rollout-data-transport enable-experimental qwen-gdn-backend "
        "moe-flex-dispatcher-backend no-check-for-nan-in-loss-and-grad sglang-cuda-graph-"
    ),
    "describes the model, as its config.json does, which is read here; slime compares the two": (
        "swiglu num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups "
        "use-rotary-position-embeddings disable-bias-linear normalization norm-epsilon rotary-base vocab-size "
        "kv-channels qk-layernorm untie-embeddings-and-output-weights add-qkv-bias position-embedding-type "
        "rotary-percent num-experts moe-router-topk moe-ffn-hidden-size moe-layer-freq moe-shared-expert-gate "
        "moe-shared-expert-intermediate-size moe-router-pre-softmax moe-router-score-function "
        "moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk use-gated-attention "
        "moe-router-enable-expert-bias "
        "attention-output-gate apply-layernorm-1p multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim rotary-scaling-factor rotary-interleaved mscale mscale-all-dim "
        "use-rope-scaling no-position-embedding post-self-attn-layernorm post-mlp-layernorm "
        "make-vocab-size-divisible-by max-position-embeddings seq-length padded-vocab-size model-name rope-type"
    ),
    "checkpoints lie in the run's folder, and resume_from_checkpoint loads them": (
        "load save-hf no-save-optim start-rollout-id"
    ),
    "metrics go to metrics.jsonl, TensorBoard and, with track_with: wandb, Weights & Biases": (
        "log- tb- use-tensorboard dump-details save-debug- wandb- disable-wandb-random-suffix profile- memory- "
        "tensorboard- use-pytorch-profiler"
    ),
    "processes are placed by device_mapping": "num-gpus-per-node distributed-",
    "the job hands new weights to its servers itself": "update-weight-",
    "the reference has the weights of the policy at its start": "ref-load",
    "the job's seed serves all roles": "rollout-seed",
    "no token is dropped": "moe-token-drop-policy",
    "rewards are called with the prompt, the response and the reference answer": "metadata-key",
    "requests are divided among the servers by the job": "sglang-router- router- sglang-server-concurrency",
    "training runs on Megatron-Core": "train-backend",
    "engine_args.retries and sampler_restarts handle failures": "rollout-health-check- use-fault-tolerance",
    "the first step is evaluated, too": "skip-eval-before-train",
    "there is no critic in the converted job": "value-clip lambd num-critic-only-steps",
    "belongs to slime's own tests": "ci-",
    "system_envs sets variables of the job": "train-env-vars",
}
"""By reason, options that have no effect here. A name that ends in `-` is the beginning of names."""
_REFUSED: Mapping[str, str] = {
    _OWN_CODE: (
        "custom-loss-function-path custom-advantage-function-path custom-tis-function-path custom-megatron- "
        "custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-model-provider-path "
        "custom-convert-samples-to-train-data-path custom-config-path rollout-data-postprocess-path "
        "buffer-filter-path rollout-sample-filter-path rollout-all-samples-process-path data-source-path "
        "rollout-sample-hook-path megatron-config-path custom-update-weight- get-mismatch-metrics"
    ),
    "rollouts have one turn and are sampled by the engine: code for slime's rollouts does not run here": (
        "rollout-function-path custom-generate-function-path eval-function-path"
    ),
    "responses are sampled to their end with the weights of one step": (
        "partial-rollout mask-offpolicy-in-partial-rollout"
    ),
    "each head of multi-token prediction has its own layer, trained with the policy": "mtp- enable-mtp-training",
    "speculative decoding is not set up for now": "sglang-speculative-",
    "distillation is not supported for now": "use-opd opd-",
    "weights are kept in bf16; their copies in FP8 are made once per optimizer step": "fp8-param-gather",
    "belongs to delayed scaling, which is not supported": "fp8-margin fp8-amax- fp8-interval",
    "is read with --fp8-format only": "fp8-recipe first-last-layers-bf16 num-layers-at-",
    "fp16 is not supported: bf16 is used": "fp16",
    STOP: "rollout-stop rollout-stop-token-ids rollout-skip-special-tokens",
    f"{ROUTERS} have no loss unless model_args.architecture.moe gives it a weight": (
        "moe-aux-loss-coeff moe-z-loss-coeff moe-router-load-balancing-type"
    ),
    "set strategy_config.virtual_pipeline_model_parallel_size": "num-layers-per-virtual-pipeline-stage",
    "attention kernels for packs have no dropout": "attention-dropout",
    "no dropout is applied unless model_args.architecture.hidden_dropout sets it": "hidden-dropout",
    "vision-language models are not supported for now": "multimodal-keys",
    "layers of slime's plugins are not built; the model's family decides": "spec",
    "context parallelism splits sequences in zigzag order": "allgather-cp",
    "slime's packs have one context-parallel size; strategy_config.context_parallel_size: auto gives each its own": (
        "dynamic-context-parallel hybrid-context-parallel max-seqlen-per-dp-cp-rank min-dynamic-context-parallel-size "
        "sequence-packing-scheduler"
    ),
    "off-policy sequence masking is not supported for now": "use-opsm opsm-delta",
    "the optimizer keeps its state": "reset-optimizer-states use-stateless-adam",
    "the reference keeps the initial weights": "ref-update-interval",
    "all parameters are trained": "only-train-params-name-list freeze-",
    "old log-probs come from logprob_plan": "keep-old-actor",
    "a job trains: there is no run that only samples": "debug-rollout-only",
    "a job samples its rollouts; task: sft needs none": "debug-train-only",
    "rollouts are not read from files": "load-debug-",
    "name running servers in actor_infer.engine_args.urls": "rollout-external-engine-addrs",
    "prompts come from actor_train.data_args.file_name": "disable-rollout-global-dataset",
    "prompt_length, response_length and sequence_length are the limits": "rollout-max-",
    "held-out prompts are read and sampled as validation.generating_args says": "eval-",
    "held-out answers are scored as those of training are": "eval-reward-key",
    "a reward is one number; with --custom-rm-path it is taken from the function's dict": "reward-key",
    "rewards are called once per response": "group-rm",
    "write a reward function that asks the server": "rm-url",
    "the tokenizer's chat template decides which tokens are the assistant's": "loss-mask-type",
}
"""By reason, options that matter and are not supported."""


class SlimeFile(ForeignFile):
    """Options of a slime script."""

    def put(self, path: tuple[str, ...], value: Any, key: str, meaning: str = "") -> None:
        """Puts `value`, unless it is None, at `path` of the draft."""
        if value is not None:
            self.draft.put(path, value, key, meaning)

    reasons = (*reasons_of("idle", _IDLE, "--"), *reasons_of("refused", _REFUSED, "--"))
