"""The configuration of a job: YAML in ROLL's shape to typed, checked values. Needs no torch.

config = load_config("configs/demo_grpo.yaml", ["actor_train.training_args.learning_rate=1e-4"])
config.actor_train.batching()
"""

from roll_batching.jobs.config.diagnostics import ConfigFileError, Notice, Problem
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.job_sections import TokenizerConfig, WarmupConfig
from roll_batching.jobs.config.loader import config_from_dict, load_config
from roll_batching.jobs.config.worker import DataArgs, GeneratingArgs, WorkerConfig

__all__ = [
    "ConfigFileError",
    "DataArgs",
    "GeneratingArgs",
    "JobConfig",
    "Notice",
    "Problem",
    "TokenizerConfig",
    "WarmupConfig",
    "WorkerConfig",
    "config_from_dict",
    "load_config",
]
