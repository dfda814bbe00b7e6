"""Loads the model of a checkpoint on one process, for `generate`, `eval` and `export`; exports a job's final model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from roll_batching import __version__
from roll_batching.errors import CheckpointError, ConfigError
from roll_batching.huggingface.hub import is_hub_name
from roll_batching.jobs.config import JobConfig, WorkerConfig, load_config
from roll_batching.jobs.config.plain_data import withheld_problems
from roll_batching.jobs.objectives.from_config import sampling_of
from roll_batching.jobs.rewards.pool import reward_of
from roll_batching.jobs.rollouts.evaluation import Evaluator
from roll_batching.jobs.rollouts.function_rollouts import function_rollouts_of
from roll_batching.jobs.rollouts.prompts import find_faults, report_faults
from roll_batching.jobs.rollouts.rollout import Rollouts, generate_rollouts
from roll_batching.jobs.run.checkpoint import SavedPoint, saved_point
from roll_batching.jobs.run.folder import ADAPTER, CONFIG, MODEL
from roll_batching.jobs.run.job_digests import check_tokenizer
from roll_batching.jobs.seeds import answers_seed
from roll_batching.jobs.text_sets import load_tokenizer
from roll_batching.jobs.texts.fit import token_counts
from roll_batching.jobs.texts.records import sources_of
from roll_batching.jobs.texts.texts import Prompt, PromptDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.settings import MegatronConfig
from roll_batching.settings.attention_backends import ATTENTION_BACKENDS
from roll_batching.strategy import GenerationSettings, MegatronInferStrategy
from roll_batching.strategy.checkpoint import RECORD
from roll_batching.strategy.checkpoint_files import explain_read_errors

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_ON_HUB = re.compile(r"hf://\w")
"""Beginning of a data set's name that is no path on this machine."""
_BATCH_SIZE = 32
"""Prompts that are answered together."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A checkpoint's model, ready to run, and the job that trained it."""

    point: SavedPoint
    config: JobConfig
    strategy: MegatronInferStrategy

    def sampling(self, tokenizer: Tokenizer, *, held_out: bool = False, **changes: Any) -> GenerationSettings:
        """The job's sampling settings with `changes`, without changes that are None.

        The settings are those of rollouts, with one response per prompt, or those of `held_out` evaluation.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        settings = sampling_of(self.config, tokenizer, held_out=held_out)
        return replace(settings if held_out else replace(settings, num_return_sequences=1), **changes)

    def answers(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer, settings: GenerationSettings
    ) -> Iterator[Rollouts]:
        """Yields the responses to `prompts` in their order, batch after batch."""
        function = function_rollouts_of(self.config)
        for start in range(0, len(prompts), _BATCH_SIZE):
            seed = answers_seed(settings.seed, start)
            batch = prompts[start : start + _BATCH_SIZE]
            yield generate_rollouts(
                self.strategy,
                batch,
                tokenizer,
                replace(settings, seed=seed),
                prompt_length=self.config.prompt_length,
                function=function,
            )

    def evaluate(
        self, prompts: PromptDataset, tokenizer: Tokenizer, settings: GenerationSettings, *, samples: int, shown: int
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Repeats the evaluation after the checkpoint's step, on `samples` prompts; returns metrics and sample log.

        The responses are those of the run, if it had one data-parallel rank. Raises ConfigError when the job has no
        reward, and the errors of `score_rollouts`.
        """
        reward = reward_of(self.config)
        if reward is None:
            raise ConfigError("the run's configuration has no reward_function, which an evaluation needs")
        withheld = withheld_problems(self.config.to_dict())
        if missing := [problem for problem in withheld if "reward_args" in problem.path]:
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
            function=function_rollouts_of(self.config),
        )
        with reward:
            reward.start()
            report_faults(find_faults(list(prompts), reward), reward)
            return evaluator(self.strategy, number=self.point.step)


def open_checkpoint(run: Path, pretrain: str | None = None, *, runs: bool = True) -> SavedModel:
    """Loads the model of a run's last checkpoint, or of the checkpoint `run`, in a layout of one process.

    `pretrain` is the model directory that the run started from, if it has moved since. `runs` False: the model is only
    exported, so a user's own attention backend is not loaded. Raises CheckpointError when there is no checkpoint, and
    the errors of `MegatronInferStrategy.load`.
    """
    point = saved_point(run)
    if point is None:
        raise CheckpointError(_missing(run))
    config = load_config(point.path.parents[1] / CONFIG)
    role = _on_one_process(config.actor_train, point, pretrain, runs=runs)
    strategy = MegatronInferStrategy(role, temperature=config.logprob_temperature)
    strategy.builds_heads = True  # an export writes them
    strategy.initialize(weights=role.model_args.lora_target is not None)  # a checkpoint of adapters has no others
    strategy.load(point.path, optimizer=False, verify=config.verify_checkpoint)
    return SavedModel(point=point, config=config, strategy=strategy)


