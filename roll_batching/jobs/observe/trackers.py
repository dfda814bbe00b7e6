"""Sends rows of metrics to Weights & Biases, SwanLab, MLflow or Trackio (`track_with`)."""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.observe.run_files import Metrics, iterate_leaves

logger = logging.getLogger(__name__)

MLFLOW_RUN = "mlflow_run_id"
"""File of a run's folder: the id of its run of MLflow."""
_FOLDER = {"wandb": "dir", "swanlab": "log_dir"}
"""Trackers whose files lie in the run's folder, and the name of the folder argument of their `init`."""
_OFFLINE = {
    "wandb": "set WANDB_MODE=offline",
    "swanlab": "set tracker_kwargs.mode to offline",
    "mlflow": "set tracker_kwargs.tracking_uri to sqlite:///mlflow.db",
    "trackio": "set neither server_url nor space_id, which keeps rows on this machine",
}
_EXPERIMENT_KEYS = {"experiment_id", "run_id"}
_EXPERIMENT_VARIABLES = {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}
"""Keys and variables that choose the experiment without `experiment_name`."""
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w./: -]")


def tracker_of(name: str | None) -> Any:
    """The module of the tracker that `track_with` names, or None.

    Raises ConfigError where it is not installed.
    """
    if name not in _OFFLINE:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"track_with: {name} needs the package {name}: pip install 'roll-batching[{name}]', or leave track_with out"
        ) from None


class TrackedRun:
    """A run of the tracker `name`, to which rows are sent as they are written.

    Files of wandb and swanlab lie in `folder`. `options` are keywords of `init`, or of mlflow's `start_run` with
    `tracking_uri` and `experiment_name`; they override those set here. A resumed job (`resumes`) continues its run of
    mlflow, and the last run of its name of trackio; in the others it starts a new run, with the rows from there on.

    Raises:
        ConfigError: the tracker is not installed, or refuses `options`.
        RollBatchingError: the tracker cannot start.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        job: str,
        config: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        resumes: bool = False,
    ) -> None:
        self._name, tracker = name, tracker_of(name)
        arguments = {"project": "roll-batching", "name": job, "config": dict(config)}
        try:
            if name == "mlflow":
                self._run: Any = _MlflowRun(tracker, folder, config, {"run_name": job, **options}, resumes=resumes)
            elif name == "trackio":
                resume = "allow" if resumes else "never"
                self._run = _start_trackio(tracker, {**arguments, "resume": resume, **options})
            else:
                self._run = tracker.init(**{**arguments, _FOLDER[name]: str(folder), **options})
        except (TypeError, ValueError) as error:
            call = "start_run" if name == "mlflow" else "init"
            raise ConfigError(f"tracker_kwargs: {name}.{call} refuses them: {error}; correct or remove them") from None
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
        step = {} if self._name in _FOLDER else {"step": row["step"]}  # those need steps that grow across phases
        try:
            self._run.log(numbers, **step)
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


class _MlflowRun:
    """The active run of MLflow, with the methods of a run of the other trackers."""

    def __init__(
        self, mlflow: Any, folder: Path, config: Mapping[str, Any], options: dict[str, Any], *, resumes: bool
    ) -> None:
        self._mlflow, id_file = mlflow, folder / MLFLOW_RUN
        if uri := options.pop("tracking_uri", None):
            mlflow.set_tracking_uri(uri)
        experiment = options.pop("experiment_name", None)
        if resumes and id_file.exists() and self._has_run(run_id := id_file.read_text()):
            options = {"run_id": run_id, **options}
        elif experiment or not (_EXPERIMENT_KEYS & options.keys() or _EXPERIMENT_VARIABLES & os.environ.keys()):
            name = experiment or "roll-batching"
            known = mlflow.get_experiment_by_name(name)
            options["experiment_id"] = known.experiment_id if known else mlflow.create_experiment(name)
        run = mlflow.start_run(**options)
        self._id = run.info.run_id
        id_file.write_text(self._id)
        if not run.data.params:  # a continued run keeps its own: MLflow refuses other values
            mlflow.log_params({_NOT_IN_MLFLOW_NAMES.sub("_", key): value for key, value in iterate_leaves(config)})

    def _has_run(self, run_id: str) -> bool:
        """Whether the store has this run; it has not after a change of `tracking_uri`."""
        try:
            return bool(self._mlflow.get_run(run_id))
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("mlflow has no run %s of this job at %s: a new one", run_id, self._mlflow.get_tracking_uri())
            return False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        metrics = {_NOT_IN_MLFLOW_NAMES.sub("_", key): value for key, value in numbers.items()}
        self._mlflow.log_metrics(metrics, step=step, run_id=self._id)

    def finish(self) -> None:
        self._mlflow.end_run()


def _start_trackio(trackio: Any, arguments: dict[str, Any]) -> Any:
    """Starts a run of Trackio. Raises ConnectionError for what makes Trackio warn and go on without its server."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trackio.init(**arguments)
    failures = [text for each in caught if (text := str(each.message)).startswith("trackio.init() could not")]
    if failures:
        run.finish()
        raise ConnectionError(failures[0])
    return run
