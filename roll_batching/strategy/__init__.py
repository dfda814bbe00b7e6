"""The strategies: a Megatron model under planned micro-batches, for forward passes and for training."""

from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.sampling import GenerationSettings
from roll_batching.strategy.schedule import run_schedule
from roll_batching.strategy.train import MegatronTrainStrategy, StepResult

__all__ = ["GenerationSettings", "MegatronInferStrategy", "MegatronTrainStrategy", "StepResult", "run_schedule"]
