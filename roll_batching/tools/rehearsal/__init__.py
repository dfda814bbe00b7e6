"""Rehearsal: one rank of each pipeline stage of a job, at real sizes, on fake tensors and without a GPU."""

from roll_batching.tools.rehearsal.job import Rehearsal, StageReport, StepTotals, rehearse_job, totals_of
from roll_batching.tools.rehearsal.process import RehearsalError
from roll_batching.tools.rehearsal.report import lines_of
from roll_batching.tools.rehearsal.task import PhasePeak, RankReport

__all__ = [
    "PhasePeak",
    "RankReport",
    "Rehearsal",
    "RehearsalError",
    "StageReport",
    "StepTotals",
    "lines_of",
    "rehearse_job",
    "totals_of",
]
