"""Rehearsal: one rank of a pretended cluster, at real sizes, without a GPU."""

from roll_batching.rehearsal.job import Rehearsal, StageReport, rehearse_job
from roll_batching.rehearsal.process import RehearsalError
from roll_batching.rehearsal.report import lines_of
from roll_batching.rehearsal.task import PhasePeak, RankReport
from roll_batching.rehearsal.totals import StepTotals, totals_of

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
