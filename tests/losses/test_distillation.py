"""Distillation over a teacher's likely tokens: NeMo-RL's and ROLL's numbers, formulas, candidates, and wrong input.

The numbers were made once by running NeMo-RL's `DistillationLossFn` and ROLL's `VariousDivergence`, unchanged, on the
logits below, on the counted positions of `waves.batch()`. ROLL computes in fp32 and adds 1e-9 inside js_divergence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_batching.errors import DataError, LossError
from roll_batching.losses import token_log_probs
from roll_batching.losses.contract import loss_spec
from roll_batching.losses.distillation import DistillLoss
from roll_batching.losses.vocabulary import top_log_probs
from roll_batching.samples.token_fields import counted_positions
from tests.losses import waves
from tests.losses.formulas import BINS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

VOCABULARY, K = 11, 5
TOKENS = sum(waves.LENGTHS)

ROLL = {
    ("forward_kl", 1.0, 1.0): (0.4459907234, 0.0734283148, 0.4118429550),
    ("forward_kl", 2.0, 0.7): (0.1504526636, 0.0217291858, 0.1181474974),
    ("reverse_kl", 1.0, 1.0): (0.4513812194, 0.0759947975, 0.3218950333),
    ("reverse_kl", 2.0, 0.7): (0.1625505523, 0.0245273903, 0.1197029177),
    ("adaptive_kl", 1.0, 1.0): (0.4506381319, 0.0733646288, 0.3676717629),
    ("adaptive_kl", 2.0, 0.7): (0.1561178861, 0.0228911828, 0.1184951290),
    ("skewed_forward_kl", 1.0, 1.0): (0.1929993313, 0.0292584470, 0.1327703658),
    ("skewed_forward_kl", 2.0, 0.7): (0.0737479994, 0.0104527806, 0.0529679655),
    ("skewed_reverse_kl", 1.0, 1.0): (0.1922503586, 0.0288219037, 0.1400416190),
    ("skewed_reverse_kl", 2.0, 0.7): (0.0725647031, 0.0101836289, 0.0528243490),
    ("js_divergence", 1.0, 1.0): (0.1011375753, 0.0154651037, 0.0736925303),
    ("js_divergence", 2.0, 0.7): (0.0377372338, 0.0053670128, 0.0275994090),
}
"""By objective, kd_temperature and teacher_temperature: the mean, its gradient's norm and product with a wave."""
NEMO_RL = {
    ("forward_kl", False): (0.4459907308, 0.0734283138, 0.4118429504),
    ("forward_kl", True): (1.3033004273, 0.0800530586, 0.5263170424),
    ("reverse_kl", False): (0.4513812067, 0.0759947975, 0.3218950340),
    ("reverse_kl", True): (50.8532700340, 2.8300738187, -0.3221192471),
    ("mixed_kl", False): (0.4497640639, 0.0738437505, 0.3488794089),
    ("mixed_kl", True): (35.9882791520, 1.9933805281, -0.0675883603),
}
"""By objective and zero_outside_topk; the weight of mixed_kl is 0.3."""


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """([tokens, VOCABULARY] of the teacher, of the student)."""
    teacher, student = (waves.wave(k, s, n=TOKENS * VOCABULARY) for k, s in ((0.61, 2.0), (0.37, 1.5)))
    return teacher.view(TOKENS, VOCABULARY), student.view(TOKENS, VOCABULARY)


def taught(k: int = K, teacher_temperature: float = 1.0) -> Any:
    values, ids = (logits()[0] / teacher_temperature).log_softmax(-1).topk(k, -1)
    fields = {"teacher_log_probs": values, "teacher_ids": ids.int()}
    return waves.batch().with_fields(fields, dict.fromkeys(fields, "next_token"))


