"""ROLL's Megatron strategies over our passes: planned packs, planned receive shapes, one call of a loss per pack.

A role's worker class in ROLL's YAML switches it on, beside `use_sequence_packing: true`:

    actor_train: {worker_cls: roll_batching.integrations.roll_strategy.RLVRActorWorker}

In its `strategy_args.strategy_config`, `max_cp_size: 8` gives each pack its own context-parallel size up to 8; a rank
then has an eighth of the token caps.

Importing this module puts subclasses of ROLL's `megatron_train` and `megatron_infer` in place. Model, optimizer,
schedule, checkpoints, offload and model update stay ROLL's. ROLL's workers call their loss functions as before:
`op_compute_log_probs` and `op_compute_entropy` answer from values that the pass has computed. Functions that read
logits are refused by name.

Source: roll/distributed/strategy/megatron_strategy.py, roll/pipeline/base_worker.py at 8eb27cc.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from roll_batching.errors import IntegrationError
from roll_batching.integrations.batches import HostForm, read_host_batch
from roll_batching.integrations.host_model import HostModel, in_order
from roll_batching.integrations.host_rows import HostRows
from roll_batching.integrations.replacement import Integration, Replacement, refuse_unsupported
from roll_batching.integrations.roll import keep_packing, worker_class

_SAMPLE_WEIGHTS = ("length_loss_weight", "difficulty_loss_weight")
"""Switches of ROLL under which a loss normalises over the samples of its call."""


class PassOutput:
    """Takes the place of a pass's logits: log-probs and entropies [samples, sequence_length - 1] of a micro-batch."""

    def __init__(self, log_probs: torch.Tensor, entropy: torch.Tensor | None, counted: torch.Tensor) -> None:
        self.log_probs, self.entropy, self.counted = log_probs, entropy, counted
        self.device = log_probs.device

    def masked(self, name: str, values: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """`values` under ROLL's mask [samples, sequence_length]."""
        if values is None:
            raise IntegrationError(f"the pass computed no {name}: set entropy_loss_coef above 0 in the pipeline config")
        counted = mask[:, 1:].bool()
        if bool((counted & ~self.counted[:, 1:]).any()):
            raise IntegrationError(
                f"the loss reads {name} outside of response_mask, where they are not computed: use ROLL's own "
                "strategy for this worker"
            )
        return values * mask[:, 1:]

    def __getattr__(self, name: str) -> Any:
        raise IntegrationError(
            f"the loss reads {name!r} of the model's output: under roll-batching it may call op_compute_log_probs and "
            "op_compute_entropy. Use ROLL's own strategy for this worker"
        )


def _planned(base: type) -> type:
    """Makes a subclass of `base`, a Megatron strategy of ROLL's, that runs our passes."""

    class PlannedStrategy(base):  # type: ignore[misc]
        """ROLL's strategy; `forward_backward_func` runs planned packs."""

        def __init__(self, worker: Any) -> None:
            # ROLL hands all other keys to its Megatron arguments, which do not know ours.
            settings = worker.worker_config.strategy_args.strategy_config
            ours = {key: settings.pop(key) for key in ("max_cp_size",) if key in settings}
            self._max_cp_size = ours.get("max_cp_size", 1)
            super().__init__(worker)
            settings.update(ours)  # for a later strategy with the same settings

        def initialize(self, model_provider: Any) -> None:
            super().initialize(model_provider)
            keep_packing(self)
            _require_supported(self, self._max_cp_size)
            packing = self.worker_config.sequence_packing_args
            trains = getattr(self, "models_wrapped", None) is not None
            self._planned_model = HostModel(
                self.models_wrapped if trains else self.models_unwrapped,
                "ROLL",
                max_tokens=packing.max_packed_sequence_length_train or packing.max_packed_sequence_length_forward,
                max_tokens_forward=packing.max_packed_sequence_length_forward,
                trains=trains,
                apply_loss_scale=self.worker_config.apply_loss_scale,
                max_cp_size=self._max_cp_size,
            )
            self.forward_backward_func = self._run_planned

        def _run_planned(
            self, *, forward_step_func: Any, data_iterator: Any, forward_only: bool, **_: Any
        ) -> list[dict[str, Any]]:
            """In place of Megatron's schedule: the passes over ROLL's micro-batches, all at once."""
            (host_function,) = forward_step_func.args  # functools.partial(self.inner_forward_step, function)
            micro_batches = list(data_iterator[0])
            data = type(micro_batches[0]).concat(micro_batches)
            data.meta_info = micro_batches[0].meta_info
            return run_batch(self, data, host_function, backward=not forward_only)

        def op_compute_log_probs(self, logits: PassOutput, input_ids: Any, attention_mask: torch.Tensor) -> Any:
            return logits.masked("log-probs", logits.log_probs, attention_mask)

        def op_compute_entropy(self, logits: PassOutput, attention_mask: torch.Tensor) -> Any:
            return logits.masked("entropies", logits.entropy, attention_mask)

    PlannedStrategy.__name__ = PlannedStrategy.__qualname__ = f"Planned{base.__name__}"
    return PlannedStrategy


def _require_supported(strategy: Any, max_cp_size: int) -> None:
    """Raises `IntegrationError` with every setting of the worker that our passes do not follow."""
    config = strategy.worker_config
    packing = config.sequence_packing_args
    limits = (packing.max_packed_sequence_length_train, packing.max_packed_sequence_length_forward)
    pipeline = strategy.worker.pipeline_config
    # ROLL caches old log-probs on the rank that computed a sample first, and later epochs may use another.
    caches_log_probs = getattr(pipeline, "ppo_epochs", 1) > 1 and not getattr(
        pipeline, "enable_old_logprobs_recompute", True
    )
    problems = {
        "max_cp_size with ppo_epochs above 1 needs enable_old_logprobs_recompute: true": caches_log_probs
        and max_cp_size > 1,
        "use_sequence_packing must be true": not strategy.use_sequence_packing,
        "sequence_packing_args.algorithm must be load_balance": packing.algorithm != "load_balance",
        "sequence_packing_args.max_packed_sequence_length_train or _forward is missing": not any(limits),
        "use_dynamic_batching_in_train must be false": config.use_dynamic_batching_in_train,
        "use_dynamic_batching_in_infer must be false": config.use_dynamic_batching_in_infer,
        "router_replay is not supported": strategy.enable_router_replay,
        "multimodal models are not supported": strategy.is_multimodal,
    }
    refuse_unsupported(f"ROLL's role {config.name}", problems)


def run_batch(strategy: Any, data: Any, host_function: Any, *, backward: bool) -> list[dict[str, Any]]:
    """A pass over `data` (DataProto): one dict of metrics per micro-batch, or without gradient one of tensors.

    Tensors are in the order of `data`. Empty before the last pipeline stage, as Megatron's schedule.
    """
    mask = "response_mask" if "response_mask" in data.batch else None
    counted = data.batch[mask or "attention_mask"].bool()
    if "labels" in data.batch:
        raise IntegrationError("ROLL's batch has labels, whose loss the model computes: use ROLL's own strategy")
    pipeline = strategy.worker.pipeline_config

    def call(part: Any, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        part.meta_info = data.meta_info
        counted = part.batch[mask or "attention_mask"].bool()
        loss, answer = host_function(part, PassOutput(log_probs, entropy, counted))
        return loss, answer

    forms: dict[str, HostForm] = {"input_ids": "token"}
    if mask:
        forms[mask] = "token"
    results = strategy._planned_model.run(
        lambda: read_host_batch(data, forms, padding_side="right"),
        HostRows(data, type(data).select_idxs, type(data).concat),
        call,
        backward=backward,
        mask=mask,
        width=counted.shape[1] - 1,
        entropy=not backward or getattr(pipeline, "entropy_loss_coef", 0) > 0,
        by_sample=backward and any(getattr(pipeline, name, False) for name in _SAMPLE_WEIGHTS),
    )
    if backward or not results:
        return [answer for _, answer in results]
    return [
        {
            name: torch.stack(in_order([(rows, answer[name]) for rows, answer in results], len(counted)))
            for name in results[0][1]
        }
    ]


@functools.cache
def _strategy_class(name: str) -> type:
    from roll.distributed.strategy import megatron_strategy

    bases = {
        "megatron_train": megatron_strategy.MegatronTrainStrategy,
        "megatron_infer": megatron_strategy.MegatronInferStrategy,
    }
    return _planned(bases[name])


def create_strategy(worker: Any, sync_wrapper: bool = False) -> Any:
    """ROLL's strategy of a worker; its Megatron strategies with our passes."""
    name = worker.worker_config.strategy_args.strategy_name
    if name not in ("megatron_train", "megatron_infer"):
        return _ROLL.original(_CREATE_STRATEGY)(worker, sync_wrapper)
    return _strategy_class(name)(worker)


def __getattr__(name: str) -> Any:
    return worker_class(name, __name__)


_CREATE_STRATEGY = Replacement(
    module="roll.distributed.strategy.factory",
    name="create_strategy",
    by=create_strategy,
)

_ROLL = Integration("ROLL", _CREATE_STRATEGY, package="roll", distribution="roll", tried=("8eb27cc",))
patch, unpatch = _ROLL.patch, _ROLL.unpatch
patch()
