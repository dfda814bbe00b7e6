"""Settings of one role (`actor_train`, `actor_infer`, `reference`), in ROLL's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, field_validator, model_validator

from roll_batching.config.batching import BatchingConfig, LogprobPlan, RoleBatching
from roll_batching.config.devices import parse_devices
from roll_batching.config.engines import EngineArgs
from roll_batching.config.fields import MOST_TOKENS, Roles, Settings, honoured
from roll_batching.config.model import ModelArgs
from roll_batching.config.roll_keys import RollDataArgs, RollGeneratingArgs, RollTrainingArgs, RollWorkerKeys
from roll_batching.config.strategy import StrategyArgs


def _texts(value: Any) -> Any:
    if not isinstance(value, dict):
        return {} if value is None else value
    return {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}


Environment = Annotated[dict[str, str], BeforeValidator(_texts)]
"""Environment variables; numbers are read as their text."""

TRAINED = Roles(names=("actor_train",), otherwise="this role is not trained")
PROMPTED = Roles(names=("actor_train",), otherwise="prompts are described by actor_train.data_args")
SAMPLED = Roles(names=("actor_infer",), otherwise="rollouts are sampled as actor_infer.generating_args says")
MEETING = Roles(names=("actor_train",), otherwise="actor_train's is used")


class TrainingArgs(RollTrainingArgs):
    """`training_args`: optimizer, schedule and mini-batch."""

    learning_rate: float = honoured(1e-6, help="Peak learning rate of AdamW.", gt=0, le=1e37)
    min_lr: float = honoured(0.0, help="Learning rate at the end of the schedule.", ge=0)
    weight_decay: float = honoured(0.0, help="Decoupled weight decay; biases and norms are exempt.", ge=0)
    adam_beta1: float = honoured(0.9, help="Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = honoured(0.999, help="Decay of the second moment.", ge=0, lt=1)
    adam_epsilon: float = honoured(1e-8, help="Epsilon of AdamW.", gt=0)
    max_grad_norm: float = honoured(1.0, help="Gradients are clipped to this global norm; 0: no clipping.", ge=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = honoured(
        "constant",
        help="Shape of the learning rate after warm-up. constant_with_warmup is the same as constant.",
    )
    warmup_steps: int = honoured(0, help="Optimizer steps of linear warm-up.", ge=0)
    warmup_ratio: float = honoured(
        0.0, help="Warm-up as a share of all optimizer steps, when warmup_steps is 0.", ge=0, le=1
    )
    per_device_train_batch_size: int = honoured(
        1, help="Sequences per data-parallel rank and, in padded mode, per micro-batch.", ge=1, le=MOST_TOKENS
    )
    gradient_accumulation_steps: int = honoured(
        1,
        help="A mini-batch (one optimizer step) is per_device_train_batch_size x this x data-parallel "
        "ranks sequences, in "
        "every batching mode.",
        ge=1,
    )
    max_steps: int = honoured(
        -1, help="Optimizer steps that the schedule spans; -1: as many as the job will make.", ge=-1
    )


class DataArgs(RollDataArgs):
    """`data_args`: where prompts come from. Read from actor_train."""

    file_name: str | list[str] | None = honoured(
        None,
        help="File or files of prompts (sft: of texts, dpo: of pairs), relative to the working directory: JSONL, one "
        "object per line; Parquet; or a folder that `datasets` saved.",
    )
    eval_file_name: str | list[str] | None = honoured(None, help="Files of the held-out ones, of the same kinds.")
    prompt: str = honoured("prompt", help="Key of the prompt's text in a line.")
    messages: str | None = honoured(
        None,
        help="Key of a chat's messages, which become the prompt through the tokenizer's chat template. `prompt` is "
        "then not read.",
    )
    chat: bool = honoured(
        False,
        help="The prompt is what a user says, and `response` (task: sft), `chosen` and `rejected` (task: dpo) what the "
        "assistant says: they go through the tokenizer's chat template. false: texts are used as they are.",
    )
    query: str | None = honoured(
        None, help="chat: key of what the user says after the prompt, on a line of its own; it may be empty."
    )
    system: str | None = honoured(
        None, help="chat: key of what the system says first; empty, and by default, whatever the template says itself."
    )
    tag: str = honoured("tag", help="Key of a prompt's tag, by which `rewards` divide the prompts.")
    domain_interleave_probs: dict[str, float] | None = honoured(
        None,
        help="The part of every step's prompts that each domain of `rewards` has, by name: rounded down to whole "
        "prompts, the last named has the rest. Default: prompts are drawn regardless of their domain.",
    )
    long_prompts: Literal["error", "drop"] = honoured(
        "error",
        help="A prompt with more than prompt_length tokens: an error that names its line, or left out, with a notice "
        "that counts them.",
    )
    response: str = honoured(
        "answer", help="Key of what the reward function compares with; under task: sft of the text that is learnt."
    )
    chosen: str = honoured("chosen", help="task: dpo: key of the better answer.")
    rejected: str = honoured("rejected", help="task: dpo: key of the worse answer.")


class GeneratingArgs(RollGeneratingArgs):
    """`generating_args`: how rollouts are sampled. Read from actor_infer."""

    max_new_tokens: int | None = honoured(
        None, help="Longest response. Default: the job's response_length.", gt=0, le=MOST_TOKENS
    )
    temperature: float = honoured(1.0, help="Sampling temperature.", gt=0)
    top_p: float = honoured(
        1.0, help="Sample among the likeliest tokens that together reach this probability.", gt=0, le=1
    )
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)] = honoured(
        0, help="Sample among this many likeliest tokens; 0, or -1 as engines write it: all.", ge=0
    )
    do_sample: bool = honoured(True, help="false: greedy decoding.")
    num_return_sequences: int | None = honoured(
        None, help="Responses per prompt when num_return_sequences_in_group is not given.", ge=1
    )
    max_tokens_in_cache: int | None = honoured(
        None,
        help="Positions that a rank's cache of keys and values may hold: rows sampled together times their longest "
        "prompt + max_new_tokens. More rows wait for their turn, and sample the same. A position takes 2 x layers x "
        "key-value heads / tensor parallel size x head_dim numbers of the model's precision. Default: no bound, all "
        "rows at once; there is no figure to derive it from that is the same on all ranks and in every run.",
        gt=0,
    )


class ValidationConfig(Settings):
    """`validation`: how held-out prompts are answered. Their file is actor_train.data_args.eval_file_name."""

    generating_args: GeneratingArgs = honoured(
        default_factory=GeneratingArgs,
        help="As actor_infer's, which hold where a key is not given; num_return_sequences: 1 where it is not.",
    )


class WorkerConfig(RoleBatching, RollWorkerKeys):
    """One role of the job."""

    model_args: ModelArgs = honoured(default_factory=ModelArgs, help="The model.")
    training_args: TrainingArgs = honoured(
        default_factory=TrainingArgs, help="Optimizer and mini-batch.", roles=TRAINED
    )
    data_args: DataArgs = honoured(default_factory=DataArgs, help="The data.", roles=PROMPTED)
    generating_args: GeneratingArgs = honoured(default_factory=GeneratingArgs, help="Sampling.", roles=SAMPLED)
    engine_args: EngineArgs = honoured(default_factory=EngineArgs, help="Engine of the rollouts.", roles=SAMPLED)
    strategy_args: StrategyArgs = honoured(default_factory=StrategyArgs, help="The strategy.")
    device_mapping: tuple[int, ...] | None = honoured(
        None,
        help="Devices of the role: as many processes start as it names. A list, `list(range(0,8))` or `0-7`. On a "
        "machine without GPUs it only counts processes. actor_infer and reference share all devices of actor_train "
        "(the default), or have others, and then processes and a layout of their own; under async_generation_ratio "
        "the sampler is one process on the device of rank 0 unless actor_infer has devices of its own.",
    )
    system_envs: Environment = honoured(
        default_factory=dict, help="Environment variables, set before the workers import anything."
    )

    logprob_plan: LogprobPlan = honoured(
        "train",
        roles=TRAINED,
        help="Old log-probs: on training's plans, so that the first ratio is exactly 1 (train); with the caps for "
        "passes without gradient (own, the default where a key for them differs from training's); those that the "
        "rollouts were drawn with (rollout, the default under async_generation_ratio without "
        "loss_args.engine_ratio_cap); or none, for one optimizer step per rollout.",
    )
    logprob_temperature: float | None = honoured(
        None,
        roles=TRAINED,
        help="RL: logits are divided by it where the loss reads log-probs: the policy's, old ones and the reference's. "
        "Default: the sampling temperature, so that they are those of the distribution that was sampled; ROLL: 1.",
        gt=0,
    )
    apply_loss_scale: bool = honoured(
        True,
        roles=TRAINED,
        help="true: a loss enters the gradient as its value says. false: it enters as Megatron scales "
        "it, divided by "
        "micro-batches x data-parallel ranks.",
    )

    backend_timeout: float = honoured(
        30,
        roles=MEETING,
        help="Minutes that a collective may wait for another rank before the job ends; 0.5 is half a minute.",
        gt=0,
    )

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _read_devices(cls, value: Any) -> Any:
        return None if value is None else tuple(parse_devices(value))

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        # An empty section (`training_args: ~`) is a section of defaults.
        if not isinstance(data, dict):
            return data
        sections = {name for name in cls.model_fields if name.endswith("_args") or name == "router_replay"}
        return {key: {} if value is None and key in sections else value for key, value in data.items()}

    def with_training(self, **changes: Any) -> WorkerConfig:
        """A copy whose `training_args` have the given values, checked. Raises pydantic's ValidationError."""
        values = {**self.training_args.model_dump(), **changes}
        return self.model_copy(update={"training_args": TrainingArgs.model_validate(values)})

    def batching(self) -> BatchingConfig:
        """How this role's passes are batched. Raises ConfigError when caps are missing."""
        rows = self.training_args.per_device_train_batch_size
        return BatchingConfig(
            train=self.batching_spec("train", train_rows=rows),
            infer=self.batching_spec("infer", train_rows=rows),
            logprob_plan=self.chosen_logprob_plan,
        )

    @property
    def chosen_logprob_plan(self) -> LogprobPlan:
        """`logprob_plan`; where it is not given, `own` with keys for passes without gradient that training has not."""
        if "logprob_plan" in self.model_fields_set:
            return self.logprob_plan
        return "own" if self.infer_keys else "train"

    @property
    def infer_keys(self) -> list[tuple[str, ...]]:
        """Given keys that batch passes without gradient otherwise than training."""
        mode = self.mode_of("infer")
        section: Settings = self
        prefix: tuple[str, ...] = ()
        trained: dict[str, int | None]
        if mode == "packed":
            section, prefix = self.sequence_packing_args, ("sequence_packing_args",)
            keys = ("max_packed_sequence_length", "min_num_micro_batches")
            trained = {f"{key}_forward": getattr(section, f"{key}_train") for key in keys}
        elif mode == "dynamic":
            keys = ("max_tokens_per_microbatch", "sequence_length_round")
            trained = {f"{key}_in_infer": getattr(self, f"{key}_in_train") for key in keys}
        else:
            trained = {"infer_batch_size": self.training_args.per_device_train_batch_size}
        if mode != self.mode_of("train"):
            trained = {**dict.fromkeys(trained), "use_dynamic_batching_in_infer": None}
        values = {key: getattr(section, key) for key in trained if key in section.model_fields_set}
        return [(*prefix, key) for key, value in values.items() if value not in (None, trained[key])]
