"""Settings: YAML in ROLL's shape to typed, checked values. Needs no torch.

config = load_config("configs/demo_grpo.yaml", ["actor_train.training_args.learning_rate=1e-4"])
config.actor_train.batching()
"""

from roll_batching.config.batching import BatchingConfig, SequencePackingArgs
from roll_batching.config.diagnostics import ConfigFileError, Notice, Problem
from roll_batching.config.job import JobConfig
from roll_batching.config.job_keys import TokenizerConfig, WarmupConfig
from roll_batching.config.loader import config_from_dict, load_config
from roll_batching.config.model import ArchitectureConfig, ModelArgs, MoEConfig, RopeScaling
from roll_batching.config.strategy import MegatronConfig, StrategyArgs
from roll_batching.config.worker import (
    DataArgs,
    GeneratingArgs,
    TrainingArgs,
    WorkerConfig,
)

__all__ = [
    "ArchitectureConfig",
    "BatchingConfig",
    "ConfigFileError",
    "DataArgs",
    "GeneratingArgs",
    "JobConfig",
    "MegatronConfig",
    "ModelArgs",
    "MoEConfig",
    "Notice",
    "Problem",
    "RopeScaling",
    "SequencePackingArgs",
    "StrategyArgs",
    "TokenizerConfig",
    "TrainingArgs",
    "WarmupConfig",
    "WorkerConfig",
    "config_from_dict",
    "load_config",
]
