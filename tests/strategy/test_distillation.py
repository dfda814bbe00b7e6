"""A student and a teacher in other layouts: values and gradients are those of one process, by stock torch.

The reference is stock Megatron attention, one unpacked sequence at a time, `topk` and `log_softmax` of whole logits.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategy.test_layouts import architecture, variant_of
from tests.support.layouts import Layout
from tests.support.models import MODES, worker_config
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_distillation:"
CAP, VOCABULARY = 64, 61
LIMIT = 1e-5
TEACHER_SHAPE = {"hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2}
"""Another model than the student's."""

PAIRS = [
    (Layout(), Layout()),
    (Layout(tp=2, sp=True), Layout(pp=2)),
    (Layout(dp=2, distopt=True), Layout(cp=2)),
    (Layout(pp=2, tied=True), Layout(tp=2)),
    (Layout(cp=2), Layout(dp=2)),
    (Layout(tp=2), Layout(tp=2)),
]
"""Layouts of student and teacher on the same ranks."""
LARGER = [
    (Layout(tp=2, sp=True, pp=2), Layout(cp=2, dp=2)),
    (Layout(pp=2, vpp=2, dp=2, distopt=True), Layout(tp=2, sp=True, cp=2)),
    (Layout(tp=2, sp=True, cp=2, recompute=True), Layout(pp=2, dp=2)),
]
LOSSES: dict[str, dict[str, Any]] = {
    "forward": {"objective": "forward_kl", "temperature": 1.5},
    "mixed over the vocabulary": {"objective": "mixed_kl", "zero_outside_topk": True, "mixed_weight": 0.4},
    "JSD and likelihood": {"objective": "js_divergence", "weight": 0.6},
}
KS = {"forward": 5, "mixed over the vocabulary": 9, "JSD and likelihood": VOCABULARY}


def teacher_shape() -> dict[str, Any]:
    return architecture(variant_of(Layout(pp=2))) | TEACHER_SHAPE


def _batch() -> Any:
    from tests.support.models import random_batch

    return random_batch(77, 9, 40).only(("input_ids", "response_mask"))


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    length = len(tokens)
    hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
    return model(tokens[None], torch.arange(length)[None], hidden_from)[0, :-1]


def _loss(name: str, student: Any, taught: list[tuple[torch.Tensor, torch.Tensor]], batch: Any) -> torch.Tensor:
    """The mean over all counted tokens, written out."""
    total, count = torch.zeros(()), 0
    rows = zip(batch.to_lists("input_ids"), batch.to_lists("response_mask"), taught, strict=True)
    for tokens, response, (values, ids) in rows:
        mask = response[1:].bool()
        logits = _logits(student, tokens)
        whole = logits.log_softmax(-1)
        p = values.log_softmax(-1)
        if name == "forward":
            p, q = (values / 1.5).log_softmax(-1), (logits.gather(1, ids) / 1.5).log_softmax(-1)
            each = (p.exp() * (p - q)).sum(-1)
        elif name == "mixed over the vocabulary":
            floor = torch.full_like(whole, -100.0).scatter(1, ids, p)
            q = whole.gather(1, ids)
            each = 0.4 * (p.exp() * (p - q)).sum(-1) + 0.6 * (whole.exp() * (whole - floor)).sum(-1)
        else:
            q = logits.gather(1, ids).log_softmax(-1)
            m = ((p.exp() + q.exp()) / 2).log()
            shannon = ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2
            each = 0.6 * shannon - 0.4 * whole.gather(1, tokens[1:, None])[:, 0]
        total, count = total + each[mask].sum(), count + int(mask.sum())
    return total / count


def _reference_path(folder: str | Path, variant: Any) -> Path:
    return Path(folder) / f"distilled-{'-'.join(map(str, variant))}.pt"


def write_references(payload: tuple[str, list[Any]]) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.reference import gradients, stock_model

    folder, variants = payload
    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    teacher, batch = stock_model(teacher_shape()), _batch()
    with torch.no_grad():
        whole = [_logits(teacher, tokens).log_softmax(-1) for tokens in batch.to_lists("input_ids")]
    taught = {name: [tuple(row.topk(KS[name], -1)) for row in whole] for name in LOSSES}
    for variant in variants:
        student = stock_model(architecture(variant))
        found = {}
        for name in LOSSES:
            loss = _loss(name, student, taught[name], batch)
            found[name] = (float(loss.detach()), gradients(student, loss), taught[name])
            student.zero_grad()
        torch.save(found, _reference_path(folder, variant))