def figures(loss: DistillLoss, data: Any, bins: list[list[int]] = BINS) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, gradient by the student's logits, metrics) over the micro-batches `bins`, through real packs and views."""
    from roll_batching.losses.contract import as_numbers, join_parts, to_host
    from roll_batching.losses.denominators import local_counts
    from roll_batching.losses.views import TokenView
    from roll_batching.packing.batch import pack_step
    from roll_batching.planning import Plan, PlanConstraints

    spec = loss_spec(loss)
    plan = Plan.from_bins([bins], data.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=64), ids=data.ids.numpy())
    packs = pack_step(data, plan, dp_rank=0, device=torch.device("cpu"), masks=spec.masks)
    assert spec.check is not None
    spec.check(data, [data.rows_of(pack.ids).numpy() for pack in packs if pack.samples])
    counts, leaf = local_counts(data, spec.masks, spec.sums), logits()[1].requires_grad_()
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for pack in packs:
        if not pack.samples:
            continue
        source = torch.from_numpy(pack.layout.source(data.offsets[data.rows_of(pack.ids)].numpy()))
        several = torch.cat([pack.labels[:, None] % VOCABULARY, pack.fields["teacher_ids"].long()], 1)
        values, entropy = token_log_probs(leaf[source], several, rows=pack.head_tokens, entropy=True)
        view = TokenView(pack, counts, log_probs=values[:, 0], entropy=entropy, candidate_log_probs=values[:, 1:])
        output = loss.token_loss(view)
        total = total + output.loss
        metrics.append(output.metrics)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient, as_numbers(join_parts([to_host([], metrics)[1]]))


def three(loss: DistillLoss, data: Any) -> tuple[float, float, float]:
    value, gradient, _ = figures(loss, data)
    return value, float(gradient.norm()), float(gradient.flatten() @ waves.wave(0.37, n=gradient.numel()))


@pytest.mark.parametrize("case", ROLL, ids=str)
def test_the_loss_is_rolls(case: tuple[Any, ...]) -> None:
    objective, temperature, of_teacher = case
    loss = DistillLoss(objective=objective, temperature=temperature, skew=0.3, adaptive_share=0.4)
    assert three(loss, taught(teacher_temperature=of_teacher)) == pytest.approx(ROLL[case], rel=1e-6)


@pytest.mark.parametrize("case", NEMO_RL, ids=str)
def test_the_loss_is_nemo_rls(case: tuple[Any, ...]) -> None:
    objective, zero = case
    loss = DistillLoss(objective=objective, zero_outside_topk=zero, mixed_weight=0.3)
    assert three(loss, taught()) == pytest.approx(NEMO_RL[case], rel=1e-6)


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "mixed_kl", "js_divergence"])
@pytest.mark.parametrize("weight", [1.0, 0.6, 0.0])
def test_the_loss_and_its_gradient_are_the_formula_s(objective: str, weight: float) -> None:
    """Over the whole vocabulary, with the likelihood of the tokens; one token mean over all micro-batches."""
    loss = DistillLoss(objective=objective, weight=weight, mixed_weight=0.2, temperature=1.3)
    data, (teacher, student) = taught(VOCABULARY), logits()
    leaf, counted = student.requires_grad_(), counted_positions(data)
    p, q = (teacher / 1.3).log_softmax(-1), (leaf / 1.3).log_softmax(-1)
    m = torch.log((p.exp() + q.exp()) / 2)
    forward, reverse = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    shannon = ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2
    of = {"forward_kl": forward, "reverse_kl": reverse, "mixed_kl": 0.2 * forward + 0.8 * reverse}
    labels = data["input_ids"].roll(-1)[:, None] % VOCABULARY
    likelihood = -leaf.log_softmax(-1).gather(1, labels)[:, 0]
    expected = (weight * of.get(objective, shannon) + (1 - weight) * likelihood)[counted].mean()
    (gradient,) = torch.autograd.grad(expected, leaf)
    value, found, metrics = figures(loss, data)
    assert value == pytest.approx(float(expected.detach()), rel=1e-12)
    assert float((found - gradient).norm() / gradient.norm()) < 1e-12
    assert metrics["teacher_mass"] == pytest.approx(1, rel=1e-12)
    if weight < 1:
        assert metrics["sft_loss"] == pytest.approx(float(likelihood[counted].mean().detach()), rel=1e-12)


