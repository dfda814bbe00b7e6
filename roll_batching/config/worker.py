"""Settings of one role (`actor_train`, `actor_infer`, `reference`), in ROLL's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll_batching.config.batching import BatchingConfig, LogprobPlan
from roll_batching.config.devices import parse_devices
from roll_batching.config.fields import Settings, honoured, noticed, refused
from roll_batching.config.model import VLM, ModelArgs
from roll_batching.config.strategy import ROUTER_REPLAY, StrategyArgs

DISTILLATION = "distillation is not supported for now"


class SequencePackingArgs(Settings):
    """`sequence_packing_args`: read when use_sequence_packing is true."""

    algorithm: Literal[
        "load_balance",
        "none",
        "concatenative",
        "first_fit_decreasing",
        "first_fit_shuffle",
        "modified_first_fit_decreasing",
    ] = honoured(
        "load_balance",
        help="load_balance: balanced cost under a hard cap. none: samples in their order, next-fit "
        "under the cap. "
        "The others are NeMo-RL's bin packers.",
    )
    max_packed_sequence_length_train: int | None = honoured(
        None,
        help="Most tokens of a pack in training; a hard cap. Required with packing in a role that trains.",
        gt=0,
    )
    max_packed_sequence_length_forward: int | None = honoured(
        None, help="Most tokens of a pack in passes without gradient. Default: the training cap.", gt=0
    )
    min_num_micro_batches_train: int = honoured(1, help="Fewest micro-batches per rank and optimizer step.", ge=1)
    min_num_micro_batches_forward: int = honoured(1, help="Fewest micro-batches per rank and forward pass.", ge=1)


class PlanningArgs(Settings):
    """`planning_args`: what ROLL has no name for. Every key has a good default."""

    oversize: Literal["error", "alone", "truncate", "drop"] = honoured(
        "error", help="What becomes of a sequence longer than the cap."
    )
    objective: Literal["auto", "rank_total", "lockstep", "pipeline"] = honoured(
        "auto",
        help="What is balanced: what the layout waits for (experts: every micro-batch across the ranks that share "
        "them; a pipeline: its makespan; else the sum per rank, then every micro-batch), the sum per rank alone, every "
        "micro-batch across all ranks, or the pipeline.",
    )
    dynamic_algorithm: Literal["roll", "nemo_rl", "prefer_closest", "prefer_first"] = honoured(
        "roll", help="How dynamic batching forms its rectangles."
    )
    shared_shapes: bool = honoured(
        False,
        help="Dynamic batching: one shape per step for all ranks, as ROLL does, instead of each rank's own.",
    )
    sequence_multiple: int | Literal["2*cp*tp"] | None = honoured(
        None,
        help="Round each sequence up to this multiple; default: 2 x CP with context parallelism, else 1.",
    )
    seed: int = honoured(0, help="Seed of algorithms that draw at random.", ge=0)


class TrainingArgs(Settings):
    """`training_args`: optimizer, schedule and mini-batch."""

    learning_rate: float = honoured(1e-6, help="Peak learning rate of AdamW.", gt=0)
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
        1, help="Sequences per data-parallel rank and, in padded mode, per micro-batch.", ge=1
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
    num_train_epochs: float | None = noticed(
        None,
        help="Passes over the data.",
        notice="the job's length is max_steps; the prompts repeat when they run out",
    )
    bf16: bool = noticed(False, help="ROLL's precision flag.", notice="precision is model_args.dtype")
    fp16: bool = refused(False, help="Half precision with loss scaling.", reason="fp16 is not supported; use bf16")
    dataloader_num_workers: int = noticed(
        0, help="Loader processes.", notice="the prompts are held in memory and need no loader processes"
    )
    seed: int | None = noticed(None, help="Seed of the role.", notice="the job's top-level seed is used for all roles")
    output_dir: str | None = noticed(None, help="Output folder of the role.", notice="the top-level output_dir is used")


class DataArgs(Settings):
    """`data_args`: where prompts come from. Read from actor_train."""

    file_name: str | list[str] | None = honoured(
        None, help="JSONL file or files of prompts, one object per line, relative to the working directory."
    )
    eval_file_name: str | list[str] | None = honoured(None, help="JSONL file or files of held-out prompts.")
    prompt: str = honoured("prompt", help="Key of the prompt's text in a line.")
    response: str = honoured("answer", help="Key of what the reward function compares with; a corpus's response.")
    template: str | None = noticed(
        None,
        help="Chat template.",
        notice="prompts are used as their file has them; apply a chat template when writing that file",
    )
    messages: str | None = refused(
        None,
        help="Key of a chat's messages.",
        reason="prompts are plain text here; write them under the key `prompt`",
    )
    dataset_type: str | None = refused(
        "json", help="Kind of file.", reason="only JSON lines are read", allowed=(None, "jsonl")
    )
    tag: str | None = noticed(None, help="Key of the domain.", notice="one reward function serves all prompts")
    id: str | None = noticed(None, help="Key of the id.", notice="samples are numbered by the job")
    preprocessing_num_workers: int | None = noticed(
        None, help="Processes that tokenise.", notice="prompts are tokenised in the job's own process"
    )
    dataset_dir: str | None = noticed(None, help="Folder of data sets.", notice="file_name holds the whole path")
    interleave_probs: str | list[float] | None = noticed(
        None, help="Mixing of data sets.", notice="all prompts are drawn with equal probability"
    )
    domain_interleave_probs: dict[str, float] | None = refused(
        None,
        help="Mixing of domains.",
        reason="all prompts are drawn with equal probability; mix them in the file",
    )
    image_folder: str | None = refused(None, help="Folder of images.", reason=VLM)
    video_folder: str | None = refused(None, help="Folder of videos.", reason=VLM)


class GeneratingArgs(Settings):
    """`generating_args`: how rollouts are sampled. Read from actor_infer."""

    max_new_tokens: int | None = honoured(None, help="Longest response. Default: the job's response_length.", gt=0)
    temperature: float = honoured(1.0, help="Sampling temperature.", gt=0)
    top_p: float = honoured(
        1.0, help="Sample among the likeliest tokens that together reach this probability.", gt=0, le=1
    )
    top_k: int = honoured(0, help="Sample among this many likeliest tokens; 0: all.", ge=0)
    do_sample: bool = honoured(True, help="false: greedy decoding.")
    num_return_sequences: int | None = honoured(
        None, help="Responses per prompt when num_return_sequences_in_group is not given.", ge=1
    )
    num_beams: int = refused(1, help="Beams.", reason="beam search is not supported; use 1")
    repetition_penalty: float = refused(
        1.0,
        help="Penalty on repeated tokens.",
        reason="it would make sampled log-probs differ from the model's; use 1.0",
    )
    length_penalty: float = refused(
        1.0, help="Length penalty of beam search.", reason="there is no beam search; use 1.0"
    )
    max_length: int | None = noticed(None, help="Longest prompt and response.", notice="max_new_tokens is the limit")
    stop_strings: list[str] | None = refused(
        None,
        help="Texts that end a response.",
        reason="a response ends at the tokenizer's end token; leave it out",
    )
    include_stop_str_in_output: bool | None = noticed(
        None, help="Keep the stop text.", notice="a response ends at the end token, which is kept"
    )
    logprobs: int | None = noticed(
        None, help="Log-probs returned by the engine.", notice="the sampled tokens' log-probs are always kept"
    )


class RouterReplay(Settings):
    """`router_replay`."""

    mode: str = refused("disable", help="Replay mode.", reason=ROUTER_REPLAY)


class WorkerConfig(Settings):
    """One role of the job."""

    model_args: ModelArgs = honoured(default_factory=ModelArgs, help="The model.")
    training_args: TrainingArgs = honoured(default_factory=TrainingArgs, help="Optimizer and mini-batch.")
    data_args: DataArgs = honoured(default_factory=DataArgs, help="The data.")
    generating_args: GeneratingArgs = honoured(default_factory=GeneratingArgs, help="Sampling.")
    strategy_args: StrategyArgs = honoured(default_factory=StrategyArgs, help="The strategy.")
    device_mapping: tuple[int, ...] | None = honoured(
        None,
        help="Devices of the job: as many processes start as it names. A list, `list(range(0,8))` or "
        "`0-7`. On a machine "
        "without GPUs it only counts processes. Read from actor_train; other Megatron roles must name "
        "the same.",
    )
    infer_batch_size: int = honoured(
        16, help="Padded mode: sequences per micro-batch in passes without gradient.", ge=1
    )
    system_envs: dict[str, str] = honoured(
        default_factory=dict, help="Environment variables, set before the workers import anything."
    )

    use_sequence_packing: bool = honoured(False, help="Packed mode for training and for passes without gradient.")
    sequence_packing_args: SequencePackingArgs = honoured(
        default_factory=SequencePackingArgs, help="Settings of packed mode."
    )
    use_dynamic_batching: bool | None = honoured(
        None, help="Short form of use_dynamic_batching_in_train and use_dynamic_batching_in_infer."
    )
    use_dynamic_batching_in_train: bool = honoured(False, help="Dynamic mode for training.")
    max_tokens_per_microbatch_in_train: int | None = honoured(
        None, help="Dynamic mode: most tokens (rows x length) of a micro-batch in training.", gt=0
    )
    sequence_length_round_in_train: int = honoured(
        4, help="Dynamic mode: lengths are rounded up to a multiple; itself a multiple of TP x CP.", ge=1
    )
    use_dynamic_batching_in_infer: bool = honoured(False, help="Dynamic mode for passes without gradient.")
    max_tokens_per_microbatch_in_infer: int | None = honoured(
        None, help="Dynamic mode: most tokens of a micro-batch in passes without gradient.", gt=0
    )
    sequence_length_round_in_infer: int = honoured(4, help="As sequence_length_round_in_train, without gradient.", ge=1)
    padded_length: int | Literal["longest"] | None = honoured(
        None,
        help="Padded mode: length of every row. Default: the job's sequence_length; longest: each "
        "micro-batch's longest.",
    )
    planning_args: PlanningArgs = honoured(default_factory=PlanningArgs, help="Further settings of the planner.")
    logprob_plan: LogprobPlan = honoured(
        "train",
        help="Old log-probs: on training's plans, so that the first ratio is exactly 1 (train); with "
        "the caps for passes "
        "without gradient (own); or not computed, for one optimizer step per rollout (none).",
    )
    apply_loss_scale: bool = honoured(
        True,
        help="true: a loss enters the gradient as its value says. false: it enters as Megatron scales "
        "it, divided by "
        "micro-batches x data-parallel ranks.",
    )
    logits_in_fp32: bool = noticed(
        False,
        help="Logits in fp32.",
        notice="log-probs and entropy are always computed in fp32, from logits of any precision",
    )

    name: str | None = noticed(None, help="Name of the role.", notice="a role's name is its key in the file")
    worker_cls: str | None = noticed(
        None,
        help="ROLL's worker class.",
        notice="there are no worker classes here; a custom loss subclasses the strategy",
    )
    num_gpus_per_worker: int = refused(
        1, help="Devices per process.", reason="a process drives one device; leave it out"
    )
    world_size: int | None = noticed(None, help="Processes of the role.", notice="device_mapping counts the processes")
    backend_timeout: float = honoured(
        30, help="Minutes that a collective may wait for another rank before the job ends; 0.5 is half a minute.", gt=0
    )
    max_concurrency: int | None = noticed(None, help="Ray actor's concurrency.", notice="torchrun workers have none")
    model_update_frequency: int = refused(
        1,
        help="Steps between weight updates of the engine.",
        reason="rollouts always use the current weights; use 1",
    )
    offload_nccl: bool = noticed(False, help="Free NCCL buffers.", notice="roles share one process and its buffers")
    router_replay: RouterReplay = honoured(default_factory=RouterReplay, help="Router replay, refused for now.")
    mtp_training_mode: str | None = refused(
        "disabled",
        help="Multi-token prediction.",
        reason="multi-token prediction (MTP) is not supported for now",
        allowed=(None,),
    )
    opd_kl_coef: float | None = refused(None, help="Weight of on-policy distillation.", reason=DISTILLATION)

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _read_devices(cls, value: Any) -> Any:
        return None if value is None else tuple(parse_devices(value))

    @field_validator("system_envs", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, dict):
            plain = {
                k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()
            }
            return plain
        return {} if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        # An empty section (`training_args: ~`) is a section of defaults.
        if not isinstance(data, dict):
            return data
        sections = {name for name in cls.model_fields if name.endswith("_args") or name == "router_replay"}
        return {key: {} if value is None and key in sections else value for key, value in data.items()}

    @property
    def dynamic_in_train(self) -> bool:
        """Whether training is batched dynamically, by either spelling."""
        return self.use_dynamic_batching_in_train or bool(self.use_dynamic_batching)

    @property
    def dynamic_in_infer(self) -> bool:
        """Whether passes without gradient are batched dynamically, by either spelling."""
        return self.use_dynamic_batching_in_infer or bool(self.use_dynamic_batching)

    def with_training(self, **changes: Any) -> WorkerConfig:
        """A copy whose `training_args` have the given values, checked. Raises pydantic's ValidationError."""
        values = {**self.training_args.model_dump(), **changes}
        return self.model_copy(update={"training_args": TrainingArgs.model_validate(values)})

    def batching(self) -> BatchingConfig:
        """How this role's passes are batched. Raises ConfigError when caps are missing."""
        from roll_batching.config.passes import pass_batching

        return BatchingConfig(
            train=pass_batching(self, "train"),
            infer=pass_batching(self, "infer"),
            logprob_plan=self.logprob_plan,
        )
