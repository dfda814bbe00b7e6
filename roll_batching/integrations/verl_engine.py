"""verl's Megatron engine over our passes: planned packs, one call of its loss function per pack.

verl imports it by itself when its YAML says so, for the backend `megatron` with `use_dynamic_bsz: true`:

    actor_rollout_ref: {model: {external_lib: roll_batching.integrations.verl_engine}}

With `dynamic_context_parallel: true` each pack has its own context-parallel size, with released versions of Megatron
too, and `max_seqlen_per_dp_cp_rank` is the cap of a rank.

Importing this module replaces `MegatronEngine.forward_backward_batch`, through which `train_batch` and `infer_batch`
run their passes. Model, optimizer, schedule, checkpoints, export and offload stay verl's, as do its losses, the order
of samples and temperatures per sample. Value models keep verl's passes.

Source: verl/workers/engine/megatron/transformer_impl.py of verl 0.9.1 and of main at 1dda039.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import IntegrationError
from roll_batching.integrations.batches import HostForm, read_host_batch
from roll_batching.integrations.host_model import HostModel, in_order
from roll_batching.integrations.host_rows import HostRows
from roll_batching.integrations.replacement import Integration, Replacement, refuse_unsupported
from roll_batching.samples import SampleBatch

_MODELS: weakref.WeakKeyDictionary[Any, HostModel] = weakref.WeakKeyDictionary()
_WITH_CP_SIZES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines whose packs have their own context-parallel sizes."""


def initialize_engine(
    self: Any, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
) -> None:
    """Initializes verl's engine without `dynamic_context_parallel: true`, for which it has our packs.

    With the key verl replicates the batch over all ranks, and asks for process groups that released versions of
    Megatron lack. Our plans need neither. Raises IntegrationError where data-parallel ranks cannot share packs.
    """
    has_cp_sizes = engine_config.dynamic_context_parallel and type(self).__name__ != "MegatronEngineWithValueHead"
    if has_cp_sizes:
        engine_config = dataclasses.replace(engine_config, dynamic_context_parallel=False)
    _VERL.original(_INITIALIZE)(self, model_config, engine_config, optimizer_config, checkpoint_config)
    if has_cp_sizes:
        dp_size, cp_size = self.get_data_parallel_size(), engine_config.context_parallel_size
        if dp_size % 2 or cp_size > 1:
            raise IntegrationError(
                f"dynamic_context_parallel with {dp_size} data-parallel ranks and context_parallel_size {cp_size}: it "
                "needs an even number of ranks and size 1; change them, or set it to false"
            )
        _WITH_CP_SIZES.add(self)


def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> dict[str, Any]:
    """Results of a pass as verl has them: model outputs in the order of `data`, losses and metrics. Collective.

    `data` is verl's TensorDict of this rank's samples. The results are empty before the last pipeline stage, as verl's.
    Raises IntegrationError for what a pass cannot compute.
    """
    from verl.utils import tensordict_utils as tu

    if type(self).__name__ == "MegatronEngineWithValueHead":
        answer: dict[str, Any] = _VERL.original(_FORWARD_BACKWARD)(self, data, loss_function, forward_only)
        return answer
    _require_supported(self, data, tu)
    group, dp_size = self.get_data_parallel_group(), self.get_data_parallel_size()
    cp_size = self.engine_config.context_parallel_size
    loss_mask = data["loss_mask"]
    tokens = (
        (loss_mask.values() if loss_mask.is_nested else loss_mask).sum().to(next(self.module[0].parameters()).device)
    )
    dist.all_reduce(tokens, group=group)
    tu.assign_non_tensor(data, sp_size=cp_size, batch_num_tokens=tokens.item(), dp_size=dp_size)
    entropy = bool(tu.get_non_tensor_data(data, key="calculate_entropy", default=False))

    def call(part: Any, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        output = {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})
        outputs = {name: [row.detach() for row in values.unbind()] for name, values in output.items()}
        if loss_function is None:
            return log_probs.values().sum() * 0, (outputs, 1.0, {})
        part = part.to(log_probs.device)
        tu.assign_non_tensor(part, batch_num_tokens=tokens.item(), dp_size=dp_size)
        loss, metrics = loss_function(model_output=output, data=part, dp_group=group)
        # verl's losses carry a factor dp_size, for DDP's mean over data-parallel ranks.
        return loss / dp_size, (outputs, loss.detach().item(), metrics)

    sizes, cap = 1, data["max_token_len_per_gpu"] * cp_size
    if self in _WITH_CP_SIZES:
        sizes = dp_size & -dp_size  # the largest power of two that divides the ranks
        cap = self.engine_config.max_seqlen_per_dp_cp_rank * sizes
        data = data.exclude("indices", "global_token_num")  # of all tokens of the rollout, which no loss reads
    if self not in _MODELS:
        trains = not self.engine_config.forward_only
        _MODELS[self] = HostModel(self.module, "verl", max_tokens=cap, trains=trains, max_cp_size=sizes)
    results = _MODELS[self].run(
        lambda: _samples(data, forward_only),
        HostRows(data, tu.index_select_tensor_dict, tu.concat_tensordict),
        call,
        backward=not forward_only,
        mask=None if forward_only else "counted",
        max_tokens=cap,
        form="jagged",
        entropy=entropy,
        temperatures=data["temperature"] if "temperature" in data.keys() else 1.0,
    )
    return _merged(results, data["input_ids"].size(0))


