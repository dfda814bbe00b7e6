"""roll-batching: plans, packs and balances every training step on Megatron-Core.

The names that a training loop needs, each imported on first use:

    import roll_batching as rb

    plan = rb.plan_step(lengths, rb.PlanConstraints(dp_size=8, max_tokens=16384))

`planning`, `settings` and `jobs.config` need no torch; everything else needs the extra `megatron`. `strategy` is the
plugin; `jobs` builds on it. This module imports nothing, so that the packages without torch stay light.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll_batching.distributed.parallel_layout import start_processes
    from roll_batching.errors import RollBatchingError
    from roll_batching.loss_check import check_loss
    from roll_batching.losses import DPOLoss, LossOutput, PolicyLoss, SFTLoss
    from roll_batching.modeling.spec import packed_layer_spec
    from roll_batching.planning import BatchingSpec, Plan, PlanConstraints, plan_step
    from roll_batching.samples import SampleBatch, collect, distribute
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy

__version__ = "0.2.0"

__all__ = [
    "BatchingConfig", "BatchingSpec", "DPOLoss", "LossOutput", "MegatronInferStrategy", "MegatronTrainStrategy", "Plan",
    "PlanConstraints", "PolicyLoss", "RollBatchingError", "SFTLoss", "SampleBatch", "check_loss", "collect",
    "distribute", "packed_layer_spec", "plan_step", "start_processes",
]  # fmt: skip

_MODULES = {
    "distributed.parallel_layout": ("start_processes",),
    "errors": ("RollBatchingError",),
    "loss_check": ("check_loss",),
    "losses": ("DPOLoss", "LossOutput", "PolicyLoss", "SFTLoss"),
    "modeling.spec": ("packed_layer_spec",),
    "planning": ("BatchingSpec", "Plan", "PlanConstraints", "plan_step"),
    "samples": ("SampleBatch", "collect", "distribute"),
    "settings": ("BatchingConfig",),
    "strategy": ("MegatronInferStrategy", "MegatronTrainStrategy"),
}
"""Public names by their module."""


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        from difflib import get_close_matches
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        near = get_close_matches(name, __all__, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
