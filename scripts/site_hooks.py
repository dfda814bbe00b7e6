"""Hooks of mkdocs for a site whose links are those of the repository.

Pages link to each other, and to files of the repository outside docs/, by relative paths, as a browser of the
repository needs them. Here README.md becomes the first page, CHANGELOG.md and CONTRIBUTING.md become pages, and every
other linked file becomes a page below `repository/` that shows it. Links are rewritten accordingly.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside docs/ with a page of their own."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def resolve(origin: str, link: str) -> tuple[str, str] | None:
    """A link's file, relative to the root, and its anchor; None for links to other sites and inside the page.

    Raises PluginError for a file that does not exist.
    """
    name, hash_mark, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), name))
    if target.startswith("..") or not (ROOT / target).is_file():
        raise PluginError(f"{origin} links to {link}, which is no file of the repository")
    return target, hash_mark + anchor


def page_of(target: str) -> str:
    """The path in the site's sources of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in PAGES:
        return PAGES[target]
    return f"repository/{target}" if target.endswith(".md") else f"repository/{target}.md"


def links_of(origin: str, text: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for part in CODE.split(text)[::2]:
        for match in LINK.finditer(part):
            if resolved := resolve(origin, match[2]):
                yield resolved[0]


def rewrite(origin: str, page: str, text: str) -> str:
    """The text of a page, with links to the site's pages."""

    def replaced(match: re.Match[str]) -> str:
        resolved = resolve(origin, match[2])
        if resolved is None:
            return match[0]
        target, anchor = resolved
        return match[1] + posixpath.relpath(page_of(target), posixpath.dirname(page) or ".") + anchor + match[3]

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def shown(target: str, text: str) -> str:
    """A page that shows a file which is not Markdown."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"# {target}\n\n{fence}{LANGUAGES.get(Path(target).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of files outside docs/, found by following links."""
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        target = waiting.pop()
        text = (ROOT / target).read_text()
        if target.endswith(".md"):
            new = sorted(set(links_of(target, text)) - seen)
            seen.update(new)
            waiting.extend(file for file in new if not file.startswith("docs/img/"))
        if not target.startswith("docs/"):
            content = rewrite(target, page_of(target), text) if target.endswith(".md") else shown(target, text)
            files.append(File.generated(config, page_of(target), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites the links of the pages of docs/; generated pages have theirs already."""
    if page.file.generated_by:
        return markdown
    return rewrite(f"docs/{page.file.src_uri}", page.file.src_uri, markdown)
