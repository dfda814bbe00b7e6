"""NeMo-RL's Megatron policy worker over our passes: planned packs, one call of its loss function per pack.

`Policy` takes the worker class by its path; its YAML enables packing:

    Policy(..., worker_extension_cls_fqn="roll_batching.integrations.nemo_rl_worker.MegatronPolicyWorker")
    policy: {sequence_packing: {enabled: true, train_mb_tokens: 16384, logprob_mb_tokens: 16384}}

There, `max_cp_size: 8` gives each pack its own context-parallel size up to 8; a rank then has an eighth of the caps.

Importing this module replaces `megatron_forward_backward`, through which `train` and `get_logprobs` run their passes.
Model, optimizer, schedule, checkpoints, refit and metrics stay NeMo-RL's. Losses of log-probs (`LossInputType.LOGPROB`)
run unmodified; what reads logits, or another model beside this one, is refused by name.

Source: nemo_rl/models/megatron/train.py, nemo_rl/models/policy/workers/megatron_policy_worker.py at 7ea279a.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from roll_batching.errors import IntegrationError
from roll_batching.integrations.batches import HostForm, read_host_batch
from roll_batching.integrations.host_model import HostModel, in_order
from roll_batching.integrations.host_rows import HostRows
from roll_batching.integrations.replacement import Integration, Replacement, policy_worker, refuse_unsupported

_MODELS: weakref.WeakKeyDictionary[Any, HostModel] = weakref.WeakKeyDictionary()


def megatron_forward_backward(
    model: Any,
    data_iterator: Iterator[Any],
    num_microbatches: int,
    seq_length: int,
    mbs: int,
    post_processing_fn: Any,
    forward_only: bool = False,
    defer_fp32_logits: bool | None = False,
    global_valid_seqs: torch.Tensor | None = None,
    global_valid_toks: torch.Tensor | None = None,
    sampling_params: Any = None,
    straggler_timer: Any = None,
    draft_model: Any = None,
    enable_hidden_capture: bool | None = False,
    use_fused_linear_logprobs: bool = False,
    use_router_replay: bool = False,
    router_replay_train: bool = False,
) -> list[dict[str, Any]]:
    """NeMo-RL's results of a pass: metrics of each micro-batch, or log-probs in the order of its rows. Collective.

    `seq_length`, `mbs`, `defer_fp32_logits` and `straggler_timer` are not read: shapes come from the plan. Raises
    IntegrationError for what a pass cannot compute.
    """
    is_loss = hasattr(post_processing_fn, "loss_fn")
    _require_supported(
        post_processing_fn,
        is_loss,
        sampling_params,
        {
            "draft models": draft_model is not None or bool(enable_hidden_capture),
            "megatron_cfg.use_fused_linear_logprobs": use_fused_linear_logprobs,
            "router replay": use_router_replay,
        },
    )
    micro_batches = [next(data_iterator).data_dict for _ in range(num_microbatches)]
    data = type(micro_batches[0]).from_batches(micro_batches)
    packing = post_processing_fn.cfg["sequence_packing"]
    chunks = model if isinstance(model, list) else [model]
    host = _MODELS.get(chunks[0])
    if host is None:
        host = _MODELS[chunks[0]] = HostModel(
            chunks,
            "NeMo-RL",
            max_tokens=packing["train_mb_tokens"],
            max_tokens_forward=packing["logprob_mb_tokens"],
            max_cp_size=packing.get("max_cp_size", 1),
        )
    samples, width = data["input_ids"].shape
    forms: dict[str, HostForm] = {"input_ids": "token"}
    if is_loss:
        forms["token_mask"] = "token"
    read = functools.partial(read_host_batch, data, forms)
    rows = HostRows(data, type(data).select_indices, type(data).from_batches)
    options: dict[str, Any] = {
        "width": width - 1,
        "temperatures": 1.0 if sampling_params is None else sampling_params.temperature,
    }
    if is_loss:

        def loss(part: Any, log_probs: torch.Tensor, entropy: Any) -> tuple[torch.Tensor, Any]:
            answer: tuple[torch.Tensor, Any] = post_processing_fn.loss_fn(
                next_token_logprobs=log_probs,
                data=part.to(log_probs.device),
                global_valid_seqs=global_valid_seqs,
                global_valid_toks=global_valid_toks,
            )
            return answer

        results = host.run(read, rows, loss, backward=not forward_only, mask="token_mask", **options)
        return [metrics for _, metrics in results]

    def keep(part: Any, log_probs: torch.Tensor, entropy: Any) -> tuple[torch.Tensor, Any]:
        return log_probs.new_zeros(()), log_probs

    results = host.run(read, rows, keep, backward=False, **options)
    if not results:
        return []
    log_probs = torch.stack(in_order(results, samples))
    # NeMo-RL's column of a token holds its own log-prob; the first token has none.
    return [{"logprobs": torch.nn.functional.pad(log_probs, (1, 0))}]


def _require_supported(post_processing: Any, is_loss: bool, sampling: Any, unsupported: dict[str, bool]) -> None:
    kind = type(post_processing).__name__
    if not is_loss and kind != "LogprobsPostProcessor":
        raise IntegrationError(f"NeMo-RL's {kind} reads logits: use NeMo-RL's own worker for this model")
    problems = {
        "sequence_packing.enabled must be true": not post_processing.cfg["sequence_packing"]["enabled"],
        "generation.top_k and top_p, which filter the logits of log-probs, are not supported": sampling is not None
        and ((sampling.top_k or 0) > 0 or sampling.top_p not in (None, 1.0)),
        **{f"{name} are not supported": refused for name, refused in unsupported.items()},
    }
    if is_loss:
        loss = post_processing.loss_fn
        input_type = getattr(getattr(loss, "input_type", None), "value", None)
        problems[f"{type(loss).__name__} reads {input_type}, not log-probs"] = input_type != "logprob"
        problems["value models are not supported"] = getattr(post_processing, "prepare_fn", None) is not None
    refuse_unsupported("NeMo-RL's policy", problems)


def __getattr__(name: str) -> Any:
    """Makes `MegatronPolicyWorker`, a subclass of NeMo-RL's worker in this module: Ray's workers then import it."""
    return policy_worker(__name__, name)


_FORWARD_BACKWARD = Replacement(
    module="nemo_rl.models.megatron.train",
    name="megatron_forward_backward",
    by=megatron_forward_backward,
)

_NEMO_RL = Integration("NeMo-RL", _FORWARD_BACKWARD, package="nemo_rl", distribution="nemo-rl", tried=("7ea279a",))
patch, unpatch = _NEMO_RL.patch, _NEMO_RL.unpatch
patch()