def compare(payload: tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]) -> list[dict[str, Any]]:
    folder, pairs = payload
    found = []
    for index, (student, teacher) in enumerate(pairs):
        meet(index)
        found.append(_compare_pair(folder, Layout(**student), Layout(**teacher)))
        part()
    return found


def _compare_pair(folder: str, layout: Layout, of_teacher: Layout) -> dict[str, Any]:
    from roll_batching.jobs.roles.frozen_models import with_top_tokens
    from roll_batching.losses.distillation import DistillLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import fill, whole_gradients, worst_difference

    def role(one: Layout, shape: dict[str, Any], mode: str) -> Any:
        return worker_config(mode, CAP, architecture=shape, megatron=one.megatron(), dtype="fp32")

    shape = architecture(variant_of(layout))
    strategy = MegatronTrainStrategy(role(layout, shape, "packed"))
    strategy.initialize()
    teacher = MegatronInferStrategy(role(of_teacher, teacher_shape(), "packed"))
    teacher.initialize()
    for model in (strategy, teacher):
        fill(model.chunks, VOCABULARY, model.layout.tp_rank, model.layout.tp_size)
    place, found, whole = strategy.layout, {}, _batch()
    references = torch.load(_reference_path(folder, variant_of(layout)))
    mine = range(place.dp_rank, len(whole), place.dp_size)
    for mode in MODES:
        strategy.state = replace(strategy.state, batching=role(layout, shape, mode).batching())
        teacher.state = replace(teacher.state, batching=role(of_teacher, teacher_shape(), mode).batching())
        for name, settings in LOSSES.items():
            fill(strategy.chunks, VOCABULARY, place.tp_rank, place.tp_size)
            strategy.start_phase(TrainingArgs(learning_rate=1e-9, max_grad_norm=0.0))
            expected_loss, expected, taught = references[name]
            local = whole.select(torch.tensor(list(mine)))
            given = with_top_tokens(strategy, teacher, local, KS[name], ["response_mask"])
            teacher_gap = _teacher_gap(given, [taught[i] for i in mine])
            plan = strategy.plan(gather_lengths(given))
            loss = strategy.train_step(distribute(given, plan), plan, DistillLoss(**settings)).loss
            gradient = whole_gradients(strategy.chunks, VOCABULARY, place.tp_rank, layout.distopt)
            gap, where = worst_difference(gradient, expected)
            found[f"{mode}, {name}"] = {
                "teacher": teacher_gap,
                "loss": abs(loss - expected_loss) / abs(expected_loss),
                "gradient": max(gap, gradient["spread"]),
                "where": where,
            }
    return found


def _teacher_gap(given: Any, taught: list[Any]) -> float:
    """The largest difference of the teacher's log-probs at counted positions; 1 more for another token."""
    gap = 0.0
    rows = zip(*(given.to_lists(name) for name in ("teacher_log_probs", "teacher_ids", "response_mask")), strict=True)
    for (values, ids, response), (expected, expected_ids) in zip(rows, taught, strict=True):
        mask = response[1:].bool()
        if not mask.any():
            continue
        gap = max(gap, float((values[:-1] - expected)[mask].abs().max()))
        gap += float((ids[:-1].long() != expected_ids)[mask].any())
    return gap


@pytest.fixture(scope="module")
def references():
    with tempfile.TemporaryDirectory() as folder:
        variants = sorted({variant_of(student) for student, _ in PAIRS + LARGER})
        run_ranks(1, HERE + "write_references", (folder, variants))
        yield folder


@pytest.mark.parametrize(
    "pairs",
    [
        PAIRS[:1],
        PAIRS[1:3],
        pytest.param(PAIRS[3:], marks=pytest.mark.slow),
        pytest.param(LARGER, marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "more on two ranks", "four ranks"],
)
def test_values_and_gradients_are_the_reference_s(pairs: Any, references: str, report) -> None:
    ranks = pairs[0][0].ranks
    payload = (references, [(asdict(student), asdict(teacher)) for student, teacher in pairs])
    found = run_ranks(ranks, HERE + "compare", payload, timeout=500)
    for (student, teacher), gaps in zip(pairs, found[0], strict=True):
        for what in ("teacher", "loss", "gradient"):
            report(f"{student} from {teacher}: {what} {max(gap[what] for gap in gaps.values()):.1e}")
    for of_rank in found:
        for gaps in of_rank:
            for case, gap in gaps.items():
                assert gap["teacher"] < LIMIT and gap["loss"] < LIMIT and gap["gradient"] < LIMIT, (case, gap)
