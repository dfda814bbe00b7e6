"""Writes a run's files: settings, metrics, sample log, learning curve; shows progress and the closing table."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll_batching.errors import RollBatchingError
from roll_batching.files import atomic_file
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.plain_data import without_secrets
from roll_batching.jobs.observe.closing import plot_learning_curve, show_summary, summarize
from roll_batching.jobs.observe.progress import ProgressReporter
from roll_batching.jobs.observe.run_files import (
    EVENTS,
    METRICS,
    PLAN,
    RUN_INFO,
    Metrics,
    MetricsWriter,
    RolloutsFile,
    cut_after,
    end_of_step,
    read_metrics,
    rows_until,
    write_plan,
    write_run_info,
)
from roll_batching.jobs.observe.trackers import MLFLOW_RUN, TrackedRun, tracker_of
from roll_batching.jobs.run.folder import ADAPTER, CONFIG, MODEL, PreviousRun
from roll_batching.planning import Plan

CURVE = "learning_curve.png"
_TITLES = {
    "grpo": "GRPO",
    "distill": "distillation",
    "sft": "supervised fine-tuning",
    "dpo": "learning from pairs",
    "kto": "learning from judged answers",
}


class RunRecorder:
    """Writes the files of a run's folder.

    They are config.yaml, run_info.json, metrics.jsonl, rollouts.jsonl, last_plan.json, tensorboard/ and
    learning_curve.png.

    Nothing is written before `open`. With `enabled` False every method is a no-op: one rank records.
    """

    def __init__(self, config: JobConfig, *, enabled: bool) -> None:
        self.folder = config.run_folder
        self._config, self._enabled = config, enabled
        self._phase = ""
        self.progress = ProgressReporter(enabled=enabled)
        self.metrics = MetricsWriter(self.folder, enabled=False)
        self._sample_log = RolloutsFile(self.folder)

    def open(self, previous: PreviousRun, resume_after: tuple[str, int] | None) -> None:
        """Opens the files. Files of an earlier run that would be overwritten go to `previous`.

        With `resume_after`, (phase, step), the rows up to there stay, and a file is copied before it loses rows;
        without it the files of an earlier run of this name are moved. Raises RollBatchingError when a file cannot be
        read or written.
        """
        if not self._enabled:
            return
        for name in (METRICS, CONFIG, RUN_INFO, PLAN, self._sample_log.path.name):
            if (self.folder / name).is_fifo():
                raise RollBatchingError(f"{self.folder / name} is a pipe, and writing waits for its reader: remove it")
        config, metrics = self.folder / CONFIG, self.folder / METRICS
        text = yaml.safe_dump(without_secrets(self._config.to_dict()), sort_keys=False, allow_unicode=True)
        if resume_after is None:
            if previous.target is not None or (metrics.exists() and metrics.stat().st_size):
                for name in (METRICS, EVENTS, CURVE, MODEL, ADAPTER, CONFIG, RUN_INFO, PLAN, MLFLOW_RUN):
                    previous.move(self.folder / name)
                previous.move(self._sample_log.path)
        else:
            rows = read_metrics(metrics) if metrics.exists() else []
            if len(rows_until(rows, *resume_after)) < len(rows):
                previous.copy(metrics)
            self._truncate_sample_log(previous, resume_after[1] if resume_after[0] == "rl" else 0)
            if config.exists() and _settings(config.read_text(encoding="utf-8", errors="replace")) != _settings(text):
                previous.copy(config)
        with atomic_file(config) as partial:
            partial.write_text(text, encoding="utf-8")
        write_run_info(self.folder, [str(notice) for notice in self._config.notices])
        tracker = self._tracker(resumes=resume_after is not None)
        self.metrics = MetricsWriter(self.folder, resume_after=resume_after, tracker=tracker)
        if notice := previous.notice():
            self.progress.note(notice)

    def _truncate_sample_log(self, previous: PreviousRun, step: int) -> None:
        """Keep the lines of rollouts.jsonl up to this RL step."""
        path = self._sample_log.path
        if path.exists() and (end := end_of_step(path, step)) < path.stat().st_size:
            previous.copy(path)
            cut_after(path, end)

    def _tracker(self, *, resumes: bool) -> TrackedRun | None:
        """The run of the tracker that `track_with` names."""
        config = self._config
        if config.track_with is None or tracker_of(config.track_with) is None:
            return None
        settings = without_secrets(config.to_dict())
        name, options = config.track_with, config.tracker_kwargs
        return TrackedRun(name, self.folder, config.exp_name, settings, options, resumes=resumes)

    def start_phase(self, phase: str, steps: int, completed_steps: int = 0) -> None:
        """Show the progress of a phase of `steps` steps, of which `completed_steps` are done."""
        self._phase = phase
        self.progress.start_phase(phase, steps, completed_steps)

    def step(
        self,
        step: int,
        metrics: Metrics,
        *,
        shown: Mapping[str, float | None],
        plan: Plan,
        sample_log: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Records a finished step: metrics, plan, lines of rollouts.jsonl; `shown` goes to the progress display."""
        if self._enabled:
            self._sample_log.add({"step": step, **line} for line in sample_log)
            write_plan(self.folder, plan, phase=self._phase, step=step)
        self.metrics.write({"step": step, "phase": self._phase, **metrics})
        if step % self._config.logging_steps == 0:
            self.progress.advance(step, shown)

    def close(self) -> None:
        """Close the files and the progress display, also after an error."""
        self.progress.close()
        self.metrics.close()
        self._sample_log.close()

    def conclude(self, mode: str, model: Path | None) -> None:
        """Draw the learning curve and print the closing table.

        `mode` is this run's batching mode, a line of the table; `model` is the path of the trained model, if any.
        """
        if not self._enabled:
            return
        config = self._config
        kind = _TITLES[config.task] if config.max_steps else "supervised"
        title = f"{config.exp_name}: {kind}"
        if config.control != "none":
            title += f", control ({config.control} advantages)"
        files = f"metrics, TensorBoard events and {CURVE}"
        if importlib.util.find_spec("matplotlib") is not None:
            plot_learning_curve(self.metrics.rows, self.folder / CURVE, title=title)
        else:
            files = f"metrics and TensorBoard events ({CURVE} needs the extra `plot`)"
        console = self.progress.console
        show_summary(summarize(self.metrics.rows), console, used=mode, title=title)
        console.print(f"{files} are in {self.folder}", soft_wrap=True)
        if model is not None:
            console.print(f"the trained model is in {model}, for transformers' from_pretrained", soft_wrap=True)


def _settings(text: str) -> list[str]:
    """The lines of a config.yaml without `resume_from_checkpoint`, which changes from start to start of one run."""
    return [line for line in text.splitlines() if not line.startswith("resume_from_checkpoint:")]
