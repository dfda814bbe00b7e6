"""A Markdown table with limits that must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """Table of one benchmark; `require` records a limit and whether it holds."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row."""
        self.rows.append([str(cell) for cell in cells])

    def require(self, holds: bool, message: str) -> None:
        """Record a limit; `message` states it with the measured figure."""
        self.checks.append((message, bool(holds)))

    @property
    def missed(self) -> list[str]:
        """Messages of the limits that do not hold."""
        return [message for message, holds in self.checks if not holds]

    def show(self) -> None:
        """Print the table in Markdown, then every limit."""
        print(f"\n{self.title}\n")
        for line in (self.header, ["---"] * len(self.header), *self.rows):
            print("| " + " | ".join(line) + " |")
        print()
        for message, holds in self.checks:
            print(f"{'holds ' if holds else 'MISSED'}  {message}", flush=True)
