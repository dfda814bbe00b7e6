"""Sends rows of metrics to Weights & Biases or SwanLab (`track_with`)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.observe.run_files import Metrics

logger = logging.getLogger(__name__)

_FOLDER = {"wandb": "dir", "swanlab": "log_dir"}
"""Trackers, and the name of the folder argument of their `init`."""
_OFFLINE = {"wandb": "set WANDB_MODE=offline", "swanlab": "set tracker_kwargs.mode to offline"}


def tracker_of(name: str | None) -> Any:
    """The module of the tracker that `track_with` names, or None.

    Raises ConfigError where it is not installed.
    """
    if name not in _FOLDER:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"track_with: {name} needs the package {name}: pip install 'roll-batching[{name}]', or leave track_with out"
        ) from None


class TrackedRun:
    """A run of the tracker `name`, to which rows are sent as they are written.

    The tracker's files lie in `folder`; `options` are keywords of its `init` and override those set here. A resumed job
    starts a new run of the tracker, with the rows from there on.

    Raises:
        ConfigError: the tracker is not installed, or refuses `options`.
        RollBatchingError: the tracker cannot start.
    """

    def __init__(
        self, name: str, folder: Path, job: str, config: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._name, tracker = name, tracker_of(name)
        arguments = {"project": "roll-batching", "name": job, _FOLDER[name]: str(folder), "config": dict(config)}
        try:
            self._run = tracker.init(**{**arguments, **options})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"tracker_kwargs: {name}.init refuses them: {error}; correct or remove them") from None
        except Exception as error:  # such as no login or no network
            raise RollBatchingError(
                f"{name} cannot start ({type(error).__name__}: {error}): log in, {_OFFLINE[name]}, or leave "
                "track_with out"
            ) from None

    def add(self, row: Metrics) -> None:
        """Log the numbers of `row` under the same names as in TensorBoard, `phase/column`.

        Raises RollBatchingError when the tracker refuses them.
        """
        numbers = {f"{row['phase']}/{key}": value for key, value in row.items() if isinstance(value, (int, float))}
        try:
            self._run.log(numbers)
        except Exception as error:  # of any kind, also of its libraries
            raise RollBatchingError(
                f"{self._name} refuses the step's metrics ({type(error).__name__}: {error}): "
                f"{_OFFLINE[self._name]}, or leave track_with out, then resume the run"
            ) from None

    def close(self) -> None:
        """Finish the run; a failure is only logged, since metrics.jsonl has all rows."""
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("%s cannot finish the run (%s: %s)", self._name, type(error).__name__, error)
