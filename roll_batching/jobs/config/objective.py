"""Keys of advantages and of the policy loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from roll_batching.checked_fields import NotNegative, OptionalPositive, Positive, PositiveShare, Share
from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, GAE
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.settings.fields import ADVANTAGES, ROLLOUTS, RegisteredName, Settings, Switch, setting
from roll_batching.settings.losses import DualClip
from roll_batching.settings.train_infer import TrainInferCorrection

_CONSTANT = ("seq-mean-token-sum-norm", "token-sum")
"""Values of loss_agg_mode with a fixed divisor."""
_KL = Switch(lambda job: job.add_token_level_kl, "add_token_level_kl is false")
_NORM = Switch(lambda job: job.norms_of_reward_norm, "it modifies reward_norm, which is not in effect")
_READ_IF = {
    "*": ROLLOUTS,
    "loss_function loss_args": (),
    "adv_estimator norm_mean_type norm_std_type whiten_advantages reward_clip advantage_clip gamma": ADVANTAGES,
    "episode_reward_weight step_reward_weight step_reward_gamma": ADVANTAGES,
    "reward_norm": (ADVANTAGES, Switch(lambda job: job.norms_of_reward_norm, "{0.adv_estimator} does not read it")),
    "reward_shift": (ADVANTAGES, _NORM),
    "reward_scale": (ADVANTAGES, _NORM, Switch(lambda job: not job.reward_shift, "reward_shift takes precedence")),
    "lambd value_clip critic_warmup critic_epochs": (
        ADVANTAGES,
        Switch(lambda job: job.adv_estimator == GAE, "adv_estimator is {0.adv_estimator}, not gae"),
        Switch(lambda job: job.max_steps, "max_steps is 0"),
    ),
    "add_token_level_kl": (
        ROLLOUTS,
        Switch(lambda job: job.init_kl_coef, "init_kl_coef is 0, and target_kl only scales it"),
    ),
    "kl_penalty init_kl_coef target_kl": (ADVANTAGES, _KL),
    "kl_horizon": (
        ADVANTAGES,
        _KL,
        Switch(lambda job: job.target_kl is not None, "without target_kl the weight is fixed"),
    ),
    "drop_zero_advantage_groups": (
        ROLLOUTS,
        Switch(lambda job: not job.dynamic_sampling, "dynamic_sampling leaves no group with equal rewards"),
    ),
    "pg_clip": Switch(
        lambda job: not job.use_pg_clip_range or (job.dual_clip_loss and job.sets_field_of_loss("dual_clip")),
        "use_pg_clip_range takes pg_clip_low and pg_clip_high",
    ),
    "pg_clip_low pg_clip_high": Switch(lambda job: job.use_pg_clip_range, "set use_pg_clip_range: true, or pg_clip"),
    "dual_clip_ratio": Switch(lambda job: job.dual_clip_loss, "dual_clip_loss is false"),
    "difficulty_low_threshold difficulty_high_threshold": (
        ROLLOUTS,
        Switch(lambda job: job.difficulty_mask, "difficulty_mask is false"),
    ),
    "use_kl_loss": Switch(lambda job: job.kl_loss_coef, "kl_loss_coef is 0"),
    "kl_loss_coef": Switch(lambda job: job.use_kl_loss, "use_kl_loss is false"),
    "loss_agg_length": Switch(
        lambda job: job.loss_agg_mode in _CONSTANT, f"loss_agg_mode is neither of {' and '.join(_CONSTANT)}"
    ),
}


class ObjectiveKeys(Settings, read_if=_READ_IF):
    """The keys of advantages and of the policy loss."""

    loss_function: Annotated[str, RegisteredName(LOSSES)] = setting(
        "policy", help="The loss of the RL phase; your own is a class (docs/custom-losses.md)."
    )
    loss_args: dict[str, Any] = setting(
        default_factory=dict, help="Further settings of the loss, by name, checked against their types."
    )
    adv_estimator: Annotated[str, RegisteredName(ADVANTAGE_ESTIMATORS)] = setting(
        "grpo",
        help="How rewards become advantages; your own is a function (rewards, group_size, *, response_tokens). rewards "
        "(float64) and response_tokens (int64, 0 for masked samples) have one entry per sample of a reward domain in "
        "the step, the responses to a prompt next to each other. It returns as many float64, the same on every rank.",
    )
    norm_mean_type: Literal["batch", "group", "running"] | None = setting(
        None,
        help="reinforce: the mean subtracted from rewards: of the group, of a reward domain in the step (batch) or in "
        "all steps so far (running). grpo always uses the group's.",
    )
    norm_std_type: Literal["batch", "group", "running"] | None = setting(
        None,
        help="reinforce: the deviation that rewards are divided by, with the same choices. grpo: default group.",
    )
    reward_norm: Literal["batch", "group", "running"] | None = setting(
        None,
        help="ROLL's former short form of norm_mean_type and norm_std_type, both with this value.",
    )
    reward_shift: bool = setting(False, help="With reward_norm: subtract the mean, do not divide.")
    reward_scale: bool = setting(
        False, help="With reward_norm: divide by the deviation, do not subtract. reward_shift takes precedence."
    )
    whiten_advantages: bool = setting(
        False,
        help="Normalise the advantages over the tokens of a reward domain in the step to mean 0 and deviation 1 "
        "(REINFORCE++). Masked tokens do not count.",
    )
    reward_clip: OptionalPositive = setting(None, help="Clip normalised rewards to [-x, x].")
    advantage_clip: OptionalPositive = setting(None, help="Clip advantages to [-x, x].")
    episode_reward_weight: NotNegative = setting(1.0, help="gigpo: weight of the advantages of episodes.")
    step_reward_weight: NotNegative = setting(1.0, help="gigpo: weight of the advantages of turns in equal states.")
    step_reward_gamma: Share = setting(0.95, help="gigpo: discount per turn of the rewards that follow a turn.")
    gamma: PositiveShare = setting(
        1.0,
        help="Discount per token: the reward of a response counts less for earlier tokens. 1: equally for all.",
    )
    lambd: Share = setting(
        0.95,
        help="gae: weight of the values further on, the lambda of generalised advantage estimation. 1: rewards alone, "
        "minus the critic's value. 0: the next value alone.",
    )
    value_clip: OptionalPositive = setting(
        None,
        help="gae: values are clipped to this distance from the old ones in the critic's loss. Default: no clip.",
    )
    critic_warmup: int = setting(0, help="gae: RL steps at the beginning in which only the critic is trained.", ge=0)
    critic_epochs: int = setting(1, help="gae: passes of the critic over a step's samples.", ge=1)
    add_token_level_kl: bool = setting(
        False,
        help="Subtract the KL divergence from the reference from each token's reward, which counts for that token and "
        "those before it; needs the role `reference`.",
    )
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "k3"] = setting(
        "kl", help="Estimator of add_token_level_kl; kl is k1, mse is k2."
    )
    init_kl_coef: NotNegative = setting(
        0.2, help="Weight of add_token_level_kl, or its first value with target_kl (ROLL, verl: 0.2)."
    )
    target_kl: OptionalPositive = setting(
        None,
        help="Target of the divergence per token, to which the weight of add_token_level_kl adapts. Default: a fixed "
        "weight.",
    )
    kl_horizon: int = setting(10000, help="Samples over which that weight may change by a fifth.", ge=1)
    drop_zero_advantage_groups: bool = setting(
        False,
        help="Do not compute groups whose advantages are all 0; they still count in the loss.",
    )
    control: Literal["none", "shuffled"] = setting(
        "none", help="shuffled: shuffle advantages among samples, a control experiment that must not learn."
    )

    train_infer_correction: TrainInferCorrection | None = setting(
        None,
        help="Weights and filters by the mismatch of p_infer, with which the sampler sampled a token, and p_train, the "
        "trainer's with the same weights (docs/train-infer-mismatch.md). Default: none.",
    )

    ppo_epochs: int = setting(1, help="Passes over a step's samples.", ge=1)
    pg_clip: Positive = setting(0.2, help="Clip range of the ratio, below and above, unless use_pg_clip_range.")
    use_pg_clip_range: bool = setting(False, help="Use pg_clip_low and pg_clip_high instead of pg_clip.")
    pg_clip_low: Positive = setting(0.2, help="The ratio is clipped at 1 minus this; needs use_pg_clip_range.")
    pg_clip_high: Positive = setting(0.2, help="The ratio is clipped at 1 plus this; needs use_pg_clip_range.")
    importance_sampling: Literal["token", "seq", "seq-token"] = setting(
        "token",
        help="A ratio per token; one per sequence, the geometric mean of its tokens' (GSPO); or that value with each "
        "token's own gradient (GSPO-token).",
    )
    dual_clip_loss: bool = setting(
        False, help="Limit the loss of a negative advantage A to -dual_clip_ratio * A, whatever the ratio."
    )
    dual_clip_ratio: DualClip = setting(
        None,
        help="The limit of dual_clip_loss, above 1: verl's clip_ratio_c, TRL's delta (two-sided clipping). Default: "
        "1 + 2 * pg_clip (ROLL).",
    )
    max_len_mask: bool = setting(
        False,
        help="Mask responses that were truncated at the length limit: they are not computed and do not count in the "
        "loss or in whitening. Their rewards still enter the statistics of their group and domain.",
    )
    difficulty_mask: bool = setting(
        False,
        help="Mask the responses to a prompt whose mean reward, before normalisation, is not between the two "
        "thresholds: they are not computed and do not count in the loss or in whitening.",
    )
    difficulty_low_threshold: float = setting(0.0, help="difficulty_mask: the mean reward must be above this.")
    difficulty_high_threshold: float = setting(1.0, help="difficulty_mask: the mean reward must be below this.")
    use_kl_loss: bool = setting(False, help="Add the KL divergence from the reference to the loss.")
    kl_loss_coef: NotNegative = setting(
        0.0, help="Weight of the divergence (loss_args.kl_estimator); needs use_kl_loss."
    )
    kl_loss_bound: OptionalPositive = setting(
        10.0, help="Upper limit of k3 per token, without gradient above (ROLL, verl: 10). ~: no limit."
    )
    entropy_loss_coef: NotNegative = setting(0.0, help="Weight of the entropy bonus.")
    loss_agg_mode: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "token-sum",
        "rollout-mean",
        "rollout-token-mean",
    ] = setting(
        "token-mean",
        help="How tokens are averaged, over the whole mini-batch on all ranks. seq-mean-token-sum-norm: the mean over "
        "sequences of their sums over loss_agg_length (Dr. GRPO, verl). token-sum: the sum of all tokens over "
        "loss_agg_length, whatever their number of sequences (ROLL's seq-mean-token-sum-norm). rollout-mean: every "
        "rollout counts once, however many samples a rollout_function makes of it, as the mean of its samples' means "
        "over tokens; rollout-token-mean: as the mean over the tokens of all its samples (slime, miles).",
    )
    loss_agg_length: int | None = setting(
        None,
        help="Divisor of a sum under seq-mean-token-sum-norm (default: response_length) and token-sum (default: 1).",
        ge=1,
    )

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip range of the ratio, below and above 1."""
        if self.use_pg_clip_range:
            return self.pg_clip_low, self.pg_clip_high
        return self.pg_clip, self.pg_clip

    def sets_field_of_loss(self, name: str) -> bool:
        """Whether keys of the job set the field `name` of its registered loss."""
        loss = LOSSES.get(self.loss_function)
        return loss is not None and name in loss.keys

    @property
    def norms_of_reward_norm(self) -> dict[str, str | None]:
        """`norm_mean_type` and `norm_std_type` for `reward_norm`; empty where the estimator reads no norm.

        Source: ROLL's `reward_postprocess` before its commit 7b97eef8, which introduced the two keys.
        """
        estimator = ADVANTAGE_ESTIMATORS.get(self.adv_estimator)
        if self.reward_norm is None or estimator is None or "norm_mean_type" not in estimator.keys:
            return {}
        scaled_only = self.reward_scale and not self.reward_shift
        return {
            "norm_mean_type": None if scaled_only else self.reward_norm,
            "norm_std_type": None if self.reward_shift else self.reward_norm,
        }

    @property
    def advantages_of_tokens(self) -> bool:
        """Whether advantages differ between the tokens of a response."""
        return self.add_token_level_kl or self.gamma != 1 or self.adv_estimator == GAE

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference; 0 when use_kl_loss is false."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0
