"""`JobConfig`: the keys of a job with derived values, notices and the places of keys."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr, model_validator

from roll_batching.jobs.config.diagnostics import ConfigFileError, Notice, Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.resolution import resolve
from roll_batching.jobs.config.rules import missing_for_a_run
from roll_batching.jobs.config.yaml_source import Source


class JobConfig(JobKeys):
    """A training job: prompts -> rollouts -> reward -> advantages -> balanced, packed training steps."""

    _notices: tuple[Notice, ...] = PrivateAttr(default=())
    _source: Source | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _resolve(self) -> JobConfig:
        for name, value in resolve(self).items():
            # Settings are frozen; this one is still under construction.
            object.__setattr__(self, name, value)
        return self

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Notices on keys without effect or with another effect, in the order of the file."""
        return self._notices

    def check_runnable(self) -> None:
        """Raises ConfigFileError with all keys that a run needs and this configuration lacks."""
        problems = missing_for_a_run(self)
        if problems:
            raise self.error(*problems)

    def error(self, *problems: Problem) -> ConfigFileError:
        """An error of `problems`, each with file and line of its key."""
        source = self._source
        return ConfigFileError([problem.placed(source.place) if source else problem for problem in problems])

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings as plain data, ready for YAML or JSON."""
        return self.model_dump(mode="json")
