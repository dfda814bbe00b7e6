"""What a policy learns from: how rewards become advantages, and advantages a loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.settings.fields import RegisteredName, Settings, setting


class ObjectiveKeys(Settings):
    """The keys of advantages and of the policy's loss."""

    loss_function: Annotated[str, RegisteredName(LOSSES)] = setting(
        "policy", help="The loss of the RL phase; your own is a class (docs/custom-losses.md)."
    )
    loss_args: dict[str, Any] = setting(
        default_factory=dict, help="Settings of the loss's own, by name, checked by their types."
    )
    adv_estimator: Annotated[str, RegisteredName(ADVANTAGE_ESTIMATORS)] = setting(
        "grpo",
        help="How rewards become advantages; your own is a function of (rewards, group_size, *, response_tokens), "
        "float64, int and int64 of a reward domain's samples in the step, a prompt's side by side (response_tokens is "
        "0 for masked ones), which returns as many float64, the same on every rank.",
    )
    norm_mean_type: Literal["batch", "group", "running"] | None = setting(
        None,
        help="reinforce: the mean that is subtracted from rewards, of a reward domain in the step (batch) or in all "
        "steps so far (running). grpo always uses the group's.",
    )
    norm_std_type: Literal["batch", "group", "running"] | None = setting(
        None,
        help="reinforce: the deviation that rewards are divided by, of the same choices. grpo: default group.",
    )
    reward_norm: Literal["batch", "group", "running"] | None = setting(
        None,
        help="Short form, as ROLL had it: rewards minus the mean and over the deviation of the step, of the group or "
        "so far (norm_mean_type and norm_std_type both).",
    )
    reward_shift: bool = setting(False, help="With reward_norm: subtract the mean, do not divide.")
    reward_scale: bool = setting(
        False, help="With reward_norm: divide by the deviation, do not subtract. reward_shift goes before it."
    )
    whiten_advantages: bool = setting(
        False,
        help="Give the advantages of a reward domain's tokens in the step mean 0 and deviation 1 (REINFORCE++). Masked "
        "tokens do not count.",
    )
    reward_clip: float | None = setting(None, help="Clip rewards, once they are normalised, to [-x, x].", gt=0)
    advantage_clip: float | None = setting(None, help="Clip advantages to [-x, x].", gt=0)
    gamma: float = setting(
        1.0,
        help="Discount per token: a response's reward counts less for its earlier tokens. 1: the same for all.",
        gt=0,
        le=1,
    )
    add_token_level_kl: bool = setting(
        False,
        help="Subtract the divergence from the reference from each token's reward, which then counts for that token "
        "and those before it; needs the role `reference`.",
    )
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "k3"] = setting(
        "kl", help="Estimator of add_token_level_kl; kl is k1, mse is k2."
    )
    init_kl_coef: float = setting(
        0.2, help="Weight of add_token_level_kl, or its first value with target_kl (ROLL, verl: 0.2).", ge=0
    )
    target_kl: float | None = setting(
        None,
        help="Divergence per token that the weight of add_token_level_kl is steered to. Default: the weight is fixed.",
        gt=0,
    )
    kl_horizon: int = setting(10000, help="Samples in which that weight may change by a fifth.", ge=1)
    drop_zero_advantage_groups: bool = setting(
        False,
        help="Leave out of the computation the groups whose advantages are all 0; they still count in the loss.",
    )
    control: Literal["none", "shuffled"] = setting(
        "none", help="shuffled: advantages are shuffled among samples, a control that must not learn."
    )

    ppo_epochs: int = setting(1, help="Passes over a step's samples.", ge=1)
    pg_clip: float = setting(0.2, help="Clip range of the ratio, below and above, unless use_pg_clip_range.", gt=0)
    use_pg_clip_range: bool = setting(False, help="Use pg_clip_low and pg_clip_high instead of pg_clip.")
    pg_clip_low: float = setting(0.2, help="The ratio is clipped at 1 minus this; needs use_pg_clip_range.", gt=0)
    pg_clip_high: float = setting(0.2, help="The ratio is clipped at 1 plus this; needs use_pg_clip_range.", gt=0)
    importance_sampling: Literal["token", "seq", "seq-token"] = setting(
        "token",
        help="A ratio per token; one per sequence, the geometric mean of its tokens' (GSPO); or that value with each "
        "token's own gradient (GSPO-token).",
    )
    dual_clip_loss: bool = setting(
        False, help="Bound the loss of a negative advantage A at -dual_clip_ratio * A, whatever the ratio."
    )
    dual_clip_ratio: float | None = setting(
        None,
        help="The bound of dual_clip_loss, above 1: verl's clip_ratio_c, TRL's delta (two-sided clipping). Default: "
        "1 + 2 * pg_clip (ROLL).",
        gt=1,
    )
    max_len_mask: bool = setting(
        False,
        help="Leave out responses that were cut off at the length limit: they are not computed and count nowhere "
        "in the loss or in whitening. Their rewards still enter the statistics of their group and domain.",
    )
    difficulty_mask: bool = setting(
        False,
        help="Leave out the responses to a prompt whose mean reward, before anything shapes it, is not between the "
        "two bounds: they are not computed and count nowhere in the loss or in whitening.",
    )
    difficulty_low_threshold: float = setting(0.0, help="difficulty_mask: the mean reward must be above this.")
    difficulty_high_threshold: float = setting(1.0, help="difficulty_mask: the mean reward must be below this.")
    use_kl_loss: bool = setting(False, help="Add the divergence from the reference to the loss.")
    kl_loss_coef: float = setting(
        0.0, help="Weight of the divergence (loss_args.kl_estimator); needs use_kl_loss.", ge=0
    )
    kl_loss_bound: float | None = setting(
        10.0, help="Largest k3 per token, without gradient beyond (ROLL, verl: 10). ~: no bound.", gt=0
    )
    entropy_loss_coef: float = setting(0.0, help="Weight of the entropy bonus.", ge=0)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        setting(
            "token-mean",
            help="How tokens are averaged, over the whole mini-batch on all ranks. seq-mean-token-sum-norm: over "
            "loss_agg_length (Dr. GRPO); ROLL and verl do not divide it by the number of sequences.",
        )
    )
    loss_agg_length: int | None = setting(
        None, help="What seq-mean-token-sum-norm divides a sequence's sum by. Default: response_length.", ge=1
    )

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 the ratio may go."""
        if self.use_pg_clip_range:
            return self.pg_clip_low, self.pg_clip_high
        return self.pg_clip, self.pg_clip

    @property
    def advantages_of_tokens(self) -> bool:
        """Whether tokens of a response have advantages of their own."""
        return self.add_token_level_kl or self.gamma != 1

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference; 0 when use_kl_loss is false."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0
