"""What a written page holds, read with an HTML parser as a browser would."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class ReportPage(HTMLParser):
    """Tags, text outside scripts, and the data of a report."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open: dict[str, str | None] | None = None
        source = path.read_text(encoding="utf-8")
        self.feed(source)
        self.close()
        self.charts: list[dict[str, Any]] = json.loads(self._data("charts"))
        self.records: list[dict[str, Any]] = json.loads(self._data("records"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._open = dict(attrs)
            self.scripts.append((self._open, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        else:
            self.text += data

    def _data(self, name: str) -> str:
        (content,) = [content for attributes, content in self.scripts if attributes.get("id") == name]
        return content

    def trace(self, name: str) -> dict[str, Any]:
        """The one line or area of this name."""
        (trace,) = [
            trace
            for chart in self.charts
            for trace in chart["data"]
            if trace["name"] == name and trace.get("showlegend") is not False
        ]
        return trace