def _merged(results: list[tuple[Any, Any]], samples: int) -> dict[str, Any]:
    """What the calls of a pass returned, as verl's engines return it."""
    if not results:
        return {}
    outputs = {}
    for name in results[0][1][0]:
        ordered = in_order([(numbers, values[name]) for numbers, (values, _, _) in results], samples)
        outputs[name] = torch.nested.as_nested_tensor(ordered, layout=torch.jagged)
    merged: dict[str, list[Any]] = {}
    for _, (_, _, metrics) in results:
        for name, value in metrics.items():
            merged.setdefault(name, []).append(value)
    return {"model_output": outputs, "loss": [loss for _, (_, loss, _) in results], "metrics": merged}


def _samples(data: Any, forward_only: bool) -> SampleBatch:
    """Reads the samples with the mask of a loss: the response, or in fine-tuning verl's mask of whole rows."""
    fields: dict[str, Any] = dict(data.items())
    forms: dict[str, HostForm] = {"input_ids": "token"}
    if not forward_only and "prompts" in fields:
        fields["counted"], forms["counted"] = torch.ones_like(fields["responses"]), "response"
    elif not forward_only:
        fields["counted"], forms["counted"] = fields["loss_mask"], "token"
    return read_host_batch(fields, forms)


def _require_supported(engine: Any, data: Any, tu: Any) -> None:
    config = engine.engine_config

    def asked(key: str, default: bool = False) -> bool:
        return bool(tu.get_non_tensor_data(data, key=key, default=default))

    problems = {
        "use_dynamic_bsz must be true": not asked("use_dynamic_bsz", True),
        "use_fused_kernels must be false": asked("use_fused_kernels", bool(config.use_fused_kernels)),
        "calculate_sum_pi_squared is not supported": asked("calculate_sum_pi_squared"),
        "distillation, which reads logits, is not supported": asked("distillation_use_topk")
        or asked("distillation_only"),
        "routing replay is not supported": asked("enable_routing_replay"),
        "multi-token prediction is not supported": bool(engine.model_config.mtp.enable),
        "multimodal inputs are not supported": "multi_modal_inputs" in data.keys(),
        "input_ids must be jagged": not data["input_ids"].is_nested,
    }
    refuse_unsupported("verl's Megatron engine", problems)


_FORWARD_BACKWARD = Replacement(
    module="verl.workers.engine.megatron.transformer_impl",
    name="MegatronEngine.forward_backward_batch",
    by=forward_backward_batch,
)
_INITIALIZE = Replacement(
    module="verl.workers.engine.megatron.transformer_impl",
    name="MegatronEngine.__init__",
    by=initialize_engine,
)

_VERL = Integration(
    "verl", _FORWARD_BACKWARD, _INITIALIZE, package="verl", distribution="verl", tried=("0.9.1", "main at 1dda039")
)
patch, unpatch = _VERL.patch, _VERL.unpatch
patch()
