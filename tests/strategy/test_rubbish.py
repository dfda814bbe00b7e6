"""One rank is given rubbish at a public entry: all ranks raise the same error within seconds, and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.strategy.bad_calls import SECONDS, Loss, errors_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

CAP = 48


class Scene:
    """A strategy with samples, and what each entry is called with; the culprit gets rubbish instead."""

    def __init__(self, layout: dict[str, Any], folder: str) -> None:
        import torch

        from roll_batching.losses import SFTLoss
        from roll_batching.samples import distribute, gather_lengths
        from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy
        from tests.support.models import random_batch, worker_config

        self.folder = folder
        self.config = worker_config("packed", CAP, megatron=layout)
        self.strategy = MegatronTrainStrategy(self.config)
        self.strategy.initialize()
        self.culprit = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1  # of the last stage
        ranks = self.strategy.layout
        whole = random_batch(1, 8, 40)
        self.home = whole.select(torch.arange(ranks.dp_rank, len(whole), ranks.dp_size))
        self.plan = self.strategy.plan(gather_lengths(self.home))
        self.local = distribute(self.home, self.plan)
        self.loss = SFTLoss()
        self.settings = GenerationSettings(max_new_tokens=2, eos_token_id=0)

    def given(self, good: Any, rubbish: Any) -> Any:
        return rubbish if self.culprit else good


def _metrics(make: Callable[[Any], Any]) -> Any:
    return lambda s: s.strategy.train_step(s.local, s.plan, Loss(metrics=s.given(lambda tokens: {}, make)))


def _wide_metric(tokens: Any) -> Any:
    from roll_batching.losses import Sum

    return {"kl": Sum(tokens.log_probs)}


def _metric_of_text(tokens: Any) -> Any:
    from roll_batching.losses import Sum

    return {"kl": Sum("much")}  # type: ignore[arg-type]


def _metric_that_divides(tokens: Any) -> Any:
    return 1 // 0


def _data(name: str) -> Callable[..., Any]:
    import roll_batching.samples

    return getattr(roll_batching.samples, name)


def _foreign(batch: Any) -> Any:
    """`batch` with a token that the model has not."""
    ids = batch["input_ids"].clone()
    ids[7] = 61
    return batch.with_fields({"input_ids": ids}, {"input_ids": "token"})


def _from_parts(s: Scene, **rubbish: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy

    good = {"model_chunks": s.strategy.chunks, "batching": s.config.batching()}
    return MegatronTrainStrategy.from_parts(**{**good, "optimizer": None, **(rubbish if s.culprit else {})})


def _initialize(s: Scene) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    other = worker_config("packed", CAP + 8, megatron=s.config.strategy_args.strategy_config.model_dump())
    return MegatronTrainStrategy(s.given(s.config, other)).initialize()


ENTRIES: dict[str, Callable[[Scene], Any]] = {
    "initialize, other settings": _initialize,
    "gather_lengths(None)": lambda s: _data("gather_lengths")(s.given(s.home, None)),
    "number_globally(7)": lambda s: _data("number_globally")(s.given(s.home, 7)),
    "gather_bins(sizes='x')": lambda s: _data("gather_bins")(s.home, s.given([len(s.home)], "x")),
    "distribute(None, plan)": lambda s: _data("distribute")(s.given(s.home, None), s.plan),
    "distribute(batch, None)": lambda s: _data("distribute")(s.home, s.given(s.plan, None)),
    "collect({}, plan)": lambda s: _data("collect")(s.given(s.local, {}), s.plan),
    "collect(results, 3)": lambda s: _data("collect")(s.local, s.given(s.plan, 3)),
    "forward(None, plan)": lambda s: s.strategy.forward(s.given(s.local, None), s.plan),
    "forward(batch, None)": lambda s: s.strategy.forward(s.local, s.given(s.plan, None)),
    "forward(needs=3)": lambda s: s.strategy.forward(s.local, s.plan, s.given(("log_probs",), 3)),
    "forward, other needs": lambda s: s.strategy.forward(s.local, s.plan, s.given(("log_probs",), ("entropy",))),
    "forward(masks=('no',))": lambda s: s.strategy.forward(s.local, s.plan, masks=s.given(None, ("no",))),
    "compute_log_probs('x')": lambda s: s.strategy.compute_log_probs(s.given(s.local, "x"), s.plan),
    "evaluate(loss=None)": lambda s: s.strategy.evaluate(s.local, s.plan, s.given(s.loss, None)),
    "count(None)": lambda s: s.strategy.count(s.given(s.home, None), s.loss),
    "count(loss=object)": lambda s: s.strategy.count(s.home, s.given(s.loss, object())),
    "train_step(None)": lambda s: s.strategy.train_step(s.given(s.local, None), s.plan, s.loss),
    "train_step, a token of another vocabulary": lambda s: s.strategy.train_step(
        s.given(s.local, _foreign(s.local)), s.plan, s.loss
    ),
    "generate, a token of another vocabulary": lambda s: s.strategy.generate(
        s.given(s.home, _foreign(s.home)), s.settings
    ),
    "train_step(loss=3)": lambda s: s.strategy.train_step(s.local, s.plan, s.given(s.loss, 3)),
    "train_step, other loss": lambda s: s.strategy.train_step(s.local, s.plan, s.given(s.loss, Loss())),
    "train_step(counts='x')": lambda s: s.strategy.train_step(s.local, s.plan, s.loss, counts=s.given(None, "x")),
    "a field of sums is missing": lambda s: s.strategy.train_step(
        s.local, s.plan, Loss(sums=s.given(("advantages",), ("nothing",)))
    ),
    "fields of a replica differ": lambda s: s.strategy.train_step(
        s.given(s.local, s.local.without(["advantages"])), s.plan, Loss(sums=("advantages",))
    ),
    "no optimizer": lambda s: _without_optimizer(s),
    "a metric of the wrong shape": _metrics(_wide_metric),
    "a metric that is text": _metrics(_metric_of_text),
    "metrics that are a list": _metrics(lambda tokens: ["kl"]),
    "a loss that raises": _metrics(_metric_that_divides),
    "forward_backward(plan=3)": lambda s: s.strategy.forward_backward(s.local, s.given(s.plan, 3), s.loss),
    "generate(None)": lambda s: s.strategy.generate(s.given(s.home, None), s.settings),
    "generate(settings={})": lambda s: s.strategy.generate(s.home, s.given(s.settings, {})),
    "start_phase(None)": lambda s: s.strategy.start_phase(s.given(s.config.training_args, None)),
    "copy_weights_from(None)": lambda s: s.strategy.copy_weights_from(s.given(s.strategy, None)),
    "save(None)": lambda s: s.strategy.save(s.given(f"{s.folder}/a", None)),
    "save, another path": lambda s: s.strategy.save(s.given(f"{s.folder}/a", f"{s.folder}/b")),
    "load(None)": lambda s: s.strategy.load(s.given(f"{s.folder}/good", None)),
    "load, another path": lambda s: s.strategy.load(s.given(f"{s.folder}/good", f"{s.folder}/none")),
    "from_parts(chunks=None)": lambda s: _from_parts(s, model_chunks=None),
    "from_parts(settings=3)": lambda s: _from_parts(s, settings=3),
    "from_parts(scheduler=3)": lambda s: _from_parts(s, scheduler=3),
    "from_parts(chunks=[])": lambda s: _from_parts(s, model_chunks=[]),
    "from_parts(chunks=[3])": lambda s: _from_parts(s, model_chunks=[3]),
    "from_parts(batching={})": lambda s: _from_parts(s, batching={}),
    "from_parts(pg_collection=3)": lambda s: _from_parts(s, pg_collection=3),
}


def _without_optimizer(s: Scene) -> Any:
    state = s.strategy.state
    s.strategy.state = s.given(state, replace(state, training=replace(state.training, optimizer=None)))
    try:
        return s.strategy.train_step(s.local, s.plan, s.loss)
    finally:
        s.strategy.state = state


def attempts(payload: tuple[dict[str, Any], str]) -> list[tuple[str, str, float]]:
    """By entry: error class, message, seconds. After each, a good step still works."""
    layout, folder = payload
    scene = Scene(layout, folder)
    scene.strategy.save(f"{folder}/good")
    seen = []
    for error in errors_of(ENTRIES.values(), scene):
        seen.append(error)
        good = scene.strategy.train_step(scene.local, scene.plan, scene.loss)
        assert good.loss == good.loss and not good.skipped
    return seen


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, dp2": (2, {}),
    "4 ranks, tp2 dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "4 ranks, pp2 dp2": (4, {"pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name == "4 ranks, tp2 dp2")) for name in LAYOUTS]
)
def test_rubbish_on_one_rank_is_the_same_error_on_all(layout: str, tmp_path: Any, report: Any) -> None:
    world, sizes = LAYOUTS[layout]
    results = run_ranks(world, "tests.strategy.test_rubbish:attempts", (sizes, str(tmp_path)), timeout=240)
    wrong = {}
    for name, seen in zip(ENTRIES, zip(*results, strict=True), strict=True):
        kinds, messages, seconds = zip(*seen, strict=True)
        fine = set(kinds) in ({"RankError"}, {"LossError"}) and len(set(messages)) == 1 and max(seconds) < SECONDS
        if not fine:
            wrong[name] = seen
        elif world == 2:
            report(f"{name}: {messages[0].splitlines()[0][:150]}")
    assert not wrong
