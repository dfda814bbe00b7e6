"""Where a run's figures go: its folder, the progress display, the picture and the closing table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from roll_batching.config import JobConfig
from roll_batching.observe.curves import plot_learning_curve
from roll_batching.observe.metrics import MetricsWriter, Row
from roll_batching.observe.progress import ProgressReporter
from roll_batching.observe.summary import show_summary, summarize


class RunRecorder:
    """Writes `output_dir/exp_name`: config.yaml, metrics.jsonl, tensorboard/, learning_curve.png.

    Every method does nothing where `enabled` is False: one rank records. `resume_after`, (phase, step), keeps the
    rows up to there and cuts off the later ones; without it the rows of an earlier run of this name go.
    """

    def __init__(self, config: JobConfig, *, enabled: bool, resume_after: tuple[str, int] | None = None) -> None:
        self.folder = self.folder_of(config)
        self._config, self._enabled = config, enabled
        self._phase = ""
        self.progress = ProgressReporter(enabled=enabled)
        if enabled:
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)  # of an earlier run of this name
            self.folder.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
            (self.folder / "config.yaml").write_text(text, encoding="utf-8")
        self.metrics = MetricsWriter(self.folder, enabled=enabled, resume_after=resume_after)

    @staticmethod
    def folder_of(config: JobConfig) -> Path:
        """Where a run leaves its files."""
        return Path(config.output_dir) / config.exp_name

    def start(self, phase: str, steps: int, done: int = 0) -> None:
        """A phase of `steps` steps begins, or goes on after `done` of them."""
        self._phase = phase
        self.progress.start(phase, steps, done)

    def step(self, step: int, row: Row, *, shown: Mapping[str, float | None]) -> None:
        """A step is over: `row` holds its figures, `shown` those for the progress display."""
        self.metrics.write({"step": step, "phase": self._phase, **row})
        if step % self._config.logging_steps == 0:
            self.progress.advance(step, shown)

    def close(self) -> None:
        """Leave files and display in order, also after an error."""
        self.progress.close()
        self.metrics.close()

    def conclude(self, mode: str) -> None:
        """Draw the learning curve and print the closing table. `mode` is the table's line that this run is."""
        if not self._enabled:
            return
        config = self._config
        title = f"{config.exp_name}: GRPO" if config.max_steps else f"{config.exp_name}: supervised"
        if config.control != "none":
            title += f", control ({config.control} advantages)"
        plot_learning_curve(self.metrics.rows, self.folder / "learning_curve.png", title=title)
        console = self.progress.console
        show_summary(summarize(self.metrics.rows), console, used=mode, title=title)
        console.print(f"metrics, TensorBoard events and learning_curve.png are in {self.folder}", soft_wrap=True)
