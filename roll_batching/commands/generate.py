"""`roll-batching generate --checkpoint RUN`: what the model of a run says to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.commands.checkpoints import Checkpoint, Pretrain, Prompts, require_torch
from roll_batching.errors import ConfigError
from roll_batching.files import cause, whole_file


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt's text; may be given again.")] = None,
    prompts: Prompts = None,
    first: Annotated[int, typer.Option(min=1, help="Answer at most so many prompts of the files.")] = 8,
    num_return_sequences: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=1e-6, help="Default: the run's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1, help="Default: the run's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Default: the run's; 0: all tokens.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: the run's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines here, not texts to the terminal.")] = None,
    pretrain: Pretrain = None,
) -> None:
    """Answer prompts with the model of a run's checkpoint, by one process, on the GPU where there is one."""
    require_torch("generating")
    from roll_batching.jobs.inputs import prompt_of, read_prompts
    from roll_batching.jobs.run.saved_model import open_checkpoint, tokenizer_of

    model = open_checkpoint(checkpoint, pretrain)
    tokenizer = tokenizer_of(model, pretrain)
    asked = [prompt_of(text, model.config, tokenizer) for text in prompt or ()]
    if prompts or not asked:
        asked += read_prompts(model.config, tokenizer, prompts, answers=False)[:first]
    settings = model.sampling(
        tokenizer,
        num_return_sequences=num_return_sequences,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        greedy=greedy or None,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    typer.echo(f"{model.point.path} (phase {model.point.phase}, step {model.point.step})", err=True)
    lines = (
        {
            "prompt": one.prompt,
            "response": one.response,
            "finished": one.finished,
            "response_tokens": one.tokens,
            "version": model.point.step,
        }
        for rollouts in model.answers(asked, tokenizer, settings)
        for one in rollouts.completions
    )
    if output is not None:
        write_lines(output, lines)
        return
    for line in lines:
        end = "" if line["finished"] else " ... (ran out of room)"
        typer.echo(f"\n> {line['prompt']}\n{line['response']}{end}")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes `lines` as JSON, one below the other, and says so. Raises ConfigError when that is not possible."""
    count = 0
    try:
        with whole_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {cause(error)}") from None
    typer.echo(f"wrote {count} responses into {path}", err=True)
