"""Rows to Weights & Biases: `track_with: wandb`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.observe.metrics_file import Row


def require_wandb() -> None:
    """Raises ConfigError, with its cure, where wandb is not installed."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise ConfigError(
            "track_with: wandb needs the package wandb: pip install 'roll-batching[wandb]', or leave track_with out"
        ) from None


class WandbRun:
    """A run of wandb's, to which rows are sent as they are written.

    Its files lie in `folder`; `options` are keywords of `wandb.init` and go before what is chosen here. A resumed job
    begins a run of its own, with the rows from there on.

    Raises:
        ConfigError: wandb is not installed, or refuses `options`.
        RollBatchingError: it cannot start.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        require_wandb()
        import wandb

        chosen = {"project": "roll-batching", "name": name, "dir": str(folder), "config": dict(config)}
        try:
            self._run = wandb.init(**{**chosen, **options})
        except TypeError as error:
            raise ConfigError(f"tracker_kwargs: wandb.init refuses them: {error}") from None
        except Exception as error:  # no login, no network: wandb's own words
            raise RollBatchingError(
                f"wandb cannot start ({type(error).__name__}: {error}): log in, set WANDB_MODE=offline, or leave "
                "track_with out"
            ) from None

    def add(self, row: Row) -> None:
        """Logs the numbers of `row` under the names that TensorBoard has, `phase/column`."""
        numbers = {f"{row['phase']}/{key}": value for key, value in row.items() if isinstance(value, (int, float))}
        self._run.log(numbers)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()
