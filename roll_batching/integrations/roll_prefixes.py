"""ROLL with common prefixes computed once behind its own passes, and its micro-batches planned for that.

    actor_train: {worker_cls: roll_batching.integrations.roll_prefixes.RLVRActorWorker}

Importing this module imports `integrations.roll`, whose plans read prefixes then, and replaces `initialize` and
`_pack_sequences` of ROLL's Megatron strategies: their models share prefixes (`integrations.prefixes`), and leave out
the rows with which ROLL pads samples to a multiple of 16. ROLL's packing, passes and losses stay its own.

Source: roll/distributed/strategy/megatron_strategy.py at 8eb27cc.
"""

from __future__ import annotations

from typing import Any

from roll_batching.integrations.host_plans import plan_with_prefixes
from roll_batching.integrations.prefixes import share_prefixes_behind
from roll_batching.integrations.replacement import Integration, Replacement, refuse_unsupported
from roll_batching.integrations.roll import keep_packing, worker_class
from roll_batching.integrations.roll import patch as plan_for_roll


def _initialize_infer(self: Any, model_provider: Any) -> None:
    _ROLL.original(_INFER)(self, model_provider)
    _share(self, self.models_unwrapped)


def _initialize_train(self: Any, model_provider: Any) -> None:
    _ROLL.original(_TRAIN)(self, model_provider)
    _share(self, self.models_wrapped)


def _share(strategy: Any, models: Any) -> None:
    keep_packing(strategy)
    problems = {"use_sequence_packing must be true": not strategy.use_sequence_packing}
    refuse_unsupported(f"ROLL's role {strategy.worker_config.name}", problems)
    share_prefixes_behind(models)


def _pack_sequences(
    self: Any, input_tensor: Any, attention_mask: Any, pad_packed_seq_to: Any = None, pad_val: Any = 0
) -> tuple[Any, Any, Any, Any]:
    """ROLL's pack; its params also name the lengths without padding."""
    pack = _ROLL.original(_PACK)(self, input_tensor, attention_mask, pad_packed_seq_to, pad_val)
    _, params, unpadded, _ = pack
    params.unpadded = unpadded
    answer: tuple[Any, Any, Any, Any] = pack
    return answer


_MODULE = "roll.distributed.strategy.megatron_strategy"
_INFER = Replacement(module=_MODULE, name="MegatronInferStrategy.initialize", by=_initialize_infer)
_TRAIN = Replacement(module=_MODULE, name="MegatronTrainStrategy.initialize", by=_initialize_train)
_PACK = Replacement(module=_MODULE, name="MegatronInferStrategy._pack_sequences", by=_pack_sequences)
_ROLL = Integration("ROLL", _INFER, _TRAIN, _PACK, package="roll", distribution="roll", tried=("8eb27cc",))
patch, unpatch = _ROLL.patch, _ROLL.unpatch
patch()
plan_for_roll()
plan_with_prefixes("ROLL")


def __getattr__(name: str) -> Any:
    return worker_class(name, __name__)
