"""Parts of the page: a section with charts and tables, or the reason why it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from roll_batching.tools.report.charts import Chart


@dataclass(frozen=True)
class Table:
    """A table of texts, which the page escapes."""

    head: Sequence[str]
    records: Sequence[Sequence[str]]
    title: str = ""
    marked: frozenset[int] = frozenset()
    """Records that are emphasised: settings that differ between two runs."""


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Titles and items of lists."""
    has_rollouts: bool = False
    absent: Sequence[str] = field(default=())
    """What is left out of it, as sentences."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.tables or self.lists or self.has_rollouts)
