"""Writes the pages of the documentation site: python scripts/site_pages.py FOLDER.

Pages link to each other, and to files of the repository outside docs/, by relative paths, as a browser of the
repository needs them. Here README.md becomes the first page, CHANGELOG.md and CONTRIBUTING.md become pages, and every
other linked file becomes a page below `repository/` that shows it. Links are rewritten accordingly.
scripts/docs_site.sh builds the site from these pages.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside docs/ with a page of their own."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def resolve(origin: str, link: str) -> tuple[str, str] | None:
    """A link's file, relative to the root, and its anchor; None for links to other sites and inside the page.

    Raises FileNotFoundError for a file that does not exist.
    """
    name, hash_mark, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), name))
    if target.startswith("..") or not (ROOT / target).is_file():
        raise FileNotFoundError(f"{origin} links to {link}, which is no file of the repository")
    return target, hash_mark + anchor


def page_of(target: str) -> str:
    """The path in the site's sources of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in PAGES:
        return PAGES[target]
    return f"repository/{target}" if target.endswith(".md") else f"repository/{target}.md"


def rewrite(origin: str, text: str) -> tuple[str, set[str]]:
    """The text of a page with links to the site's pages, and the files of the repository that it links to."""
    folder, linked = posixpath.dirname(page_of(origin)) or ".", set()

    def replaced(match: re.Match[str]) -> str:
        resolved = resolve(origin, match[2])
        if resolved is None:
            return match[0]
        target, anchor = resolved
        linked.add(target)
        return match[1] + posixpath.relpath(page_of(target), folder) + anchor + match[3]

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts), linked


def shown(target: str, text: str) -> str:
    """A page that shows a file which is not Markdown."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"# {target}\n\n{fence}{LANGUAGES.get(Path(target).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def write_pages(folder: Path) -> None:
    """Writes docs/ and the pages of files outside it, found by following links, into a new folder."""
    shutil.copytree(ROOT / "docs", folder)
    waiting = [*PAGES, *(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md"))]
    seen = set(waiting)
    while waiting:
        target = waiting.pop()
        text = (ROOT / target).read_text()
        content, linked = rewrite(target, text) if target.endswith(".md") else (shown(target, text), set())
        if not target.startswith("docs/"):
            content = f"---\nsource: {target}\n---\n{content}"  # for the link that edits the page
        page = folder / page_of(target)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content)
        new = sorted(file for file in linked - seen if not file.startswith("docs/"))  # all of docs/ is there
        seen.update(new)
        waiting.extend(new)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
