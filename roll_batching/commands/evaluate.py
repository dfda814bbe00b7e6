"""`roll-batching eval --checkpoint RUN`: how good the answers of a run's model are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.commands.checkpoints import Checkpoint, Pretrain, Prompts, require_torch
from roll_batching.commands.generate import write_lines
from roll_batching.jobs.observe.numbers import fixed


def evaluate(
    checkpoint: Checkpoint,
    prompts: Prompts = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Sampled answers. Default: the run's eval_samples; with --prompts, all.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write every answer into this file, as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    pretrain: Pretrain = None,
) -> None:
    """Score answers of a run's checkpoint to held-out prompts, with the run's own reward and sampling.

    On one process: where the run had one data-parallel rank, these are the answers of its own evaluation at that step.
    """
    require_torch("evaluating")
    from roll_batching.jobs.inputs import read_prompts
    from roll_batching.jobs.run.saved_model import open_checkpoint, tokenizer_of
    from roll_batching.jobs.texts.texts import PromptDataset

    model = open_checkpoint(checkpoint, pretrain)
    tokenizer = tokenizer_of(model, pretrain)
    asked = PromptDataset(read_prompts(model.config, tokenizer, prompts))
    count = samples or (len(asked) if prompts else model.config.eval_samples or len(asked))
    settings = model.sampling(tokenizer, held_out=True, greedy=greedy or None, seed=model.config.seed)
    found = model.evaluation(asked, tokenizer, settings, samples=count, shown=0 if output is None else -1)
    if output is not None:
        write_lines(output, ({"version": model.point.step, **line} for line in found.said))
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(model.point.path), **found.figures}))
        return
    typer.echo(f"{model.point.path} (phase {model.point.phase}, step {model.point.step})")
    for name, value in found.figures.items():
        typer.echo(f"{name:40} {fixed(value, 4) if isinstance(value, float) else f'{value:,}'}")
