"""`roll-batching convert-config FILE`: NeMo-RL's batching sections as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from roll_batching.compat.nemo_rl import convert_policy
from roll_batching.config.yaml_source import read_yaml
from roll_batching.errors import ConfigError, PlanError
from roll_batching.files import whole_file


def convert_config(
    source: Annotated[Path, typer.Argument(help="A NeMo-RL YAML file with a `policy` section.")],
    output: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Write our worker keys for NeMo-RL's `sequence_packing` and `dynamic_batching` sections."""
    document = read_yaml(source).data
    policy = document.get("policy", document)
    if not isinstance(policy, dict) or not {"sequence_packing", "dynamic_batching"} & set(policy):
        raise ConfigError(f"{source} has no policy.sequence_packing and no policy.dynamic_batching section")
    try:
        worker, notices = convert_policy(policy)
    except PlanError as error:
        raise ConfigError(f"{source}: {error}") from None
    text = yaml.safe_dump({"actor_train": worker}, sort_keys=False)
    text = "".join(f"# {notice}\n" for notice in notices) + text
    if output is None:
        typer.echo(text, nl=False)
    else:
        try:
            with whole_file(output) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
        typer.echo(f"wrote {output}")
