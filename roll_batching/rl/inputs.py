"""What a job reads before it starts: texts, tokenizer, reward function."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from roll_batching.config import JobConfig
from roll_batching.data.texts import DocumentDataset, PromptDataset
from roll_batching.data.tokenizers import CharTokenizer, HFTokenizer, Tokenizer
from roll_batching.errors import ConfigError
from roll_batching.rl.rewards import RewardFunction, load_reward


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """Everything from outside, read and checked. A part that the job does not need is None."""

    tokenizer: Tokenizer
    corpus: DocumentDataset | None
    """Documents of the warm-up."""
    prompts: PromptDataset | None
    """Training prompts of the RL phase."""
    heldout: PromptDataset | None
    """Prompts to evaluate with."""
    reward: RewardFunction | None

    @property
    def fingerprint(self) -> str:
        """Digest of all texts: ranks that read different files have different ones."""
        parts = (self.corpus, self.prompts, self.heldout)
        return "/".join("-" if part is None else part.fingerprint for part in parts)


def load_inputs(job: JobConfig) -> JobInputs:
    """Read what `job` names.

    Raises DataError naming file and line, or ConfigError naming what cannot be found or does not fit the model.
    """
    tokenizer = load_tokenizer(job)
    _fits_model(job, tokenizer)
    data = job.actor_train.data_args
    keys = {"prompt_key": data.prompt, "answer_key": data.response}
    rl = job.max_steps > 0
    corpus = prompts = heldout = reward = None
    if job.warmup is not None:
        corpus = DocumentDataset.from_jsonl(
            job.warmup.file_name, prompt_key=job.warmup.prompt, response_key=job.warmup.response
        )
    if rl:
        assert data.file_name is not None and job.reward_function is not None  # check_runnable
        prompts = PromptDataset.from_jsonl(data.file_name, **keys)
        reward = load_reward(job.reward_function)
        if job.reward_args:
            reward = functools.partial(reward, **job.reward_args)
        if data.eval_file_name is not None and job.eval_samples:
            heldout = PromptDataset.from_jsonl(data.eval_file_name, **keys)
    return JobInputs(tokenizer=tokenizer, corpus=corpus, prompts=prompts, heldout=heldout, reward=reward)


def load_tokenizer(job: JobConfig) -> Tokenizer:
    """The tokenizer that `job.tokenizer` describes. Raises DataError or ConfigError when it cannot be made."""
    wanted = job.tokenizer
    if wanted.type == "hf":
        name = wanted.name_or_path or job.actor_train.model_args.model_name_or_path
        if name is None:
            raise ConfigError("tokenizer.name_or_path is missing, and actor_train names no model to take it from")
        return HFTokenizer(name, eos=wanted.eos_token, pad=wanted.pad_token)
    if wanted.eos_token is None:
        raise ConfigError("tokenizer.eos_token is missing: a char tokenizer needs a character that ends responses")
    if wanted.vocabulary_file is not None:
        return CharTokenizer.from_file(wanted.vocabulary_file, wanted.eos_token, wanted.pad_token)
    return CharTokenizer(wanted.vocabulary or "", wanted.eos_token, wanted.pad_token)


def _fits_model(job: JobConfig, tokenizer: Tokenizer) -> None:
    model = job.actor_train.model_args.architecture
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocab_size of {model.vocab_size}: "
            "raise actor_train.model_args.architecture.vocab_size"
        )