def test_equal_models_have_no_divergence_and_no_gradient() -> None:
    values, ids = logits()[1].log_softmax(-1).topk(K, -1)
    fields = {"teacher_log_probs": values, "teacher_ids": ids.int()}
    data = waves.batch().with_fields(fields, dict.fromkeys(fields, "next_token"))
    for objective in ("forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "adaptive_kl"):
        value, gradient, _ = figures(DistillLoss(objective=objective), data)
        assert abs(value) < 1e-12 and float(gradient.abs().max()) < 1e-12


def test_partitions_into_micro_batches_do_not_matter() -> None:
    loss = DistillLoss(objective="mixed_kl", zero_outside_topk=True)
    value, gradient, _ = figures(loss, taught())
    other, theirs, _ = figures(loss, taught(), [[6, 1], [0, 3, 7], [2], [4, 5]])
    assert other == pytest.approx(value, rel=1e-12) and torch.allclose(gradient, theirs, rtol=1e-10, atol=1e-14)


# ---- log-probs of several labels, and the most likely tokens


ROWS, HIDDEN, REAL, PADDED = 23, 12, 61, 64


def head(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=g, dtype=torch.float64)
    weight[REAL:] = 30.0  # columns that stand for no token
    labels = torch.randint(0, REAL, (ROWS, 4), generator=g)
    labels[5, 2] = labels[5, 0]  # twice in a row
    return hidden.to(dtype), weight.to(dtype), labels


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3, 11, 22])])
@pytest.mark.parametrize("chunk", [None, 5])
def test_several_labels_are_log_softmax_s(deferred: bool, rows: torch.Tensor | None, chunk: int | None) -> None:
    hidden, weight, labels = head(torch.float64)
    keep = torch.ones(ROWS) if rows is None else torch.zeros(ROWS).index_fill(0, rows, 1)
    upstream = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * keep[:, None]
    gradients = []
    for plain in (True, False):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        whole = leaves[0] @ leaves[1].T
        if plain:
            log_p = (whole[:, :REAL] / 0.7).log_softmax(-1)
            values, entropy = log_p.gather(1, labels), -(log_p.exp() * log_p).sum(-1)
        else:
            source = leaves[0] if deferred else whole
            values, entropy = token_log_probs(  # type: ignore[assignment]
                source, labels, weight=leaves[1] if deferred else None, rows=rows, vocab_size=REAL, temperature=0.7,
                entropy=True, chunk=chunk,
            )  # fmt: skip
        total = (values * upstream[:, :4]).sum() + (entropy * upstream[:, 4]).sum()
        gradients.append((total.detach(), *torch.autograd.grad(total, leaves)))
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("k", [1, 6, REAL])
def test_the_most_likely_tokens_are_topk_s(deferred: bool, k: int, monkeypatch) -> None:
    from roll_batching.losses import vocab_parallel

    hidden, weight, _ = head(torch.float64)
    rows = torch.tensor([2, 3, 17])
    log_p = (hidden @ weight.T)[:, :REAL].div(0.7).log_softmax(-1)
    for size in (4 << 20, 512):  # one tile, and many
        monkeypatch.setitem(vocab_parallel.TILE_BYTES, "cpu", size)
        monkeypatch.setattr(vocab_parallel, "TILE_COLUMNS", 8)
        source = hidden if deferred else hidden @ weight.T
        options = {"weight": weight if deferred else None, "rows": rows, "vocab_size": REAL, "temperature": 0.7}
        values, ids = top_log_probs(source, k, **options)
        assert torch.equal(ids[rows], log_p[rows].topk(k).indices)
        assert torch.allclose(values[rows], log_p[rows].topk(k).values, rtol=1e-12)
        others = [row for row in range(ROWS) if row not in rows.tolist()]
        assert not values[others].any() and not ids[others].any()
        assert top_log_probs(source, k, **(options | {"rows": rows[:0]}))[0].shape == (ROWS, k)


