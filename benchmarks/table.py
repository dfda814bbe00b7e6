"""What a figure of `bench_streams.py` comes to: a table, and the limits that it misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """One figure's table. `require` notes a limit and whether it holds."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """A line of the table."""
        self.rows.append([str(cell) for cell in cells])

    def require(self, holds: bool, words: str) -> None:
        """`words` say what must hold, with the figure that was found."""
        self.checks.append((words, bool(holds)))

    @property
    def missed(self) -> list[str]:
        """The limits that do not hold."""
        return [words for words, holds in self.checks if not holds]

    def show(self) -> None:
        """Prints the table in Markdown, then every limit."""
        print(f"\n{self.title}\n")
        for line in (self.header, ["---"] * len(self.header), *self.rows):
            print("| " + " | ".join(line) + " |")
        print()
        for words, holds in self.checks:
            print(f"{'holds ' if holds else 'MISSED'}  {words}", flush=True)
