"""The keys of a whole job, in ROLL's names where ROLL has one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from roll_batching.errors import LayoutError
from roll_batching.jobs.config.advantages import GAE
from roll_batching.jobs.config.auto_caps import MemoryKeys
from roll_batching.jobs.config.diagnostics import ConfigFileError, Problem, shortened
from roll_batching.jobs.config.job_sections import TokenizerConfig, TrainSection, WarmupConfig
from roll_batching.jobs.config.objective import ObjectiveKeys
from roll_batching.jobs.config.rewards import RewardKeys
from roll_batching.jobs.config.rollout_keys import (
    AsyncKeys,
    DistillKeys,
    DynamicSamplingKeys,
    RewardShapingKeys,
    RolloutKeys,
)
from roll_batching.jobs.config.worker import Environment, ValidationConfig, WorkerConfig
from roll_batching.settings.batching import refuse_without_old_log_probs
from roll_batching.settings.fields import MOST_TOKENS, OR_NULL, ROLLOUTS, TRAINED, Switch, setting

TRACKERS = ("wandb", "swanlab", "mlflow", "trackio")
"""Trackers that can receive the metrics."""
ROLES = ("actor_train", "actor_infer", "reference", "critic", "teacher")
Task = Literal["grpo", "distill", "sft", "dpo", "kto"]
"""Kinds of jobs."""
SUPERVISED_TASKS = ("sft", "dpo", "kto")
"""Tasks that train on texts or pairs from a file, without rollouts."""
_LONGEST_NAME = 255
"""Most bytes of a folder name."""
NOT_EVALUATED = "nothing is evaluated"
"""End of the notices about keys of an evaluation."""


def _set_model(data: dict[str, Any], name: Any) -> dict[str, Any]:
    """`data` with `name` as the model of actor_train, unless `data` gives one, or has no sections to hold it."""
    train = {} if data.get("actor_train") is None else data["actor_train"]
    model = train.get("model_args", {}) if isinstance(train, dict) else None
    model = {} if model is None and isinstance(train, dict) else model
    if not isinstance(name, str) or not isinstance(model, dict) or model.get("model_name_or_path") is not None:
        return data
    return {**data, "actor_train": {**train, "model_args": {**model, "model_name_or_path": name}}}


def _build_encoders(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with `vision_encoder` in the models of all roles that do not give it, if the job has images."""
    match data:
        case {"actor_train": {"data_args": {"images": str()}}}:
            roles = {name: role for name, role in data.items() if name in ROLES and isinstance(role, dict)}
            models = {name: role.get("model_args") or {} for name, role in roles.items()}
            built = {
                name: {"vision_encoder": True, **model} for name, model in models.items() if isinstance(model, dict)
            }
            return data | {name: {**roles[name], "model_args": model} for name, model in built.items()}
    return data


def _has_default_norm(job: JobKeys) -> bool:
    """Whether a role that trains has the `max_grad_norm` of the job."""
    trained = [role.training_args for name, role in job.roles.items() if name in TRAINED.names]
    return any(args.max_grad_norm == job.max_grad_norm for args in trained)


_EVALUATES = Switch(lambda job: job.without_evaluation is None, f"{{0.without_evaluation}}: {NOT_EVALUATED}")
_TRACKED = ", ".join(TRACKERS)
_READ_IF = {
    "rollout_samples rollout_batch_size num_return_sequences_in_group batch_balance is_offload_states": ROLLOUTS,
    "actor_infer": ROLLOUTS,
    "validation": (ROLLOUTS, _EVALUATES),
    # Their sum is sequence_length where that is not given.
    "prompt_length response_length": Switch(
        lambda job: not job.is_supervised or "sequence_length" not in job.model_fields_set,
        "task is {0.task}, which makes no rollouts",
    ),
    "pretrain": Switch(
        lambda job: job.actor_train.model_args.model_name_or_path in (None, job.pretrain),
        "actor_train.model_args.model_name_or_path is given",
    ),
    "save_total_limit async_save": Switch(lambda job: job.save_steps, "save_steps is 0: no checkpoint is written"),
    "eval_steps": _EVALUATES,
    "eval_samples": Switch(lambda job: not job.eval_samples or _EVALUATES.is_on(job), _EVALUATES.otherwise),
    "track_with": Switch(
        lambda job: job.track_with in TRACKERS, f"metrics go to metrics.jsonl and TensorBoard; {_TRACKED} add to them"
    ),
    "tracker_kwargs": Switch(lambda job: job.track_with in TRACKERS, f"track_with is none of {_TRACKED}"),
    "max_grad_norm": Switch(_has_default_norm, "training_args.max_grad_norm is given"),
}


