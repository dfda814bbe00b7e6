"""What a rehearsal cannot know, as bytes with their reasons."""

from __future__ import annotations

from dataclasses import dataclass

from roll_batching.rehearsal.task import RankReport

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Memory that is needed beside what was counted."""

    bytes: float
    reason: str


def margins_of(report: RankReport, peak: float) -> tuple[Margin, ...]:
    """The margins of one rank that holds `peak` bytes at most."""
    groups = {key.split(" / ")[1] for key in report.collectives if not key.split(" / ")[1].endswith("(1)")}
    passing = peak - sum(report.kept.values())
    return (
        Margin(bytes=1.0 * GIB, reason="CUDA's context, loaded kernels, cuBLAS's workspaces"),
        Margin(bytes=0.3 * GIB * len(groups), reason=f"NCCL's buffers, {len(groups)} communicators of 0.3 GiB"),
        Margin(bytes=0.06 * max(passing, 0), reason="the allocator's fragments, 6% of what comes and goes"),
    )
