"""Losses against the equivalent functions of peers on `waves.batch()`: value, norm and direction of the gradient.

The numbers were made once by running the peers' own functions in float64 on the same rows, padded: verl b178a3c
(verl/trainer/ppo/core_algos.py), ROLL 8eb27cc (roll/pipeline/rlvr/actor_pg_worker.py, and dpo/actor_worker.py),
NeMo-RL 7ea279a (nemo_rl/algorithms/loss/loss_functions.py), slime 624b824 (slime/utils/ppo_utils.py), TRL f2cd577
(trl/trainer/grpo_trainer.py, dpo_trainer.py and kto_trainer.py, the lines of their losses).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.waves import batch, figures

pytestmark = pytest.mark.loss

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
ENGINE = {"engine_ratio_min": 0.5, "engine_ratio_cap": 1.5}
GSPO = {"clip_low": 0.1, "clip_high": 0.15, "aggregation": "sequence_mean"}

PEERS: dict[str, tuple[str, dict[str, Any], tuple[float, float, float]]] = {
    "verl vanilla": (
        "PolicyLoss",
        {**CLIP, "dual_clip": 3.0},
        (-0.261035549033, 0.124863255226, 0.126211714937),
    ),
    "verl gspo": ("PolicyLoss", {**GSPO, "ratio": "sequence"}, (-0.108152003735, 0.0910102156814, 0.00756004237909)),
    "verl gspo by token": (
        "PolicyLoss",
        {**GSPO, "ratio": "sequence_token"},
        (-0.108152003735, 0.0910102156814, 0.00756004237909),
    ),
    "verl cispo": ("CISPOLoss", CLIP, (0.639689324083, 0.1549034717, 0.164507605166)),
    "verl cispo without lower bound": (
        "CISPOLoss",
        {"clip_low": 1.0, "clip_high": 0.3},
        (0.634911717897, 0.146856658879, 0.155801311874),
    ),
    "ROLL cispo": ("CISPOLoss", CLIP, (0.639689324083, 0.1549034717, 0.164507605166)),
    "ROLL tis": ("CISPOLoss", {"clip_low": 1.0, "clip_high": 0.0}, (0.529068499181, 0.123242656991, 0.130907336607)),
    "ROLL topr": (
        "TOPRLoss",
        {"positive_weight": 1.5, "negative_weight": 0.7},
        (0.459923380544, 0.134968859265, 0.142703242611),
    ),
    "verl sapo": ("SAPOLoss", {"aggregation": "sequence_mean"}, (-0.244416297856, 0.143603415363, 0.17139408065)),
    "verl gpg": ("GPGLoss", {}, (0.555203879757, 0.142610090467, 0.135734977844)),
    "verl geo_mean": (
        "GMPOLoss",
        {"clip_low": 0.4, "clip_high": 0.5, "aggregation": "sequence_mean"},
        (-0.0558400867786, 0.117742742685, 0.168691573005),
    ),
    "TRL delta": ("PolicyLoss", {**CLIP, "dual_clip": 1.5}, (-0.312517365475, 0.0885295315252, 0.0605490287993)),
    "NeMo-RL tis": (
        "PolicyLoss",
        {**CLIP, "engine_ratio_cap": 1.5},
        (-0.32393461427, 0.113523986103, 0.112239575317),
    ),
    "NeMo-RL tis with a lower bound": (
        "PolicyLoss",
        {**CLIP, **ENGINE},
        (-0.327404244788, 0.113876295093, 0.112537225914),
    ),
    "NeMo-RL icepop": (
        "PolicyLoss",
        {**CLIP, **ENGINE, "engine_correction": "mask"},
        (-0.249039734052, 0.0825904725022, 0.0648379368988),
    ),
    "NeMo-RL seq-mask-tis": (
        "PolicyLoss",
        {**CLIP, "engine_ratio_min": 0.9, "engine_ratio_cap": 1.1, "engine_correction": "mask_sequences"},
        (-0.309205343006, 0.0613520975641, 0.0179634976098),
    ),
    "NeMo-RL KL": (
        "PolicyLoss",
        {**CLIP, "kl_coef": 0.3, "kl_gradient": "score_function"},
        (-0.201628707402, 0.128633664324, 0.13654111179),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_losses_give_the_peers_numbers(name: str) -> None:
    import roll_batching.losses

    loss, options, expected = PEERS[name]
    assert figures(getattr(roll_batching.losses, loss)(**options)) == pytest.approx(expected, rel=1e-8)


def test_gspo_with_advantages_of_tokens_weights_each_tokens_own_gradient() -> None:
    from roll_batching.losses import PolicyLoss

    data = batch()
    data = data.with_fields({"advantages": data["token_advantages"]}, {"advantages": "token"})
    of_verl = (0.116311437739, 0.101538045806, -0.0337510108995)
    assert figures(PolicyLoss(**GSPO, ratio="sequence_token"), data) == pytest.approx(of_verl, rel=1e-8)
    assert figures(PolicyLoss(**GSPO, ratio="sequence"), data)[1:] != pytest.approx(of_verl[1:], rel=1e-2)


DIVERGENCES = {
    # verl's kl_penalty, the mean over tokens; its k1+, k3+ and abs+ put together as its docstring says, since the
    # function refuses these names at this commit.
    ("k1", "value"): (-0.0327761334596, 0.174077655956, 0.0301072276948),
    ("k2", "value"): (0.181359618829, 0.104840316912, 0.0344313229819),
    ("k3", "value"): (0.198022805235, 0.133860013038, 0.0199329294649),
    ("abs", "value"): (0.489371977658, 0.174077655956, 0.0949680416862),
    ("k1", "straight_through"): (-0.0327761334596, 0.104840316912, 0.0344313229819),
    ("k3", "straight_through"): (0.198022805235, 0.104840316912, 0.0344313229819),
    ("abs", "straight_through"): (0.489371977658, 0.104840316912, 0.0344313229819),
    # TRL with use_bias_correction_kl, and slime's compute_approx_kl with importance_ratio.
    ("k3", "importance"): (0.182021071653, 0.138502120721, 0.00293268244518),
}


@pytest.mark.parametrize(("estimator", "gradient"), DIVERGENCES)
def test_divergences_give_the_peers_numbers(estimator: Any, gradient: Any) -> None:
    """The KL penalty alone: a loss without advantages."""
    from roll_batching.losses import PolicyLoss

    data = batch()
    data = data.with_fields({"advantages": 0 * data["advantages"]}, {"advantages": "sample"})
    loss = PolicyLoss(kl_coef=1.0, kl_estimator=estimator, kl_gradient=gradient)
    assert figures(loss, data) == pytest.approx(DIVERGENCES[estimator, gradient], rel=1e-8)


PAIRED = [[0, 5, 1, 7], [4, 3, 2, 6]]
SFT = {"sft_coef": 0.2}
PREFERENCES: dict[str, tuple[str, dict[str, Any], tuple[float, float, float]]] = {
    "ROLL": ("DPOLoss", {"label_smoothing": 0.1}, (0.520899752567, 0.117095319447, -0.00778597857603)),
    "ROLL ipo": ("IPOLoss", {}, (0.778159570608, 2.53457923563, 0.675854064719)),
    "TRL ipo": ("IPOLoss", {"average_log_probs": True}, (1.47233209831, 0.91832912104, 0.136250405888)),
    "NeMo-RL": ("DPOLoss", {}, (0.466805799346, 0.159401837813, -0.0131931263101)),
    "NeMo-RL averaged": (
        "DPOLoss",
        {"average_log_probs": True},
        (0.623217164474, 0.0533925234068, 0.00739512962041),
    ),
    "NeMo-RL with SFT": ("DPOLoss", SFT, (1.92755833803, 0.320345050361, -0.0560554149413)),
    "NeMo-RL with SFT, both averaged": (
        "DPOLoss",
        {**SFT, "sft_average_log_probs": True, "average_log_probs": True},
        (1.01660408502, 0.101705574475, -0.00880849636177),
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_give_the_peers_numbers(name: str) -> None:
    import roll_batching.losses

    loss, options, expected = PREFERENCES[name]
    found = figures(getattr(roll_batching.losses, loss)(beta=0.3, **options), bins=PAIRED)
    assert found == pytest.approx(expected, rel=1e-8)


POINT = 0.682342676424867
"""The reference point of `tests/losses/test_unpaired.py`."""
UNPAIRED: dict[str, tuple[float, dict[str, float], tuple[float, float, float]]] = {
    "TRL": (POINT, {}, (0.433987794069, 0.0513528417583, -0.00904452130648)),
    "TRL, weighted": (POINT, {"undesirable_weight": 1.5}, (0.527511731098, 0.0662012020542, -0.00896042268568)),
    "TRL apo_zero_unpaired": (0.0, {}, (0.433588320862, 0.0519947061045, -0.00896899678994)),
}


@pytest.mark.parametrize("name", UNPAIRED)
def test_kto_gives_the_peers_numbers(name: str) -> None:
    from roll_batching.losses import KTOLoss

    point, options, expected = UNPAIRED[name]
    data = batch()
    fields = {"desirable": data["chosen"], "reference_point": torch.full((len(data),), point, dtype=torch.float64)}
    data = data.with_fields(fields, dict.fromkeys(fields, "sample"))
    assert figures(KTOLoss(beta=0.3, **options), data) == pytest.approx(expected, rel=1e-8)
