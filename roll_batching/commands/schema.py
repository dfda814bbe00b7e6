"""`roll-batching schema`: the JSON schema of job files."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of job files, for editors that complete and check them.

    Write it to a file, and name that file in the first line of a job: # yaml-language-server: $schema=job.schema.json
    """
    from roll_batching.jobs.config.json_schema import build_job_schema

    typer.echo(json.dumps(build_job_schema(), indent=2))
