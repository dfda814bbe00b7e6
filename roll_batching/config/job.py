"""Settings of a whole job, in ROLL's names where ROLL has one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr, field_validator, model_validator

from roll_batching.config.fields import Settings, honoured, noticed, refused
from roll_batching.config.model import CHECKPOINTS
from roll_batching.config.problems import ConfigFileError, Notice, Problem
from roll_batching.config.source import Source
from roll_batching.config.worker import DISTILLATION, TrainingArgs, WorkerConfig

ROLES = ("actor_train", "actor_infer", "reference")
CRITIC = "critics and value heads are not supported for now; use adv_estimator: grpo"


class TokenizerConfig(Settings):
    """`tokenizer`: how text becomes tokens."""

    type: Literal["char", "hf"] = honoured("char", help="char: one token per character. hf: Hugging Face's tokenizers.")
    vocabulary: str | None = honoured(None, help="char: the characters, in the order of their ids.")
    vocabulary_file: str | None = honoured(None, help="char: text file that holds the characters instead.")
    name_or_path: str | None = honoured(None, help="hf: folder of the tokenizer, or its name.")
    eos_token: str | None = honoured(None, help="Token that ends a response; char: one of the characters.")
    pad_token: str | None = honoured(None, help="Token that fills; default: the end token.")


class WarmupConfig(Settings):
    """`warmup`: supervised training on a corpus before RL, with the same model and strategy."""

    file_name: str | list[str] = honoured(help="JSONL file or files of the corpus, one document per line.")
    prompt: str = honoured("prompt", help="Key of a document's beginning, which bears no loss.")
    response: str = honoured("response", help="Key of the rest, which is learnt.")
    training_args: TrainingArgs = honoured(
        default_factory=TrainingArgs, help="Optimizer, schedule, mini-batch and max_steps of the warm-up."
    )

    @model_validator(mode="after")
    def _has_steps(self) -> WarmupConfig:
        if self.training_args.max_steps < 1:
            raise ValueError("warmup.training_args.max_steps must say how many optimizer steps the warm-up takes")
        return self


class JobConfig(Settings):
    """A training job: prompts -> rollouts -> reward -> advantages -> balanced, packed training steps."""

    exp_name: str = honoured("roll-batching", help="Name of the run: its folder under output_dir.", min_length=1)
    seed: int = honoured(42, help="Seed of everything that draws at random.", ge=0)
    output_dir: str = honoured("runs", help="Folder that receives the run's folder.")
    resume_from_checkpoint: bool | str = honoured(
        False,
        help="true: go on from the run's last checkpoint, from the beginning where there is none. Or the path of a "
        "checkpoint or of a run's folder.",
    )
    system_envs: dict[str, str] = honoured(
        default_factory=dict,
        help="Environment variables for all roles, set before the workers import anything.",
    )

    max_steps: int = honoured(500, help="RL steps; 0: only the warm-up.", ge=0)
    save_steps: int = honoured(
        0, help="Write a checkpoint every so many steps and after the last one of each phase; 0: none.", ge=0
    )
    save_total_limit: int | None = honoured(
        None, help="Keep only so many checkpoints of the run, the latest. Default: all.", ge=1
    )
    logging_steps: int = honoured(1, help="Show progress every so many steps; metrics are written at each.", ge=1)
    eval_steps: int = honoured(
        10, help="Evaluate on held-out prompts every so many steps, beside first and last.", ge=0
    )
    eval_samples: int = honoured(512, help="Sampled answers per evaluation; 0: no evaluation.", ge=0)

    rollout_batch_size: int = honoured(128, help="Prompts per RL step.", ge=1)
    num_return_sequences_in_group: int | None = honoured(
        None,
        help="Responses per prompt: the group. Default: generating_args.num_return_sequences, else 1.",
        ge=1,
    )
    prompt_length: int = honoured(
        1024, help="Longest prompt in tokens; a longer one is an error that names its line.", ge=1
    )
    response_length: int | None = honoured(
        None, help="Longest response in tokens. Default: sequence_length - prompt_length.", ge=1
    )
    sequence_length: int | None = honoured(
        None, help="Longest prompt and response together. Default: prompt_length + response_length.", ge=2
    )
    reward_function: str | None = honoured(
        None, help="Dotted path of the function that scores responses. Needed when max_steps > 0."
    )
    reward_args: dict[str, Any] = honoured(default_factory=dict, help="Keyword arguments for the reward function.")
    reward_timeout: float = honoured(
        300.0,
        help="Seconds that one call of the reward function may take, and the import of its module (60 at least); a "
        "longer one ends the job with an error that names the sample.",
        gt=0,
    )
    tokenizer: TokenizerConfig = honoured(default_factory=TokenizerConfig, help="How text becomes tokens.")
    warmup: WarmupConfig | None = honoured(None, help="Supervised phase before RL. Default: none.")

    adv_estimator: Literal["grpo", "reinforce"] = honoured(
        "grpo",
        help="grpo: rewards minus their group's mean, over its deviation (the sample's, plus 1e-6). reinforce: rewards "
        "as norm_* says.",
    )
    norm_mean_type: Literal["batch", "group"] | None = honoured(
        None, help="reinforce: the mean that is subtracted from rewards. grpo always uses the group's."
    )
    norm_std_type: Literal["batch", "group"] | None = honoured(
        None,
        help="reinforce: the deviation that rewards are divided by. grpo: default group.",
    )
    whiten_advantages: bool = honoured(
        False, help="Give the advantages of a step's tokens mean 0 and deviation 1 (REINFORCE++)."
    )
    reward_clip: float | None = honoured(None, help="Clip rewards, once they are normalised, to [-x, x].", gt=0)
    advantage_clip: float | None = honoured(None, help="Clip advantages to [-x, x].", gt=0)
    drop_zero_advantage_groups: bool = honoured(
        False,
        help="Leave out of the computation the groups whose advantages are all 0; they still count in the loss.",
    )
    control: Literal["none", "shuffled"] = honoured(
        "none", help="shuffled: advantages are shuffled among samples, a control that must not learn."
    )

    ppo_epochs: int = honoured(1, help="Passes over a step's samples.", ge=1)
    pg_clip: float = honoured(0.2, help="Clip range of the ratio, below and above, unless use_pg_clip_range.", gt=0)
    use_pg_clip_range: bool = honoured(False, help="Use pg_clip_low and pg_clip_high instead of pg_clip.")
    pg_clip_low: float = honoured(0.2, help="The ratio is clipped at 1 minus this; needs use_pg_clip_range.", gt=0)
    pg_clip_high: float = honoured(0.2, help="The ratio is clipped at 1 plus this; needs use_pg_clip_range.", gt=0)
    importance_sampling: Literal["token", "seq"] = honoured(
        "token", help="A ratio per token, or one per sequence: the geometric mean of its tokens' (GSPO)."
    )
    dual_clip_loss: bool = honoured(
        False, help="Bound the loss of a negative advantage A at -(1 + 2 * pg_clip) * A, whatever the ratio."
    )
    max_len_mask: bool = honoured(
        False,
        help="Leave out responses that were cut off at the length limit: they are not computed and count nowhere "
        "in the loss. Their rewards still enter their group's advantages.",
    )
    use_kl_loss: bool = honoured(False, help="Add the divergence from the reference to the loss.")
    kl_loss_coef: float = honoured(0.0, help="Weight of the divergence (k3); needs use_kl_loss.", ge=0)
    kl_loss_bound: float | None = honoured(
        10.0, help="Largest divergence per token, without gradient beyond (ROLL, verl: 10). ~: no bound.", gt=0
    )
    entropy_loss_coef: float = honoured(0.0, help="Weight of the entropy bonus.", ge=0)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = honoured(
        "token-mean", help="How tokens are averaged, over the whole mini-batch on all ranks."
    )
    max_grad_norm: float | None = honoured(None, help="Short form of actor_train.training_args.max_grad_norm.", ge=0)

    pretrain: str | None = refused(None, help="Checkpoint of all roles.", reason=CHECKPOINTS)
    actor_train: WorkerConfig = honoured(default_factory=WorkerConfig, help="The policy in training.")
    actor_infer: WorkerConfig = honoured(
        default_factory=WorkerConfig,
        help="Rollouts: they run on actor_train's model, with these generating_args.",
    )
    reference: WorkerConfig | None = honoured(None, help="The frozen starting policy, for use_kl_loss. Default: none.")

    track_with: str = refused(
        "tensorboard",
        help="Tracker.",
        reason="metrics go to metrics.jsonl and TensorBoard",
        allowed=("stdout",),
    )
    tracker_kwargs: dict[str, Any] | None = noticed(
        None, help="Arguments of the tracker.", notice="TensorBoard events lie in the run's folder"
    )
    logging_dir: str | None = noticed(None, help="Folder of logs.", notice="everything a run leaves lies in its folder")
    checkpoint_config: dict[str, Any] | None = noticed(
        None,
        help="Where checkpoints go.",
        notice="checkpoints lie in the run's folder",
    )
    num_gpus_per_node: int | None = noticed(
        None, help="Devices per machine.", notice="actor_train.device_mapping counts the processes"
    )
    num_nodes: int | None = noticed(None, help="Machines.", notice="start one torchrun per machine yourself")
    rpc_timeout: int | None = noticed(None, help="Ray's timeout.", notice="backend_timeout limits collectives")
    val_batch_size: int | None = noticed(
        None, help="Prompts per evaluation batch.", notice="eval_samples is the number"
    )
    hydra: dict[str, Any] | None = noticed(None, help="Hydra's own section.", notice="Hydra is not used here")
    reward_pretrain: str | None = noticed(
        None, help="Checkpoint of a reward model.", notice="rewards come from reward_function"
    )
    global_template: str | None = noticed(None, help="Chat template.", notice="prompts are used as their file has them")
    is_offload_states: bool = noticed(
        False, help="Move states to the host between roles.", notice="roles share one model, nothing is moved"
    )
    enable_reference: bool = noticed(
        False, help="Build the reference.", notice="the reference is built when use_kl_loss is true"
    )
    enable_old_logprobs_recompute: bool = noticed(
        True, help="Compute old log-probs.", notice="actor_train.logprob_plan decides"
    )
    kl_penalty: str | None = noticed(None, help="Estimator of add_token_level_kl.", notice="the KL loss uses k3")
    value_clip: float | None = noticed(None, help="Clip range of a critic.", notice="there is no critic")
    gamma: float = refused(1.0, help="Discount.", reason="rewards belong to whole responses; use 1")
    add_token_level_kl: bool = refused(
        False, help="Put the divergence into rewards.", reason="use use_kl_loss and kl_loss_coef instead"
    )
    init_kl_coef: float | None = noticed(
        None, help="Weight of add_token_level_kl.", notice="the divergence is weighted by kl_loss_coef"
    )
    whiten_rewards: bool = refused(False, help="Whiten rewards.", reason="use norm_mean_type and norm_std_type")
    difficulty_mask: bool = refused(
        False, help="Mask by difficulty.", reason="not supported; see drop_zero_advantage_groups"
    )
    difficulty_low_threshold: float | None = noticed(
        None, help="Bound of difficulty_mask.", notice="there is no such mask"
    )
    difficulty_high_threshold: float | None = noticed(
        None, help="Bound of difficulty_mask.", notice="there is no such mask"
    )
    error_max_len_clip: bool = refused(False, help="Clip overlong errors.", reason="not supported")
    difficulty_loss_weight: bool = refused(False, help="Weight by difficulty.", reason="not supported")
    length_loss_weight: bool = refused(False, help="Weight by length.", reason="not supported")
    async_generation_ratio: float = refused(
        0, help="Rollouts ahead of training.", reason="rollouts are synchronous; use 0"
    )
    critic: dict[str, Any] | None = refused(None, help="Role of the critic.", reason=CRITIC)
    critic_warmup: int = refused(0, help="Steps that train only the critic.", reason=CRITIC)
    teacher: dict[str, Any] | None = refused(None, help="Role of a teacher.", reason=DISTILLATION)
    student_train: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    student_infer: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    is_pure_opd: bool = refused(False, help="On-policy distillation.", reason=DISTILLATION)
    use_opd: bool = refused(False, help="On-policy distillation beside rewards.", reason=DISTILLATION)
    rewards: dict[str, Any] | None = refused(
        None, help="Reward roles.", reason="name one Python function in reward_function instead"
    )
    reward: dict[str, Any] | None = refused(
        None, help="Reward role.", reason="name one Python function in reward_function instead"
    )
    validation: dict[str, Any] | None = refused(
        None,
        help="Role of the evaluation.",
        reason="put the held-out file into actor_train.data_args.eval_file_name",
    )
    sft_train: dict[str, Any] | None = refused(
        None, help="Role of supervised training.", reason="write a warmup section and max_steps: 0 instead"
    )

    _notices: tuple[Notice, ...] = PrivateAttr(default=())
    _source: Source | None = PrivateAttr(default=None)

    @field_validator("system_envs", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return WorkerConfig._texts(value)

    @model_validator(mode="before")
    @classmethod
    def _empty_roles(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: {} if value is None and key in ROLES[:2] else value for key, value in data.items()}

    @model_validator(mode="after")
    def _resolve(self) -> JobConfig:
        from roll_batching.config.resolve import resolve_job

        for name, value in resolve_job(self).items():
            # The instance is frozen for its users, and not yet handed to any.
            object.__setattr__(self, name, value)
        return self

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Keys that do not do here what they do elsewhere, in the order of the file."""
        return self._notices

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The roles that this job has, by name."""
        present = {name: getattr(self, name) for name in ROLES}
        return {name: role for name, role in present.items() if role is not None}

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 the ratio may go."""
        if self.use_pg_clip_range:
            return self.pg_clip_low, self.pg_clip_high
        return self.pg_clip, self.pg_clip

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference; 0 when use_kl_loss is false."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0

    @property
    def group_size(self) -> int:
        """Responses per prompt."""
        return self.num_return_sequences_in_group or 1

    @property
    def world_size(self) -> int | None:
        """Processes that actor_train.device_mapping names; None when it names none."""
        mapping = self.actor_train.device_mapping
        return None if mapping is None else len(mapping)

    def dp_size(self, world_size: int) -> int:
        """Data-parallel ranks among `world_size` processes. Raises ConfigError when they do not divide."""
        layout = self.actor_train.strategy_args.strategy_config
        if world_size % layout.model_size:
            path = ("actor_train", "strategy_args", "strategy_config")
            raise ConfigFileError([Problem(path, misfit(world_size, layout))])
        return world_size // layout.model_size

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

    def check_runnable(self) -> None:
        """Raises ConfigFileError naming all that a run needs and this configuration leaves out."""
        from roll_batching.config.rules import missing_for_a_run

        problems = missing_for_a_run(self)
        if problems:
            source = self._source
            raise ConfigFileError([problem.placed(source.place) if source else problem for problem in problems])

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings as plain data, ready for YAML or JSON."""
        return self.model_dump(mode="json")


def misfit(world_size: int, layout: Any) -> str:
    """What to say when `world_size` processes do not divide into copies of `layout`."""
    tp, pp, cp = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
    )
    return (
        f"{world_size} processes do not divide into copies of TP {tp} x PP {pp} x CP {cp} = "
        f"{layout.model_size} ranks; "
        f"use a multiple of {layout.model_size} processes, or smaller sizes"
    )
