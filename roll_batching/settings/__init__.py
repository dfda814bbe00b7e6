"""Settings that the plugin reads: model, layout, batching, optimizer. Typed and checked; needs no torch."""

from roll_batching.settings.batching import BatchingConfig, SequencePackingArgs
from roll_batching.settings.megatron_config import MegatronConfig
from roll_batching.settings.model import ArchitectureConfig, ModelArgs
from roll_batching.settings.model_parts import MoEConfig, RopeScaling
from roll_batching.settings.role import RoleSettings, StrategyArgs
from roll_batching.settings.training import TrainingArgs

__all__ = [
    "ArchitectureConfig",
    "BatchingConfig",
    "MegatronConfig",
    "ModelArgs",
    "MoEConfig",
    "RoleSettings",
    "RopeScaling",
    "SequencePackingArgs",
    "StrategyArgs",
    "TrainingArgs",
]
