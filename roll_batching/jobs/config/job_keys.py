"""The keys of a whole job, in ROLL's names where ROLL has one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll_batching.errors import LayoutError
from roll_batching.jobs.config.async_keys import AsyncKeys
from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem, shortened
from roll_batching.jobs.config.objective import ObjectiveKeys
from roll_batching.jobs.config.rewards import RewardKeys
from roll_batching.jobs.config.stream import TrainSection
from roll_batching.jobs.config.worker import Environment, ValidationConfig, WorkerConfig
from roll_batching.settings.batching import refuse_without_old_log_probs
from roll_batching.settings.fields import MOST_TOKENS, Settings, setting
from roll_batching.settings.training import TrainingArgs

TRACKERS = ("wandb", "swanlab")
"""Where metrics can go as well."""
ROLES = ("actor_train", "actor_infer", "reference")
Task = Literal["grpo", "sft", "dpo"]
"""What a job does."""
_LONGEST_NAME = 255
"""Bytes that a folder's name may have."""


def _with_model(data: dict[str, Any], name: Any) -> dict[str, Any]:
    """`data` with `name` as the model of actor_train, where it names none itself."""
    train = data.get("actor_train", {})
    model = train.get("model_args", {}) if isinstance(train, dict) else None
    model = {} if model is None and isinstance(train, dict) else model
    if not isinstance(name, str) or not isinstance(model, dict) or model.get("model_name_or_path") is not None:
        return data
    return {**data, "actor_train": {**train, "model_args": {**model, "model_name_or_path": name}}}


class TokenizerConfig(Settings):
    """`tokenizer`: how text becomes tokens."""

    type: Literal["char", "hf"] = setting(
        "char",
        help="char: one token per character. hf: Hugging Face's tokenizers. Default with a model directory and no "
        "vocabulary: hf.",
    )
    vocabulary: str | None = setting(None, help="char: the characters, in the order of their ids.")
    vocabulary_file: str | None = setting(None, help="char: text file that holds the characters instead.")
    name_or_path: str | None = setting(
        None, help="hf: folder of the tokenizer, or its name. Default: the model directory."
    )
    eos_token: str | None = setting(None, help="Token that ends a response; char: one of the characters.")
    pad_token: str | None = setting(None, help="Token that fills; default: the end token.")


class WarmupConfig(Settings):
    """`warmup`: supervised training on a corpus before RL, with the same model and strategy."""

    file_name: str | list[str] = setting(help="JSONL file or files of the corpus, one document per line.")
    messages: str | None = setting(
        None,
        help="Key of a chat's messages, which go through the tokenizer's chat template: the assistant's turns are "
        "learnt. `prompt` and `response` are then not read.",
    )
    prompt: str = setting("prompt", help="Key of a document's beginning, which bears no loss.")
    response: str = setting("response", help="Key of the rest, which is learnt.")
    training_args: TrainingArgs = setting(
        default_factory=TrainingArgs, help="Optimizer, schedule, mini-batch and max_steps of the warm-up."
    )
    num_train_epochs: float | None = setting(
        None, help="Passes over the corpus, in place of training_args.max_steps.", gt=0
    )

    @model_validator(mode="after")
    def _has_steps(self) -> WarmupConfig:
        if self.training_args.max_steps < 1 and self.num_train_epochs is None:
            raise ValueError(
                "warmup.training_args.max_steps must say how many optimizer steps the warm-up takes, or "
                "warmup.num_train_epochs how many passes over the corpus"
            )
        if self.training_args.max_steps >= 1 and self.num_train_epochs is not None:
            raise ValueError("warmup.num_train_epochs stands in place of training_args.max_steps; keep one of the two")
        return self

    def scheduled(self, documents: int, mini_batch: int) -> TrainingArgs:
        """`training_args` whose `max_steps` is the number of optimizer steps over a corpus of so many documents."""
        if self.num_train_epochs is None:
            return self.training_args
        steps = max(1, math.ceil(self.num_train_epochs * documents / mini_batch))
        return self.training_args.model_copy(update={"max_steps": steps})


