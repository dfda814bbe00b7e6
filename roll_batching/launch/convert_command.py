"""`roll-batching convert-config FILE`: NeMo-RL's batching sections as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from roll_batching.compat.nemo_rl import convert_policy
from roll_batching.errors import ConfigError


def convert_config(
    source: Annotated[Path, typer.Argument(help="A NeMo-RL YAML file with a `policy` section.")],
    output: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Write our worker keys for NeMo-RL's `sequence_packing` and `dynamic_batching` sections."""
    if not source.is_file():
        raise ConfigError(f"{source} does not exist or is no file")
    try:
        document = yaml.safe_load(source.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is no YAML: {error}") from None
    policy = document.get("policy", document) if isinstance(document, dict) else None
    if not isinstance(policy, dict) or not {"sequence_packing", "dynamic_batching"} & set(policy):
        raise ConfigError(f"{source} has no policy.sequence_packing and no policy.dynamic_batching section")
    worker, notices = convert_policy(policy)
    text = yaml.safe_dump({"actor_train": worker}, sort_keys=False)
    text = "".join(f"# {notice}\n" for notice in notices) + text
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)
        typer.echo(f"wrote {output}")