def check_room(model: SavedModel, prompts: Sequence[Prompt], max_new_tokens: int, tokenizer: Tokenizer) -> None:
    """Raises ConfigError when a prompt with `max_new_tokens` is longer than the model's positions and the run allow."""
    architecture = model.config.actor_train.model_args.architecture
    positions = 0 if architecture is None else architecture.max_position_embeddings
    room = max(positions, model.config.sequence_length or 0) - int(token_counts(prompts, tokenizer).max(initial=0))
    if max_new_tokens > room:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens:,}, and after the longest prompt the model has positions for "
            f"{max(room, 0):,} tokens (max_position_embeddings {positions:,}, the run's sequence_length "
            f"{model.config.sequence_length}): set --max-new-tokens to at most that, or shorten the prompt"
        )


def _missing(run: Path) -> str:
    """The error that `run` has no checkpoint, with the reason and the cure."""
    if not run.is_dir():
        return f"{run} is not a folder: name a run's folder, or a checkpoint in it"
    if (run / MODEL).is_dir():
        return f"{run} holds no checkpoint, but the trained model, in {run / MODEL}: read that with transformers"
    if not (run / CONFIG).is_file():
        return f"{run} holds no checkpoint and is no run's folder: it has no {CONFIG}"
    return f"{run} holds no checkpoint: the run saved none. Train again with save_steps, for example save_steps=10"


def tokenizer_of(model: SavedModel, pretrain: str | None = None) -> Tokenizer:
    """Loads the run's tokenizer, from `pretrain` if the run took it from its model directory.

    Raises CheckpointError when the vocabulary differs from the one in training.
    """
    settings = model.config.tokenizer
    if pretrain is not None and settings.name_or_path == model.config.actor_train.model_args.model_name_or_path:
        settings = settings.model_copy(update={"name_or_path": pretrain})
    tokenizer = load_tokenizer(model.config.model_copy(update={"tokenizer": settings}))
    check_tokenizer(model.point.job or {}, tokenizer, model.point.path)
    return tokenizer


def _on_one_process(role: WorkerConfig, point: SavedPoint, pretrain: str | None, *, runs: bool) -> WorkerConfig:
    """Settings of the trained role for one process, in the precision of its weights.

    The registered attention backends compute the same function, so `auto` picks one here. A user's own may not: it is
    kept where the model runs.
    """
    file = point.path / RECORD
    with explain_read_errors(file):
        dtype = _DTYPES[json.loads(file.read_text(encoding="utf-8"))["dtype"]]
    changes = {"dtype": dtype} | ({} if pretrain is None else {"model_name_or_path": pretrain})
    attention = role.strategy_args.strategy_config.attention_backend
    changed = {"attention_backend": attention} if runs and ATTENTION_BACKENDS.get(attention) is None else {}
    strategy = role.strategy_args.model_copy(update={"strategy_config": MegatronConfig().model_copy(update=changed)})
    model = role.model_args.model_copy(update=changes)
    return role.model_copy(update={"strategy_args": strategy, "model_args": model, "device_mapping": None})


def export_checkpoint(run: Path, to: Path, pretrain: str | None = None, *, adapter: bool = False) -> SavedPoint:
    """Export the model of a run's last checkpoint, or of the checkpoint `run`, to the folder `to`; on one process.

    `pretrain` is the model directory that the run started from, if it has moved since. `adapter`: LoRA adapters alone,
    in PEFT's format. Returns the checkpoint. Raises the errors of `open_checkpoint` and of the strategy's `export` or
    `export_adapters`.
    """
    model = open_checkpoint(run, pretrain, runs=False)
    if adapter:
        model.strategy.export_adapters(to)
    else:
        model.strategy.export(to)
    return model.point


def write_model_card(folder: Path, point: SavedPoint, name: str) -> None:
    """Write `README.md` of a repository `name` with an export of `point`: origin, task, data of the hub; no licence."""
    config = load_config(point.path.parents[1] / CONFIG)
    origin, data = str(config.actor_train.model_args.model_name_or_path), config.actor_train.data_args
    base = origin if is_hub_name(origin) else Path(origin).name
    fields = {"library_name": "peft" if (folder / "adapter_config.json").is_file() else "transformers"}
    fields |= {"base_model": origin} if base == origin else {}
    sources = [source for source in map(str, sources_of(data.prompts or ())) if _ON_HUB.match(source)]
    names = [source.removeprefix("hf://").partition("?")[0] for source in sources]
    front = yaml.safe_dump(fields | ({"datasets": names} if names else {}) | {"tags": ["roll-batching", config.task]})
    text = f"---\n{front}---\n\n# {name.rpartition('/')[2]}\n\n`{base}`, trained with `{config.task}`"
    text += f" ({', '.join(sources)})" if sources else ""
    text += f": phase `{point.phase}`, step {point.step}, by roll-batching {__version__}.\n\n"
    text += "Licence, evaluation and intended use are to be filled in.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def export_final_model(config: JobConfig, strategy: MegatronInferStrategy) -> Path | None:
    """Export the trained model into the run's folder, if the run started from a model directory. Collective.

    LoRA adapters are added to the model, and exported beside it in PEFT's format. Returns the model's path; None
    where there is nothing to export.
    """
    if not config.export_model or config.actor_train.model_args.model_name_or_path is None:
        return None
    path = config.run_folder / MODEL
    strategy.export(path, replaces=lambda path: True)  # a resumed run may have exported there before
    if strategy.state.adapters is not None:
        strategy.export_adapters(config.run_folder / ADAPTER, replaces=lambda path: True)
    return path