class JobKeys(ObjectiveKeys, RewardKeys, AsyncKeys):
    """What a file says of a job."""

    task: Task = setting(
        "grpo",
        help="What the job does: reinforcement learning, after a supervised warm-up where there is one (grpo); "
        "supervised fine-tuning (sft); learning from pairs of a better and a worse answer (dpo). `roll-batching sft` "
        "and `roll-batching dpo` say it where the file does not.",
    )
    exp_name: str = setting("roll-batching", help="Name of the run: its folder under output_dir.", min_length=1)
    seed: int = setting(42, help="Seed of everything that draws at random.", ge=0)
    output_dir: str = setting("runs", help="Folder that receives the run's folder.")
    resume_from_checkpoint: bool | str = setting(
        False,
        help="true: go on from the run's last checkpoint, from the beginning where there is none. Or the path of a "
        "checkpoint or of a run's folder.",
    )
    pretrain: str | None = setting(None, help="Short form of actor_train.model_args.model_name_or_path.")
    system_envs: Environment = setting(
        default_factory=dict,
        help="Environment variables for all roles, set before the workers import anything.",
    )

    max_steps: int = setting(
        500, help="RL steps; 0: only the warm-up. Under sft and dpo: optimizer steps, at least 1.", ge=0
    )
    num_train_epochs: float | None = setting(
        None, help="sft and dpo: passes over the data, in place of max_steps.", gt=0
    )
    save_steps: int = setting(
        0, help="Write a checkpoint every so many steps and after the last one of each phase; 0: none.", ge=0
    )
    save_total_limit: int | None = setting(
        None, help="Keep only so many checkpoints of the run, the latest. Default: all.", ge=1
    )
    async_save: bool = setting(
        False,
        help="Write checkpoints while training goes on, from a copy in host memory. The next one, and the last of a "
        "phase, wait for it.",
    )
    verify_checkpoint: bool = setting(
        True,
        help="Read the files of a checkpoint once before it is loaded, and compare them with the digests that were "
        "kept when it was written; false: compare sizes alone.",
    )
    export_model: bool = setting(
        True,
        help="At the end of a run that started from a model directory: write the trained model as one, into the folder "
        "`model` of the run. `roll-batching export` does it later, from a checkpoint.",
    )
    rollout_samples: int = setting(
        8,
        help="Responses of each step, and of each evaluation, that go into rollouts.jsonl of the run's folder, spread "
        "evenly over its prompts; -1: all; 0: none.",
        ge=-1,
    )
    logging_steps: int = setting(1, help="Show progress every so many steps; metrics are written at each.", ge=1)
    eval_steps: int = setting(
        10,
        help="Evaluate on held-out prompts (sft and dpo: measure the loss on held-out texts) every so many steps, "
        "beside first and last.",
        ge=0,
    )
    eval_samples: int = setting(
        512,
        help="Sampled answers per evaluation (sft and dpo: held-out texts or pairs, the first so many); 0: no "
        "evaluation.",
        ge=0,
    )
    track_with: str | None = setting(
        None,
        help="wandb or swanlab: send the metrics to Weights & Biases or to SwanLab as well. They always go to "
        "metrics.jsonl and TensorBoard.",
    )
    tracker_kwargs: dict[str, Any] = setting(
        default_factory=dict,
        help="wandb or swanlab: keyword arguments of its `init` (project, name, tags, mode, ...).",
    )

    rollout_batch_size: int = setting(128, help="Prompts per RL step.", ge=1, le=MOST_TOKENS)
    num_return_sequences_in_group: int | None = setting(
        None,
        help="Responses per prompt: the group. Default: generating_args.num_return_sequences, else 1.",
        ge=1,
        le=MOST_TOKENS,
    )
    batch_balance: bool = setting(
        False,
        help="ROLL's order: the samples of a whole RL step are placed on data-parallel ranks (Karmarkar-Karp, equal "
        "counts), each rank draws its share of a mini-batch among its own, and micro-batches are balanced inside the "
        "rank. Default: mini-batches are drawn over all ranks, and each plan places its samples.",
    )
    is_offload_states: bool = setting(
        False,
        help="States wait on the host while they are not used: gradients and optimizer of the policy while it samples, "
        "the reference's weights except for its log-probs. A sampler in a layout of its own has weights only while it "
        "samples. A rollout engine on the same devices sleeps while the model trains.",
    )
    prompt_length: int = setting(
        1024, help="Longest prompt in tokens; a longer one is an error that names its line.", ge=1, le=MOST_TOKENS
    )
    response_length: int | None = setting(
        None, help="Longest response in tokens. Default: sequence_length - prompt_length.", ge=1, le=MOST_TOKENS
    )
    sequence_length: int | None = setting(
        None,
        help="Longest prompt and response together. Default: prompt_length + response_length.",
        ge=2,
        le=MOST_TOKENS,
    )
    tokenizer: TokenizerConfig = setting(default_factory=TokenizerConfig, help="How text becomes tokens.")
    warmup: WarmupConfig | None = setting(None, help="Supervised phase before RL. Default: none.")

    train: TrainSection | None = setting(
        None, help="task: sft or dpo: batching over a stream, in cosmos-rl's keys. Default: planned mini-batches."
    )

    max_grad_norm: float | None = setting(None, help="Short form of actor_train.training_args.max_grad_norm.", ge=0)

    actor_train: WorkerConfig = setting(default_factory=WorkerConfig, help="The policy in training.")
    actor_infer: WorkerConfig = setting(
        default_factory=WorkerConfig,
        help="Rollouts: actor_train's model samples them with these generating_args, in a parallel layout of its own "
        "where strategy_config gives other sizes (docs/roles-and-placement.md).",
    )
    validation: ValidationConfig = setting(default_factory=ValidationConfig, help="The evaluation of held-out prompts.")
    reference: WorkerConfig | None = setting(
        None, help="The frozen starting policy, for use_kl_loss and for losses of your own. Default: none."
    )

    @field_validator("exp_name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _LONGEST_NAME:
            text = f"is {shortened(repr(name))}; it names one folder inside output_dir: at most {_LONGEST_NAME} bytes, "
            raise ValueError(f"{text}without '/', and not '.' or '..'; the folders above it go into output_dir")
        return name

    @model_validator(mode="before")
    @classmethod
    def _empty_roles(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {key: {} if value is None and key in ROLES[:2] else value for key, value in data.items()}
        if isinstance(data.get("train"), dict) and data["train"].get("train_policy", {}) is None:
            data["train"] = {key: value for key, value in data["train"].items() if key != "train_policy"}
        return _with_model(data, data.get("pretrain"))

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The roles that this job has, by name."""
        present = {name: getattr(self, name) for name in ROLES}
        return {name: role for name, role in present.items() if role is not None}

    @property
    def stream(self) -> TrainSection | None:
        """How a stream is batched, where the job has one."""
        on = self.train is not None and self.train.train_policy.enable_dp_load_balancing
        return self.train if on else None

    @property
    def group_size(self) -> int:
        """Responses per prompt."""
        return self.num_return_sequences_in_group or 1

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by where the loss reads log-probs."""
        if self.task != "grpo":
            return 1.0
        return self.actor_train.logprob_temperature or self.actor_infer.generating_args.temperature

    @property
    def world_size(self) -> int | None:
        """Processes that actor_train.device_mapping names; None when it names none."""
        mapping = self.actor_train.device_mapping
        return None if mapping is None else len(mapping)

    def own_devices(self, name: str) -> tuple[int, ...] | None:
        """The devices of a role that runs on others than actor_train, in processes of its own; None where it shares."""
        role = self.roles.get(name)
        if role is None or name == "actor_train" or not role.strategy_args.runs_on_megatron:
            return None
        return None if role.device_mapping == self.actor_train.device_mapping else role.device_mapping

    @property
    def has_sampler(self) -> bool:
        """Whether processes that do not train draw rollouts: ahead of training, or on devices of their own."""
        return self.asynchronous or self.own_devices("actor_infer") is not None

    def dp_size(self, world_size: int) -> int:
        """Data-parallel ranks of actor_train among `world_size` processes.

        Raises ConfigFileError when they do not divide as the layout of any role asks that runs on them, and for more
        optimizer steps per rollout than `logprob_plan` allows.
        """
        for name, role in self.roles.items():
            if self.own_devices(name) is not None:
                continue
            layout, path = role.strategy_args.strategy_config, (name, "strategy_args", "strategy_config")
            if world_size % layout.model_size:
                raise ConfigFileError([Problem(path, layout.misfit(world_size))])
            try:
                layout.parallel_dims(world_size)
            except LayoutError as error:
                raise ConfigFileError([Problem(path, str(error))]) from None
        dp_size = world_size // self.actor_train.strategy_args.strategy_config.model_size
        problem = self.logprob_problem(dp_size)
        if problem is not None:
            raise ConfigFileError([problem])
        return dp_size

    def logprob_problem(self, dp_size: int) -> Problem | None:
        """What is wrong with `logprob_plan: none`, which allows one optimizer step per rollout."""
        if self.task != "grpo" or not self.max_steps or self.actor_train.logprob_plan != "none":
            return None
        size = self.mini_batch_size(dp_size)
        text = refuse_without_old_log_probs(self.samples_per_rollout, size, self.ppo_epochs)
        return None if text is None else Problem(("actor_train", "logprob_plan"), text)

    @property
    def run_folder(self) -> Path:
        """Folder of the run's files: `output_dir/exp_name`."""
        return Path(self.output_dir) / self.exp_name

    @property
    def samples_per_rollout(self) -> int:
        """Responses of an RL step."""
        return self.rollout_batch_size * self.group_size

    def mini_batch_size(self, dp_size: int) -> int:
        """Sequences of one optimizer step, over all data-parallel ranks."""
        args = self.actor_train.training_args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size

    def environment(self) -> dict[str, str]:
        """Variables for the workers: the job's, then those of its roles."""
        merged = dict(self.system_envs)
        for role in self.roles.values():
            merged.update(role.system_envs)
        return merged
