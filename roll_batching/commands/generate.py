"""`roll-batching generate --checkpoint RUN`: sample responses of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.commands.options import Checkpoint, Pretrain, Prompts, require_torch
from roll_batching.errors import ConfigError
from roll_batching.files import atomic_file, cause, check_replaceable


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str] | None, typer.Option(help="Text of a prompt; repeatable.")] = None,
    prompts: Prompts = None,
    first: Annotated[int, typer.Option(min=1, help="Number of prompts to read from the files.")] = 8,
    num_return_sequences: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=1e-6, help="Default: the run's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1, help="Default: the run's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Default: the run's; 0: all tokens.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most probable token.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: the run's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write into this JSONL file, not to the terminal.")] = None,
    pretrain: Pretrain = None,
) -> None:
    """Sample responses of a checkpoint on one process, on the GPU if there is one."""
    check_responses(output, "generate")
    require_torch("generating")
    from roll_batching.jobs.inputs import prompt_of, read_prompts
    from roll_batching.jobs.run.saved_model import check_room, open_checkpoint, tokenizer_of

    model = open_checkpoint(checkpoint, pretrain)
    tokenizer = tokenizer_of(model, pretrain)
    encoded = [prompt_of(text, model.config, tokenizer) for text in prompt or ()]
    if prompts or not encoded:
        encoded += read_prompts(model.config, tokenizer, prompts)[:first]
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
    if max_new_tokens is not None:
        check_room(model, encoded, max_new_tokens, tokenizer)
    typer.echo(f"{model.point.path} (phase {model.point.phase}, step {model.point.step})", err=True)
    lines = (
        {
            "prompt": completion.prompt,
            "response": completion.response,
            "finished": completion.finished,
            "response_tokens": completion.tokens,
            "version": model.point.step,
        }
        for rollouts in model.answers(encoded, tokenizer, settings)
        for completion in rollouts.completions
    )
    if output is not None:
        write_lines(output, lines)
        return
    for line in lines:
        end = "" if line["finished"] else " ... (truncated)"
        typer.echo(f"\n> {line['prompt']}\n{line['response']}{end}")


def check_responses(path: Path | None, command: str) -> None:
    """Raises ConfigError if `path` is a file whose first line is no response with the fields that commands write."""
    if path is not None:
        check_replaceable(path, command, _has_responses)


def _has_responses(content: bytes) -> bool:
    try:
        line = json.loads(content.partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(line, dict) and line.keys() >= {"prompt", "response", "finished", "response_tokens", "version"}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write `lines` as a JSONL file and report their number. Raises ConfigError if the file cannot be written."""
    count = 0
    try:
        with atomic_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {cause(error)}") from None
    typer.echo(f"wrote {count} responses into {path}", err=True)
