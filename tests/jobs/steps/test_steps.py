"""Planned steps of texts: encoded ahead, saved where they are used, and whole on every rank or on none."""

from __future__ import annotations

import pytest

from tests.jobs.rl.jobs import settings
from tests.support.ranks import run_ranks

TEXTS, SIZE = 20, 6


class Texts:
    """Documents of 1, 2, ... letters; the one that `fails` cannot be read, `times` times."""

    fingerprint = "made"

    def __init__(self, fails=None, times=2):
        self.fails, self.times = fails, times

    def __len__(self):
        return TEXTS

    def __getitem__(self, index):
        from roll_batching.errors import DataError
        from roll_batching.jobs.texts.texts import Document

        if index == self.fails and self.times:
            self.times -= 1
            raise DataError(f"document {index} cannot be read")
        return Document("b", "a" * (index + 1))


def steps(payload):
    """On a rank: the samples of steps, saved after the first, and of those that a second source gives from there."""
    import torch.distributed as dist

    from roll_batching.errors import RollBatchingError
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.steps.planned_steps import Encoder, PlannedSteps
    from roll_batching.jobs.texts.tokenizers import CharTokenizer
    from roll_batching.strategy import MegatronTrainStrategy

    strategy = MegatronTrainStrategy(JobConfig.model_validate(payload["job"]).actor_train, seed=1)
    strategy.initialize()
    encoder = Encoder(tokenizer=CharTokenizer("ab$", eos="$", pad="$"), max_length=40)

    def source(fails=None):
        return PlannedSteps(Texts(fails), encoder, strategy, size=SIZE, seed=3)

    def taken(from_, count):
        return [(home.lengths.tolist(), plan.fingerprint) for home, plan in (next(from_) for _ in range(count))]

    whole = source()
    first = taken(whole, 1)
    saved = whole.state_dict()
    rest = taken(whole, 4)
    again = source()
    taken(again, 2)
    again.load_state_dict(saved)
    result = {"again": taken(again, 4) == rest, "steps": first + rest}
    failing, found, result["errors"] = source(fails=7 if dist.get_rank() == 1 else None), [], []
    while len(found) < 5:  # text 7 is among the epoch's 20
        try:
            found += taken(failing, 1)
        except RollBatchingError as error:
            result["errors"].append(str(error))
    result["tried again"] = found == result["steps"]
    return result


@pytest.mark.bad_input
def test_steps_encoded_ahead_go_on_exactly_and_fail_together(tmp_path):
    outcomes = run_ranks(2, "tests.jobs.steps.test_steps:steps", {"job": settings(tmp_path, warmup=None, max_steps=1)})
    assert all(outcome["again"] for outcome in outcomes)
    lengths = [sum((one["steps"][step][0] for one in outcomes), []) for step in range(3)]
    assert len(set(sum(lengths, []))) == 3 * SIZE, "the texts of an epoch are all different"
    assert [one["steps"][0][1] for one in outcomes] == [outcomes[0]["steps"][0][1]] * 2
    first, again = outcomes[0]["errors"]
    assert outcomes[1]["errors"] == [first, again] and first == again, "what cannot be read is said each time"
    assert "rank 1" in first and "document 7 cannot be read" in first
    assert all(outcome["tried again"] for outcome in outcomes), "nothing is left out where it can be read at last"
