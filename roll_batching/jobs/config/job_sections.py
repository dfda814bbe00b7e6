"""Sections of a job that are no roles: the tokenizer, the warm-up, and batching over a stream (cosmos-rl's names)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import model_validator

from roll_batching.settings.fields import MOST_PROCESSES, OR_NULL, Settings, Switch, setting
from roll_batching.settings.training import TrainingArgs

_CHARACTERS = Switch(lambda tokenizer: tokenizer.type == "char", "tokenizer.type is hf")
_READ_IF_TOKENIZER = {
    "vocabulary": (
        _CHARACTERS,
        Switch(lambda tokenizer: tokenizer.vocabulary_file is None, "vocabulary_file is given"),
    ),
    "vocabulary_file": _CHARACTERS,
    "name_or_path": Switch(lambda tokenizer: tokenizer.type == "hf", "tokenizer.type is char"),
}


class TokenizerConfig(Settings, read_if=_READ_IF_TOKENIZER):
    """`tokenizer`: characters, or a Hugging Face tokenizer."""

    type: Literal["char", "hf"] = setting(
        "char",
        help="char: one token per character. hf: Hugging Face's tokenizers. Default with a model directory and no "
        "vocabulary: hf.",
    )
    vocabulary: str | None = setting(None, help="char: the characters, in the order of their ids.")
    vocabulary_file: str | None = setting(None, help="char: text file that holds the characters instead.")
    name_or_path: str | None = setting(
        None, help="hf: folder of the tokenizer, or its name. Default: the model directory."
    )
    eos_token: str | None = setting(None, help="End token of a response; char: one of the characters.")
    pad_token: str | None = setting(None, help="Padding token; default: the end token.")


_WITHOUT_CHATS = Switch(lambda warmup: warmup.messages is None, "warmup.messages is given")


class WarmupConfig(Settings, read_if={"prompt response": _WITHOUT_CHATS}):
    """`warmup`: supervised training on a corpus before RL, with the same model and strategy."""

    file_name: str | list[str] = setting(help="JSONL file or files of the corpus, one document per line.")
    messages: str | None = setting(
        None,
        help="Key of a chat's messages, which go through the tokenizer's chat template. The assistant's turns are "
        "trained on; `prompt` and `response` are not read.",
    )
    prompt: str = setting("prompt", help="Key of the beginning of a document, without loss.")
    response: str = setting("response", help="Key of the rest, which is trained on.")
    training_args: TrainingArgs = setting(
        default_factory=TrainingArgs, help="Optimizer, schedule, mini-batch and max_steps of the warm-up."
    )
    num_train_epochs: float | None = setting(
        None, help="Passes over the corpus, instead of training_args.max_steps.", gt=0
    )

    @model_validator(mode="after")
    def _has_steps(self) -> WarmupConfig:
        if self.training_args.max_steps < 1 and self.num_train_epochs is None:
            raise ValueError(
                "set warmup.training_args.max_steps, the optimizer steps of the warm-up, or "
                "warmup.num_train_epochs, its passes over the corpus"
            )
        if self.training_args.max_steps >= 1 and self.num_train_epochs is not None:
            raise ValueError("warmup.num_train_epochs replaces training_args.max_steps; keep one of the two")
        return self

    def scheduled(self, documents: int, mini_batch: int) -> TrainingArgs:
        """`training_args`; with `num_train_epochs`, their `max_steps` is that of so many passes over the documents."""
        if self.num_train_epochs is None:
            return self.training_args
        steps = max(1, math.ceil(self.num_train_epochs * documents / mini_batch))
        return self.training_args.model_copy(update={"max_steps": steps})


_STREAMS = Switch(lambda job: job.stream, "train.train_policy.enable_dp_load_balancing is false", of_job=True)
_READ_IF = {
    "*": _STREAMS,
    "load_balanced_batching_strategy": (
        _STREAMS,
        Switch(lambda job: not job.stream.sequence_packing, "sequence_packing takes every sample that fits", True),
    ),
}


class TrainPolicy(Settings, read_if=_READ_IF):
    """`train.train_policy`: how a stream of samples is batched."""

    enable_dp_load_balancing: bool = setting(
        False,
        help="task: sft or dpo: each data-parallel rank forms micro-batches from a pool of its samples, by length, up "
        "to a token cap. These keys then replace the batching keys of actor_train.",
    )
    load_balanced_pool_size: int = setting(32, help="Samples (dpo: pairs) that each rank chooses from.", ge=1)
    load_balanced_max_tokens_for_batch: int = setting(
        32768, help="Most tokens of a micro-batch, a hard cap: rows x longest, or packed the sum.", ge=1
    )
    load_balanced_batching_strategy: Literal["prefer_closest", "prefer_first"] = setting(
        "prefer_closest",
        help="Which sample joins, among those that enlarge the rectangle least: the one nearest in length "
        "(prefer_closest), or the oldest.",
    )
    load_balanced_batches_per_optimizer_step: int = setting(
        1, help="Micro-batches of an optimizer step that each rank forms.", ge=1
    )
    load_balanced_accumulate_steps: int | None = setting(
        None, help="Another name for load_balanced_batches_per_optimizer_step.", ge=1
    )
    load_balanced_across_ranks: bool = setting(
        False,
        help="Plan the samples of a step over all ranks (by actor_train's algorithm) instead of on each rank: equal "
        "cost on all ranks.",
    )
    dataloader_seed: int = setting(0, help="Seed of the order of the data.", ge=0)
    dataloader_num_workers: int = setting(
        0, help="Processes per rank that tokenise ahead. The stream does not depend on it.", ge=0, le=MOST_PROCESSES
    )
    infinite_loop: bool = setting(
        True,
        help="Begin the next epoch when the data ends. false: the job ends with the data; ranks whose data has ended "
        "compute fillers until all have.",
    )
    repartition: bool = setting(
        False,
        help="When resuming with another number of data-parallel ranks: distribute the unread samples over the new "
        "ranks. false: that is an error.",
    )


class TrainSection(Settings, read_if={"max_num_steps": _STREAMS}):
    """`train`: length and form of such a run."""

    max_num_steps: int | None = setting(
        None, help="Optimizer steps. Required with train_policy.enable_dp_load_balancing.", ge=1
    )
    sequence_packing: bool = setting(
        False, help="Pack samples end to end, in place of rectangles. Needs train_policy.enable_dp_load_balancing."
    )
    train_policy: Annotated[TrainPolicy, OR_NULL] = setting(
        default_factory=TrainPolicy, help="How the stream is batched."
    )

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of an optimizer step, by either name."""
        policy = self.train_policy
        return policy.load_balanced_accumulate_steps or policy.load_balanced_batches_per_optimizer_step

    @property
    def batching_keys(self) -> dict[str, Any]:
        """The batching keys of a role that follow from this section."""
        cap, packed = self.train_policy.load_balanced_max_tokens_for_batch, self.sequence_packing
        return {
            "use_sequence_packing": packed,
            "use_dynamic_batching": None,
            "use_dynamic_batching_in_train": not packed,
            "use_dynamic_batching_in_infer": not packed,
            "max_tokens_per_microbatch_in_train": None if packed else cap,
            "max_tokens_per_microbatch_in_infer": None,
        }
