"""A model out of a checkpoint, on one process: what `generate`, `eval` and `export` work with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_batching.errors import CheckpointError, ConfigError
from roll_batching.jobs.config import JobConfig, WorkerConfig, load_config
from roll_batching.jobs.config.withheld import withheld_problems
from roll_batching.jobs.inputs import load_tokenizer
from roll_batching.jobs.objectives.from_config import sampling_of
from roll_batching.jobs.rewards.pool import reward_of
from roll_batching.jobs.rollouts.evaluation import Evaluation, Evaluator
from roll_batching.jobs.rollouts.rollout import Rollouts, generate_rollouts
from roll_batching.jobs.run.checkpoint import SavedPoint, saved_point
from roll_batching.jobs.run.saved_job import check_tokenizer
from roll_batching.jobs.run_folder import CONFIG, MODEL
from roll_batching.jobs.seeds import answers_seed
from roll_batching.jobs.texts.texts import Prompt, PromptDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.settings import MegatronConfig
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.checkpoint import RECORD
from roll_batching.strategy.checkpoint_files import reading

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
_AT_ONCE = 32
"""Prompts that are answered together."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A checkpoint's model, ready to run, and the job that trained it."""

    point: SavedPoint
    config: JobConfig
    strategy: MegatronInferStrategy

    def sampling(self, tokenizer: Tokenizer, *, held_out: bool = False, **changes: Any) -> GenerationSettings:
        """The job's own way to sample, with those `changes` that are not None.

        As rollouts, one response per prompt; or as the job answers prompts that are `held_out`.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        own = sampling_of(self.config, tokenizer, held_out=held_out)
        return replace(own if held_out else replace(own, num_return_sequences=1), **given)

    def answers(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer, settings: GenerationSettings
    ) -> Iterator[Rollouts]:
        """Responses to `prompts`, some prompts at a time, in their order."""
        for start in range(0, len(prompts), _AT_ONCE):
            seed = answers_seed(settings.seed, start)
            some = prompts[start : start + _AT_ONCE]
            yield generate_rollouts(
                self.strategy, some, tokenizer, replace(settings, seed=seed), prompt_length=self.config.prompt_length
            )

    def evaluation(
        self, prompts: PromptDataset, tokenizer: Tokenizer, settings: GenerationSettings, *, samples: int, shown: int
    ) -> Evaluation:
        """What the run's own evaluation after the checkpoint's step finds, on `samples` of `prompts`.

        The same draws as the run's where it ran on one data-parallel rank. Raises ConfigError when the job has no
        reward, and RewardError's kin when it fails.
        """
        reward = reward_of(self.config)
        if reward is None:
            raise ConfigError("the run's configuration names no reward_function: nothing tells good answers from bad")
        if missing := [one for one in withheld_problems(self.config.to_dict()) if "reward_args" in one.path]:
            raise self.config.error(*missing)
        evaluator = Evaluator(
            prompts=prompts,
            tokenizer=tokenizer,
            reward=reward,
            settings=settings,
            samples=samples,
            prompt_length=self.config.prompt_length,
            seed=settings.seed,
            shown=shown,
        )
        with reward:
            reward.start()
            return evaluator(self.strategy, number=self.point.step)


def open_checkpoint(run: Path, pretrain: str | None = None, *, runs: bool = True) -> SavedModel:
    """The model of a run's last checkpoint, or of the checkpoint `run`, in a layout of one process.

    `pretrain` is the model directory that the run started from, where it lies elsewhere by now. With `runs` False only
    its weights are wanted. Raises CheckpointError when there is none, and what `MegatronInferStrategy.load` raises.
    """
    point = saved_point(run)
    if point is None:
        raise CheckpointError(_missing(run))
    config = load_config(point.path.parents[1] / CONFIG)
    role = _on_one_process(config.actor_train, point, pretrain, runs=runs)
    strategy = MegatronInferStrategy(role, temperature=config.logprob_temperature)
    strategy.initialize(weights=False)
    strategy.load(point.path, optimizer=False, verify=config.verify_checkpoint)
    return SavedModel(point=point, config=config, strategy=strategy)


def _missing(run: Path) -> str:
    if not run.is_dir():
        return f"{run} is no folder: name a run's folder, or a checkpoint in it"
    if (run / MODEL).is_dir():
        return f"{run} holds no checkpoint, but the trained model, in {run / MODEL}: read that with transformers"
    if not (run / CONFIG).is_file():
        return f"{run} holds no checkpoint and is no run's folder: it has no {CONFIG}"
    return f"{run} holds no checkpoint: the run saved none. Train again with save_steps=10, or however many steps apart"


def tokenizer_of(model: SavedModel, pretrain: str | None = None) -> Tokenizer:
    """The run's tokenizer; that of `pretrain` where the run took its model directory's.

    Raises CheckpointError when its tokens mean other texts than those that the model learnt.
    """
    wanted = model.config.tokenizer
    if pretrain is not None and wanted.name_or_path == model.config.actor_train.model_args.model_name_or_path:
        wanted = wanted.model_copy(update={"name_or_path": pretrain})
    tokenizer = load_tokenizer(model.config.model_copy(update={"tokenizer": wanted}))
    check_tokenizer(model.point.job or {}, tokenizer, model.point.path)
    return tokenizer


def _on_one_process(role: WorkerConfig, point: SavedPoint, pretrain: str | None, *, runs: bool) -> WorkerConfig:
    """The role that was trained, in a layout of one process and in the precision of its weights.

    Attention that comes along computes the same, whichever it is: here `auto` says. Anybody's own may not.
    """
    file = point.path / RECORD
    with reading(file):
        dtype = _DTYPES[json.loads(file.read_text(encoding="utf-8"))["dtype"]]
    changes = {"dtype": dtype} | ({} if pretrain is None else {"model_name_or_path": pretrain})
    attention = role.strategy_args.strategy_config.attention_backend
    kept = {"attention_backend": attention} if runs and ATTENTION_BACKENDS.get(attention) is None else {}
    strategy = role.strategy_args.model_copy(update={"strategy_config": MegatronConfig().model_copy(update=kept)})
    model = role.model_args.model_copy(update=changes)
    return role.model_copy(update={"strategy_args": strategy, "model_args": model, "device_mapping": None})
