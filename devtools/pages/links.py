"""Links of the pages: within docs/ mkdocs follows them; what they lead to elsewhere in the repository comes along.

Pages stay as the forge shows them, with links relative to their files. A page of the repository's root gets a place on
the site; other files are copied below ``repository/``, source files as pages.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from .faces import ROOT

# Pages of the root, and their names on the site.
ROOT_PAGES = {
    "README.md": "about.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "repository/LICENSE",
}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<before>(?:\[(?P<name>[\w/]+\.md)(?=\]))?\]\()(?P<target>[^)\s]+)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_SOURCES = {".py", ".toml", ".yaml", ".yml", ".json", ".sbatch"}
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)
_IMAGE = re.compile(r'<img src="(?P<src>[^"]+)"(?: width="(?P<width>\d+)")? alt="(?P<alt>[^"]*)">')
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
_SHOWN = {".html", ".png", ".svg"}  # by browsers, as they are


def place_of(path: PurePosixPath) -> str:
    """The place on the site of a file or folder of the repository, relative to its root."""
    if str(path) in ROOT_PAGES:
        return ROOT_PAGES[str(path)]
    if path.suffix == ".ipynb":
        return "/".join(path.with_suffix(".md").parts[1:])
    if path.parts[0] == "docs":
        return "/".join(path.parts[1:])
    there = ROOT / path
    if there.is_dir():
        return f"repository/{path}/index.md"
    if path.suffix in _SOURCES - {".json"} or path.suffix == ".md":
        return f"repository/{path}.md"
    return f"repository/{path}"


def rewrite_links(markdown: str, real: PurePosixPath, page: str, seen: Callable[[PurePosixPath], None]) -> str:
    """Make the links of a file of the repository, ``real``, those of its ``page`` on the site.

    ``seen`` hears of each file or folder outside of docs/ that a link leads to.

    Raises:
        FileNotFoundError: a link leads to nothing in the repository.
    """

    def follow(found: re.Match[str]) -> str:
        target = found["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return found[0]
        path, mark, anchor = target.partition("#")
        goal = PurePosixPath(os.path.normpath(real.parent / path))
        if goal.parts[0] == ".." or not (ROOT / goal).exists():
            raise FileNotFoundError(f"{real}: the link {target!r} leads to nothing in the repository")
        if goal.parts[0] != "docs":
            seen(goal)
        # The name of a file tells its readers less than its title.
        before = f"[{_title(goal)}](" if found["name"] == goal.name else found["before"]
        return f"{before}{os.path.relpath(place_of(goal), PurePosixPath(page).parent)}{mark}{anchor}"

    return "".join(
        part if part.startswith("```") else _LINK.sub(follow, images_as_markdown(part))
        for part in _FENCE.split(markdown)
    )


@functools.cache
def _title(path: PurePosixPath) -> str:
    found = _TITLE.search((ROOT / path).read_text())
    return found[1] if found else path.name


def images_as_markdown(markdown: str) -> str:
    """Write HTML's images as Markdown's, whose paths mkdocs follows; pictures are of the page's colours."""
    markdown = _PICTURE.sub(
        lambda found: f"![{found['alt']}]({found['light']}#only-light)\n![{found['alt']}]({found['dark']}#only-dark)",
        markdown,
    )
    return _IMAGE.sub(
        lambda found: (
            f"![{found['alt']}]({found['src']})" + (f"{{ width={found['width']} }}" if found["width"] else "")
        ),
        markdown,
    )


def page_of_source(path: PurePosixPath) -> str:
    """A page that shows a file of the repository."""
    languages = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sbatch": "bash"}
    code = f"````{languages.get(path.suffix, '')}\n{(ROOT / path).read_text()}````\n"
    return f"{_UNSEARCHED}# {path.name}\n\n`{path}` of the repository:\n\n{code}"


def page_of_folder(path: PurePosixPath) -> tuple[str, list[PurePosixPath]]:
    """A page that lists the files of a folder, and these files."""
    files = sorted(
        PurePosixPath(file.relative_to(ROOT))
        for file in (ROOT / path).iterdir()
        if file.suffix in _SOURCES | _SHOWN and not file.name.startswith((".", "_"))
    )
    page = place_of(path)
    rows = [f"- [{file.name}]({os.path.relpath(place_of(file), PurePosixPath(page).parent)})" for file in files]
    return "\n".join([f"{_UNSEARCHED}# {path}", "", *rows]) + "\n", files


def plain_fences(markdown: str) -> str:
    """Drop what tests read behind a fence's language (``python torchrun``): other renderers take it for no fence."""
    return re.sub(r"^```(\w+) [\w -]+$", r"```\1", markdown, flags=re.MULTILINE)


def is_page(place: str) -> bool:
    return Path(place).suffix == ".md"
