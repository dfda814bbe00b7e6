"""Two ways to a strategy: what each says before there is a model, and that both run a subclass's constructor."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from tests.support.ranks import run_ranks


def before_initialize(path: str) -> dict[str, str]:
    """What every public method and property of a strategy without a model raises."""
    from roll_batching.errors import LayoutError
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import PlanConstraints, plan_step
    from roll_batching.samples import LengthTable
    from roll_batching.settings import TrainingArgs
    from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy
    from tests.support.models import random_batch, worker_config

    batch = random_batch(1, 4, 10)
    given = {
        "table": LengthTable.of(batch),
        "local": batch,
        "prompts": batch,
        "plan": plan_step(batch.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=64), ids=batch.ids.numpy()),
        "loss": SFTLoss(),
        "settings": GenerationSettings(max_new_tokens=1, eos_token_id=0),
        "training": TrainingArgs(learning_rate=1e-3),
        "other": MegatronTrainStrategy(worker_config("packed", 64)),
        "path": path,
        "samples": 6,
    }
    said = {}
    for name, member in inspect.getmembers(MegatronTrainStrategy):
        if name.startswith("_") or name in ("initialize", "from_parts", "from_model") or isinstance(member, bool):
            continue
        strategy = MegatronTrainStrategy(worker_config("packed", 64))
        try:
            value = getattr(strategy, name)
            if inspect.isfunction(member):
                wanted = list(inspect.signature(member).parameters.values())[1:]
                made = value(**{p.name: given[p.name] for p in wanted if p.name in given})
                if isinstance(made, contextlib.AbstractContextManager):
                    with made:
                        pass
            said[name] = "nothing"
        except LayoutError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = repr(error)
    try:
        MegatronTrainStrategy().initialize()
    except LayoutError as error:
        said["initialize without WorkerConfig"] = str(error)
    return said


def test_before_initialize_every_method_says_what_to_call(tmp_path: Any) -> None:
    said = run_ranks(1, "tests.strategy.test_construction:before_initialize", str(tmp_path / "saved"))[0]
    assert "has no RoleSettings" in said.pop("initialize without WorkerConfig")
    assert {"plan", "train_step", "forward_backward", "start_phase", "save", "generate", "layout"} <= said.keys()
    assert {name: text for name, text in said.items() if "call initialize() first" not in text} == {}


def subclasses(_: None) -> dict[str, tuple[float, Any]]:
    """(loss of a step, what the subclass's constructor was given) by both ways, with the same weights."""
    from roll_batching.losses import LossOutput
    from roll_batching.planning import LinearQuadraticCost
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.models import fill, random_batch, worker_config
    from tests.support.own_model import build

    class Scaled(MegatronTrainStrategy):
        needs, masks = {"log_probs"}, ("response_mask",)

        def __init__(self, config: Any = None, *, beta: float = 2.0, **options: Any) -> None:
            super().__init__(config, **options)
            self.beta = beta

        def token_loss(self, tokens: Any) -> Any:
            return LossOutput(-self.beta * tokens.mean(tokens.log_probs))

    class Fixed(Scaled):
        def __init__(self, config: Any) -> None:  # takes nothing but a configuration
            super().__init__(config, beta=4.0)

    _start()
    batch, found = random_batch(3, 6, 20), {}

    def step(strategy: Any) -> float:
        plan = strategy.plan(gather_lengths(batch))
        return strategy.train_step(batch, plan).loss / strategy.beta

    for cls, own in ((Scaled, {}), (Scaled, {"beta": 0.5}), (Fixed, {})):
        parts = build("packed", rotate="core")
        strategy = cls.from_parts(*parts, _batching("packed"), vocab_size=61, temperature=0.7, **own)
        found[f"{cls.__name__} {own} from_parts"] = (step(strategy), strategy.beta, strategy.temperature)
    for cls, own in ((Scaled, {"beta": 0.5, "temperature": 0.7}),):
        strategy = cls(worker_config("packed", 64), **own)
        strategy.initialize()
        fill(strategy.chunks, 61)
        found[f"{cls.__name__} built"] = (step(strategy), strategy.beta, strategy.temperature)
    mine = LinearQuadraticCost(1, 2)
    given, derived = (
        Scaled.from_parts(*build("packed", rotate="core"), _batching("packed"), cost=cost).cost for cost in (mine, None)
    )
    found["cost"] = given is mine, type(derived).__name__
    try:
        Scaled.from_parts(*build("packed", rotate="core"), _batching("packed"), gamma=1)
    except TypeError as error:
        found["unknown"] = str(error)
    return found


def test_both_constructors_run_a_subclasss_own() -> None:
    found = run_ranks(1, "tests.strategy.test_construction:subclasses")[0]
    assert "gamma" in found.pop("unknown")
    assert found.pop("cost") == (True, "FlopsCost")
    assert [rest for _, *rest in found.values()] == [[2.0, 0.7], [0.5, 0.7], [4.0, 0.7], [0.5, 0.7]]
    losses = [loss for loss, *_ in found.values()]
    assert max(losses) - min(losses) < 1e-5 * abs(losses[0])


def with_a_packer_that_rank_1_lacks(_: Any) -> str:
    from roll_batching.errors import RankError
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.models import worker_config

    worker = worker_config("packed", 64)
    args = worker.sequence_packing_args.model_copy(update={"algorithm": "tests.support.packer_of_rank_0:pack"})
    try:
        MegatronInferStrategy(worker.model_copy(update={"sequence_packing_args": args})).initialize()
    except RankError as error:
        return str(error)
    return "nothing"


def test_a_packer_that_one_rank_lacks_is_heard_by_all() -> None:
    said = run_ranks(2, "tests.strategy.test_construction:with_a_packer_that_rank_1_lacks", timeout=60)
    assert len(set(said)) == 1 and "rank 1: PlanError" in said[0] and "this machine lacks my kernels" in said[0]
