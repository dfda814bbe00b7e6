"""Lengths of the samples that a job learns from, out of its own files."""

from __future__ import annotations

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.texts.epochs import EpochStream
from roll_batching.jobs.texts.fit import token_counts


def lengths_of_data(job: JobConfig, dp_size: int) -> list[int]:
    """Tokens of the samples of the first optimizer step of `job`; of pairs chosen, rejected, chosen, ...

    Raises ConfigError where lengths are known only once the job runs; what reading its files raises.
    """
    if not supervised(job) or job.stream is not None:
        why = "a stream forms its steps" if supervised(job) else "answers have no length before they are sampled"
        raise ConfigError(f"--lengths data: {why}; give a file of lengths, or leave it out for the longest")
    job.check_runnable()
    inputs = load_inputs(job)
    assert inputs.corpus is not None
    texts = job.mini_batch_size(dp_size) // (2 if job.task == "dpo" else 1)
    step = next(EpochStream(inputs.corpus, texts, seed=job.seed))
    return [int(count) for count in token_counts(step, inputs.tokenizer).reshape(-1)]
