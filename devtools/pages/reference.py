"""The API reference: pages of docs/reference name what is public and show it at work; the site adds docstrings.

On the forge such a page is plain Markdown: a heading with a name, and an example. The site gets the signature and the
docstring between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .faces import PublicName

_HEADING = re.compile(r"^### (\w+)$", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_OPTIONS = "    options:\n      show_root_heading: true\n      show_root_toc_entry: true\n      heading_level: 3\n"


def named_in(markdown: str) -> list[str]:
    """The public names that a page has a heading for, in its order."""
    return _HEADING.findall(_FENCE.sub("", markdown))


def shown_in(markdown: str) -> set[str]:
    """The words of a page's examples."""
    return {word for code in _FENCE.findall(markdown) for word in re.findall(r"\w+", code)}


def insert_docstrings(markdown: str, names: Mapping[str, PublicName]) -> str:
    """Put signature and docstring in the place of each heading that is a public name, whose anchor stays.

    Raises:
        ValueError: a heading names nothing public.
    """

    def directive(found: re.Match[str]) -> str:
        name = found[1]
        if name not in names:
            raise ValueError(f"the reference has a heading {name!r}, which no face exports")
        anchors = "".join(f'<a id="{anchor}"></a>' for anchor in (name.lower(), names[name].dotted))
        return f"{anchors}\n\n::: {names[name].home}\n{_OPTIONS}"

    parts = re.split(_FENCE, markdown)
    return "".join(part if part.startswith("```") else _HEADING.sub(directive, part) for part in parts)


def missing_names(pages: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that no page has a heading for."""
    return sorted(set(names) - {name for text in pages for name in named_in(text)})