class JobKeys(
    ObjectiveKeys,
    DistillKeys,
    RewardKeys,
    RewardShapingKeys,
    RolloutKeys,
    DynamicSamplingKeys,
    AsyncKeys,
    MemoryKeys,
    read_if=_READ_IF,
):
    """The keys of a job."""

    task: Task = setting(
        "grpo",
        help="grpo: reinforcement learning, after an optional supervised warm-up. distill: the student samples, and "
        "learns a teacher's distributions over its tokens (docs/distillation.md). sft: supervised fine-tuning. dpo: "
        "training on pairs of a better and a worse answer. kto: on answers that are desirable or not. "
        "`roll-batching sft` and `roll-batching dpo` set it where "
        "the file does not.",
    )
    exp_name: str = setting("roll-batching", help="Name of the run: its folder under output_dir.", min_length=1)
    seed: int = setting(42, help="Seed of all random numbers.", ge=0)
    output_dir: str = setting("runs", help="Folder that receives the run's folder.")
    resume_from_checkpoint: bool | str = setting(
        False,
        help="true: resume from the run's last checkpoint, or start where there is none. Or the path of a checkpoint "
        "or of a run's folder.",
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
        None, help="sft and dpo: passes over the data, instead of max_steps.", gt=0
    )
    token_budget: int = setting(
        0,
        help="TRL's short form. Above 0: actor_train packs up to this many tokens, and a longer sample is alone "
        "(use_sequence_packing, max_packed_sequence_length_train, planning_args.oversize: alone). 0 or less: "
        "micro-batches of per_device_train_batch_size samples, or as actor_train says.",
    )
    save_steps: int = setting(
        0, help="Steps between checkpoints; the last step of each phase writes one, too. 0: no checkpoints.", ge=0
    )
    save_total_limit: int | None = setting(None, help="Number of checkpoints to keep, the latest. Default: all.", ge=1)
    async_save: bool = setting(
        False,
        help="Write checkpoints during training, from a copy in host memory. The next checkpoint, and the end of a "
        "phase, wait for it.",
    )
    verify_checkpoint: bool = setting(
        True,
        help="Before loading, compare the files of a checkpoint with the digests in its manifest; false: compare file "
        "sizes only.",
    )
    export_model: bool = setting(
        True,
        help="At the end of a run that started from a model directory: export the trained model to the folder `model` "
        "of the run. `roll-batching export` exports a checkpoint later.",
    )
    rollout_samples: int = setting(
        8,
        help="Responses per step, and per evaluation, that are written to rollouts.jsonl, spread evenly over the "
        "prompts; -1: all; 0: none.",
        ge=-1,
    )
    logging_steps: int = setting(1, help="Steps between progress lines; metrics are written at every step.", ge=1)
    eval_steps: int = setting(
        10,
        help="Steps between evaluations on held-out prompts (sft and dpo: of the loss on held-out texts). The first "
        "and the last step are evaluated, too.",
        ge=0,
    )
    eval_samples: int = setting(
        512,
        help="Answers per evaluation (sft and dpo: number of held-out texts or pairs, from the first on); 0: no "
        "evaluation.",
        ge=0,
    )
    track_with: str | None = setting(
        None,
        help="wandb, swanlab, mlflow or trackio: also send the metrics to this tracker. They always go to "
        "metrics.jsonl and TensorBoard.",
    )
    tracker_kwargs: dict[str, Any] = setting(
        default_factory=dict,
        help="Keyword arguments of the tracker's `init` (project, name, tags, mode, ...). mlflow: those of "
        "`start_run`, tracking_uri and experiment_name.",
    )

    rollout_batch_size: int = setting(128, help="Prompts per RL step.", ge=1, le=MOST_TOKENS)
    num_return_sequences_in_group: int | None = setting(
        None,
        help="Responses per prompt, the group size. Default: generating_args.num_return_sequences, else 1.",
        ge=1,
        le=MOST_TOKENS,
    )
    batch_balance: bool = setting(
        False,
        help="ROLL's order: the samples of a whole RL step are placed on data-parallel ranks (Karmarkar-Karp, equal "
        "counts), each rank draws its part of a mini-batch from its own samples, and micro-batches are balanced within "
        "the rank. Default: mini-batches are drawn over all ranks, and each plan places its samples.",
    )
    is_offload_states: bool = setting(
        False,
        help="Offload unused states to host memory: the policy's gradients and optimizer during sampling, the "
        "reference's weights except for its log-probs. A sampler in another layout has weights only while it samples. "
        "A rollout engine on the same devices sleeps during training.",
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

    actor_train: Annotated[WorkerConfig, OR_NULL] = setting(
        default_factory=WorkerConfig, help="The policy in training."
    )
    actor_infer: Annotated[WorkerConfig, OR_NULL] = setting(
        default_factory=WorkerConfig,
        help="Rollouts: actor_train's model samples them with these generating_args, in another parallel layout where "
        "strategy_config gives other sizes (docs/cluster.md).",
    )
    validation: ValidationConfig = setting(default_factory=ValidationConfig, help="The evaluation of held-out prompts.")
    reference: WorkerConfig | None = setting(
        None, help="The frozen initial policy, for use_kl_loss and for your own losses. Default: none."
    )
    critic: WorkerConfig | None = setting(
        None,
        help="The critic of adv_estimator: gae, a model with one value per token (docs/ppo.md). It has its own model, "
        "optimizer and batching; it shares the devices and the parallel sizes of actor_train. Default: none.",
    )

    teacher: WorkerConfig | None = setting(
        None,
        help="The teacher of distillation: a frozen model directory (model_args.model_name_or_path) with the student's "
        "vocabulary, and its own batching and parallel sizes on actor_train's devices. Default: none.",
    )

    @field_validator("exp_name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _LONGEST_NAME:
            text = f"is {shortened(repr(name))}; it names one folder inside output_dir: at most {_LONGEST_NAME} bytes, "
            raise ValueError(f"{text}without '/', and not '.' or '..'; parent folders go into output_dir")
        return name

    @model_validator(mode="before")
    @classmethod
    def _set_models(cls, data: Any) -> Any:
        """Sets `pretrain` as actor_train's model, and the vision encoders of all roles."""
        if not isinstance(data, dict):
            return data  # pydantic reports it
        return _build_encoders(_set_model(data, data.get("pretrain")))

    @property
    def is_supervised(self) -> bool:
        """Whether the job trains on texts or pairs from a file, without rollouts."""
        return self.task in SUPERVISED_TASKS

    @property
    def without_evaluation(self) -> str | None:
        """Why no held-out data is evaluated, or None if some is."""
        if not self.eval_samples:
            return "eval_samples is 0"
        if self.actor_train.data_args.held_out_prompts(self.eval_samples) is None:
            return "actor_train.data_args.eval_file_name is not given"
        if self.is_supervised or self.has_reward or self.rollout_function is not None:
            return None
        return "no reward_function scores answers"

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The roles of this job, by name."""
        present = {name: getattr(self, name) for name in ROLES}
        return {name: role for name, role in present.items() if role is not None}

    @property
    def stream(self) -> TrainSection | None:
        """The section `train` if load-balanced batching over a stream is on, else None."""
        enabled = self.train is not None and self.train.train_policy.enable_dp_load_balancing
        return self.train if enabled else None

    @property
    def group_size(self) -> int:
        """Responses per prompt."""
        return self.num_return_sequences_in_group or 1

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the log-probs that the loss reads: actor_train's, by default the sampling temperature."""
        if self.task != "grpo":  # kd_temperature divides the log-probs of distillation
            return 1.0
        return self.actor_train.logprob_temperature or self.actor_infer.generating_args.temperature

    @property
    def world_size(self) -> int | None:
        """Number of devices in actor_train.device_mapping; None without one."""
        mapping = self.actor_train.device_mapping
        return None if mapping is None else len(mapping)

    def own_devices(self, name: str) -> tuple[int, ...] | None:
        """The devices of a role with separate processes, or None if it shares actor_train's."""
        role = self.roles.get(name)
        if role is None or name == "actor_train" or not role.strategy_args.runs_on_megatron:
            return None
        return None if role.device_mapping == self.actor_train.device_mapping else role.device_mapping

    @property
    def has_sampler(self) -> bool:
        """Whether separate processes sample rollouts: asynchronously, or on their own devices."""
        return self.asynchronous or self.own_devices("actor_infer") is not None

    def dp_size(self, world_size: int) -> int:
        """Number of data-parallel ranks of actor_train in a job of `world_size` processes.

        Raises ConfigFileError when `world_size` does not fit the layout of a role on these processes, and for more
        optimizer steps per rollout than `logprob_plan` allows.
        """
        for name, role in self.roles.items():
            if self.own_devices(name) is not None:
                continue
            layout, path = role.strategy_args.strategy_config, (name, "strategy_args", "strategy_config")
            if world_size % layout.model_size:
                raise ConfigFileError([Problem(path, layout.misfit(world_size))])
            try:
                layout.max_cp_size(layout.parallel_dims(world_size).dp_size)
            except LayoutError as error:
                raise ConfigFileError([Problem(path, str(error))]) from None
        dp_size = world_size // self.actor_train.strategy_args.strategy_config.model_size
        problem = self.logprob_problem(dp_size)
        if problem is not None:
            raise ConfigFileError([problem])
        return dp_size

    def logprob_problem(self, dp_size: int) -> Problem | None:
        """The problem of several optimizer steps per rollout under `logprob_plan: none`, or None."""
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
        """Number of responses of an RL step."""
        return self.rollout_batch_size * self.group_size

    @property
    def prompts_per_generation(self) -> int:
        """Number of prompts sampled at once: those of a step, or with dynamic sampling of a generation batch."""
        size = self.dynamic_sampling_batch_size if self.dynamic_sampling else None
        return self.rollout_batch_size if size is None else size

    def mini_batch_size(self, dp_size: int) -> int:
        """Sequences of one optimizer step, over all data-parallel ranks."""
        args = self.actor_train.training_args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size

    def optimizer_steps(self, dp_size: int) -> int | None:
        """Optimizer steps of the policy in the main phase, or None if the number of texts decides."""
        if self.task in SUPERVISED_TASKS:
            return None if self.num_train_epochs is not None and self.stream is None else self.max_steps
        per_step = math.ceil(self.samples_per_rollout / self.mini_batch_size(dp_size)) * self.ppo_epochs
        return (self.max_steps - (self.critic_warmup if self.adv_estimator == GAE else 0)) * per_step

    def environment(self) -> dict[str, str]:
        """Environment variables of the workers: the job's, then those of its roles."""
        merged = dict(self.system_envs)
        for role in self.roles.values():
            merged.update(role.system_envs)
        return merged
