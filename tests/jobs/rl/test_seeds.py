"""The seeds of a job: one stream per purpose, training's as they always were."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from roll_batching.jobs.seeds import answers_seed, evaluation_seed, response_seed, reward_seed, step_seed


def test_no_two_purposes_draw_the_same_numbers():
    """Small numbers, which seeds, steps and purposes' own keys are; a collision of 32 bits would be bad luck."""
    small = range(12)
    steps = {step_seed(seed, step, part) for seed in small for step in small for part in small}
    assert len(steps) == len(small) ** 3
    found = [steps]
    for purpose in (evaluation_seed, answers_seed, reward_seed):
        found.append({purpose(seed, number) for seed in small for number in small})
        assert len(found[-1]) == len(small) ** 2
    assert len(set().union(*found)) == sum(map(len, found))


def test_training_draws_what_it_always_drew():
    assert step_seed(42, 7) == int(np.random.SeedSequence([42, 7]).generate_state(1)[0])
    assert step_seed(42, 7, 1) == int(np.random.SeedSequence([42, 7, 1]).generate_state(1)[0])
    assert response_seed(5, 7) == int(np.random.SeedSequence([5, 7]).generate_state(1)[0]) >> 1 < 1 << 31


def test_an_evaluation_does_not_draw_with_a_training_steps_seed():
    from roll_batching.jobs.rollouts.evaluation import Evaluator
    from roll_batching.jobs.texts.texts import Prompt
    from roll_batching.jobs.texts.tokenizers import CharTokenizer
    from roll_batching.strategy import GenerationSettings

    class Asked(Exception):
        pass

    def generate(prompts, settings):
        raise Asked(settings.seed)

    source = SimpleNamespace(layout=SimpleNamespace(dp_size=1, dp_rank=0, host_group=None), generate=generate)
    evaluator = Evaluator(
        prompts=[Prompt("a", "b")],
        tokenizer=CharTokenizer("ab$", eos="$", pad="$"),
        reward=None,
        settings=GenerationSettings(max_new_tokens=2, eos_token_id=2),
        samples=1,
        prompt_length=4,
        seed=3,
    )
    with pytest.raises(Asked) as asked:
        evaluator(source, number=0)
    assert asked.value.args[0] not in {step_seed(3, step, part) for step in range(9) for part in range(9)}
