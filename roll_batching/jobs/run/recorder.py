"""Where a run's figures go: its folder, the progress display, the picture and the closing table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll_batching.files import whole_file
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.withheld import without_secrets
from roll_batching.jobs.observe.curves import plot_learning_curve
from roll_batching.jobs.observe.metrics_file import EVENTS, METRICS, MetricsWriter, Row, read_metrics, rows_until
from roll_batching.jobs.observe.progress import ProgressReporter
from roll_batching.jobs.observe.rollouts_file import RolloutsFile, cut_after, end_of_step
from roll_batching.jobs.observe.summary import show_summary, summarize
from roll_batching.jobs.observe.trackers import TrackedRun, tracker_of
from roll_batching.jobs.run_folder import CONFIG, MODEL, EarlierRun, folder_of

CURVE = "learning_curve.png"
_TITLES = {"grpo": "GRPO", "sft": "supervised fine-tuning", "dpo": "learning from pairs"}


class RunRecorder:
    """Writes `output_dir/exp_name`: config.yaml, metrics.jsonl, rollouts.jsonl, tensorboard/, learning_curve.png.

    Nothing is written before `open`. Every method does nothing where `enabled` is False: one rank records.
    """

    def __init__(self, config: JobConfig, *, enabled: bool) -> None:
        self.folder = folder_of(config)
        self._config, self._enabled = config, enabled
        self._phase = ""
        self.progress = ProgressReporter(enabled=enabled)
        self.metrics = MetricsWriter(self.folder, enabled=False)
        self._rollouts = RolloutsFile(self.folder)

    def open(self, earlier: EarlierRun, resume_after: tuple[str, int] | None) -> None:
        """The run begins: `earlier` takes what would be overwritten, and files are opened.

        `resume_after`, (phase, step), keeps the rows up to there; of a file that loses rows a copy is kept. Without it
        the files of an earlier run of this name go. Raises RollBatchingError when a file cannot be read or written.
        """
        if not self._enabled:
            return
        config, metrics = self.folder / CONFIG, self.folder / METRICS
        text = yaml.safe_dump(without_secrets(self._config.to_dict()), sort_keys=False, allow_unicode=True)
        if resume_after is None:
            if earlier.place is not None or (metrics.exists() and metrics.stat().st_size):
                for path in (metrics, self.folder / EVENTS, self.folder / CURVE, self.folder / MODEL, config):
                    earlier.take(path)
                earlier.take(self._rollouts.path)
        else:
            rows = read_metrics(metrics) if metrics.exists() else []
            if len(rows_until(rows, *resume_after)) < len(rows):
                earlier.keep(metrics)
            self._forget(earlier, resume_after[1] if resume_after[0] == "rl" else 0)
            if config.exists() and _settings(config.read_text(encoding="utf-8", errors="replace")) != _settings(text):
                earlier.keep(config)
        with whole_file(config) as partial:
            partial.write_text(text, encoding="utf-8")
        self.metrics = MetricsWriter(self.folder, resume_after=resume_after, tracker=self._tracker())
        if told := earlier.told():
            self.progress.note(told)

    def _forget(self, earlier: EarlierRun, step: int) -> None:
        """Leaves of the rollouts those up to this RL step."""
        path = self._rollouts.path
        if path.exists() and (end := end_of_step(path, step)) < path.stat().st_size:
            earlier.keep(path)
            cut_after(path, end)

    def _tracker(self) -> TrackedRun | None:
        """Where rows go beside the folder."""
        config = self._config
        if config.track_with is None or tracker_of(config.track_with) is None:
            return None
        shown = without_secrets(config.to_dict())
        return TrackedRun(config.track_with, self.folder, config.exp_name, shown, config.tracker_kwargs)

    def start(self, phase: str, steps: int, done: int = 0) -> None:
        """A phase of `steps` steps begins, or goes on after `done` of them."""
        self._phase = phase
        self.progress.start(phase, steps, done)

    def step(
        self, step: int, row: Row, *, shown: Mapping[str, float | None], said: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """A step is over: `row` holds its figures, `shown` those for the progress display, `said` some rollouts."""
        if self._enabled:
            self._rollouts.add({"step": step, **line} for line in said)
        self.metrics.write({"step": step, "phase": self._phase, **row})
        if step % self._config.logging_steps == 0:
            self.progress.advance(step, shown)

    def close(self) -> None:
        """Leave files and display in order, also after an error."""
        self.progress.close()
        self.metrics.close()
        self._rollouts.close()

    def conclude(self, mode: str, model: Path | None) -> None:
        """Draw the learning curve and print the closing table.

        `mode` is the table's line that this run is; `model` is where the trained model was written, if it was.
        """
        if not self._enabled:
            return
        config = self._config
        kind = _TITLES[config.task] if config.max_steps else "supervised"
        title = f"{config.exp_name}: {kind}"
        if config.control != "none":
            title += f", control ({config.control} advantages)"
        plot_learning_curve(self.metrics.rows, self.folder / CURVE, title=title)
        console = self.progress.console
        show_summary(summarize(self.metrics.rows), console, used=mode, title=title)
        console.print(f"metrics, TensorBoard events and learning_curve.png are in {self.folder}", soft_wrap=True)
        if model is not None:
            console.print(f"the trained model is in {model}, for transformers' from_pretrained", soft_wrap=True)


def _settings(text: str) -> list[str]:
    """The lines of a config.yaml; whether it goes on from a checkpoint is no setting of a run."""
    return [line for line in text.splitlines() if not line.startswith("resume_from_checkpoint:")]
