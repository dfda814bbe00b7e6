"""Keys of distillation, in ROLL's names where ROLL has one."""

from __future__ import annotations

from roll_batching.checked_fields import Positive, Share
from roll_batching.settings.fields import Settings, setting
from roll_batching.settings.losses import DistillObjective, InnerShare


class DistillKeys(Settings):
    """The keys of the loss `distill` and of its teacher."""

    logits_topk: int = setting(
        64, help="distill: likely tokens of the teacher at each position that are compared; 0: the vocabulary.", ge=0
    )
    kd_objective: DistillObjective = setting(
        "forward_kl",
        help="distill: the divergence, with the teacher's p and the student's q. forward_kl: KL(p, q). reverse_kl: "
        "KL(q, p). mixed_kl: both (mixed_kl_weight). js_divergence: of both from their mean. skewed_*: from a mixture "
        "(skew_lambda). adaptive_kl: both, weighted by where p and q differ (adaptive_kl_alpha).",
    )
    mixed_kl_weight: Share = setting(
        0.5, help="mixed_kl: weight of the forward divergence; the reverse one has the rest."
    )
    skew_lambda: InnerShare = setting(
        0.1,
        help="skewed_forward_kl: p is compared with skew_lambda p + (1 - skew_lambda) q; skewed_reverse_kl: q with "
        "skew_lambda p + (1 - skew_lambda) q.",
    )
    adaptive_kl_alpha: InnerShare = setting(
        0.5, help="adaptive_kl: probability of the teacher's least likely tokens, its tail."
    )
    kd_temperature: Positive = setting(1.0, help="distill: divides the logits of teacher and student.")
    teacher_temperature: Positive = setting(1.0, help="distill: divides the logits of the teacher as well.")
    distill_loss_weight: Share = setting(
        1.0,
        help="distill: weight of the divergence; the negative log-likelihood of the texts has the rest (ROLL: 0.5). "
        "Under task: distill 1, as the student's own tokens are no target.",
    )
    zero_outside_topk: bool = setting(
        False,
        help="distill: the student's distribution over the whole vocabulary, and the teacher's with a log-probability "
        "of -100 beyond its logits_topk tokens (NeMo-RL). Default: both are renormalised over these tokens.",
    )