def shards(k: int) -> float:
    """On a rank: the difference from the whole vocabulary's, of values and ids."""
    import torch.distributed as dist

    from roll_batching.distributed.parallel_layout import start_processes

    start_processes()
    hidden, weight, _ = head(torch.float64)
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    rows = torch.arange(ROWS)
    found = top_log_probs(hidden, k, weight=part, rows=rows, vocab_size=REAL, tp_group=dist.group.WORLD)
    whole = top_log_probs(hidden, k, weight=weight, rows=rows, vocab_size=REAL)
    return float((found[0] - whole[0]).abs().max()) + float((found[1] - whole[1]).abs().max())


@pytest.mark.parametrize("k", [4, 40])
def test_the_most_likely_tokens_of_vocabulary_shards(k: int) -> None:
    """40 tokens are more than a shard of 16 has."""
    assert max(run_ranks(4, "tests.losses.test_distillation:shards", k)) < 1e-12


# ---- wrong input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": "kl"}, "objective is 'kl'"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"mixed_weight": -0.1}, "mixed_weight is -0.1"),
        ({"skew": 0.0}, "skew is 0.0"),
        ({"adaptive_share": 1.0}, "adaptive_share is 1.0"),
        ({"objective": "js_divergence", "zero_outside_topk": True}, "zero_outside_topk is for forward_kl"),
        ({"temperature": 2.0, "zero_outside_topk": True}, "zero_outside_topk has no temperature"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(LossError, match=words):
        DistillLoss(**settings)


@pytest.mark.bad_input
def test_fields_of_the_teacher_that_cannot_be_are_refused() -> None:
    data = taught()
    broken = data["teacher_log_probs"].clone()
    at = int(counted_positions(data).nonzero()[3, 0])
    broken[at, 1] = float("nan")
    spoilt = data.with_fields({"teacher_log_probs": broken}, {"teacher_log_probs": "next_token"})
    one_less = data.with_fields({"teacher_ids": data["teacher_ids"][:, :-1]}, {"teacher_ids": "next_token"})
    for wrong, words in (
        (waves.batch(), "needs the next_token field 'teacher_log_probs'"),
        (spoilt, "teacher_log_probs of sample 0 are not finite"),
        (one_less, "give pairs"),
    ):
        with pytest.raises(DataError, match=words):
            DistillLoss().check(wrong, [])


@pytest.mark.bad_input
def test_ids_that_are_no_tokens_are_refused() -> None:
    """They have no logit: the log-prob of such an id would be that of a logit of 0."""
    from roll_batching.strategy.step_inputs import check_candidates

    data, student = taught(), SimpleNamespace(vocab_size=int(taught()["teacher_ids"].max()) + 1)
    check_candidates(data, "teacher_ids", student)  # type: ignore[arg-type]
    check_candidates(data, None, student)  # type: ignore[arg-type]
    ids = data["teacher_ids"]
    for wrong, words in ((ids + 1, "the model the tokens 0 to"), (-1 - ids, "has the token -"), (ids / 2, "float32")):
        with pytest.raises(DataError, match=words):
            other = data.with_fields({"teacher_ids": wrong}, {"teacher_ids": "next_token"})
            check_candidates(other, "teacher_ids", student)  # type: ignore[arg-type]


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    hidden, weight, labels = head(torch.float64)
    found = []
    for frozen in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        token_log_probs(leaves[0], labels, weight=leaves[1], vocab_size=REAL, chunk=5)[0].sum().backward()
        found.append(leaves[0].grad)
        assert (leaves[1].grad is None) == frozen
    assert torch.equal(*found)


@pytest.mark.bad_input
def test_candidates_need_the_name_of_their_field() -> None:
    class Nameless(DistillLoss):
        candidates = None  # type: ignore[assignment]

    class BySequence:
        needs = frozenset({"candidate_log_probs"})
        candidates = "teacher_ids"

        def sequence_loss(self, sequence: Any) -> Any: ...

    for loss in (Nameless(), BySequence()):
        with pytest.raises(LossError, match="`candidates`, the name of a field"):
            loss_spec(loss)
