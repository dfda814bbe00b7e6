"""`roll-batching eval --checkpoint RUN`: score responses of a checkpoint to held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.commands.generate import check_responses, write_lines
from roll_batching.commands.options import Checkpoint, Pretrain, Prompts, require_torch
from roll_batching.jobs.observe.progress import fixed


def evaluate(
    checkpoint: Checkpoint,
    prompts: Prompts = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Number of responses. Default: eval_samples; with --prompts, all."),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most probable token.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write all responses into this JSONL file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
    pretrain: Pretrain = None,
) -> None:
    """Score responses of a checkpoint to held-out prompts, with the run's own reward and sampling.

    Runs on one process. If the run had one data-parallel rank, they equal those of its evaluation at that step.
    """
    check_responses(output, "eval")
    require_torch("evaluating")
    from roll_batching.jobs.inputs import read_prompts
    from roll_batching.jobs.run.saved_model import open_checkpoint, tokenizer_of
    from roll_batching.jobs.texts.texts import PromptDataset

    model = open_checkpoint(checkpoint, pretrain)
    tokenizer = tokenizer_of(model, pretrain)
    dataset = PromptDataset(read_prompts(model.config, tokenizer, prompts))
    count = samples or (len(dataset) if prompts else model.config.eval_samples or len(dataset))
    settings = model.sampling(tokenizer, held_out=True, greedy=greedy or None, seed=model.config.seed)
    metrics, sample_log = model.evaluate(dataset, tokenizer, settings, samples=count, shown=0 if output is None else -1)
    if output is not None:
        write_lines(output, ({"version": model.point.step, **line} for line in sample_log))
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(model.point.path), **metrics}))
        return
    typer.echo(f"{model.point.path} (phase {model.point.phase}, step {model.point.step})")
    for name, value in metrics.items():
        typer.echo(f"{name:40} {fixed(value, 4) if isinstance(value, float) else f'{value:,}'}")
