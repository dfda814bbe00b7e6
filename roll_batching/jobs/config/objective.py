"""Keys of advantages and of the policy loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from roll_batching.checked_fields import NotNegative, OptionalPositive, Positive, PositiveShare, Share
from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, GAE
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.settings.fields import RegisteredName, Settings, setting
from roll_batching.settings.losses import DualClip
from roll_batching.settings.train_infer import TrainInferCorrection


class ObjectiveKeys(Settings):
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
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
    ] = setting(
        "token-mean",
        help="How tokens are averaged, over the whole mini-batch on all ranks. seq-mean-token-sum-norm: the mean over "
        "sequences of their sums over loss_agg_length (Dr. GRPO, verl). token-sum: the sum of all tokens over "
        "loss_agg_length, whatever their number of sequences (ROLL's seq-mean-token-sum-norm).",
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

    @property
    def advantages_of_tokens(self) -> bool:
        """Whether advantages differ between the tokens of a response."""
        return self.add_token_level_kl or self.gamma != 1 or self.adv_estimator == GAE

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference; 0 when use_kl_loss is false."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0
