"""Subsets of a data set of the Hugging Face Hub ("configs"), as the front matter of its README.md lists them.

Each is a data set of its own: questions in two styles, languages, sizes. The layout is that of
https://huggingface.co/docs/hub/datasets-manual-configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DatasetError
from .listing import README_NAME, fixed_prefix, match_glob

if TYPE_CHECKING:
    from ...storage import ObjectInfo

_KEY = re.compile(r"""(?:"([^"]*)"|'([^']*)'|([^\s"'\[{#&*!|>%@-][^:#]*?))\s*:(?:\s+(.*))?$""")
_Line = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Subset:
    """A subset: the globs that its shards fit, and whether it is the one that is read where none is named."""

    name: str
    patterns: tuple[str, ...]
    is_default: bool


def choose_subset(url: str, subsets: Sequence[Subset], objects: Sequence[ObjectInfo]) -> set[str] | None:
    """The keys of the default subset; None where the objects are of no more than one.

    Raises:
        DatasetError: there are several, and none is the default; names them, and what to do.
    """
    keys = {
        subset: {info.key for pattern in subset.patterns for info in match_glob(pattern, objects)} for subset in subsets
    }
    there = [subset for subset in subsets if keys[subset]]
    if len(there) < 2:
        return None
    default = next((subset for subset in there if subset.is_default), None)
    if default is not None:
        return keys[default]
    root = url.rstrip("/") + "/"
    listed = "; ".join(f"{subset.name} ({', '.join(subset.patterns)})" for subset in there)
    first = there[0]
    folder = _folder(first)
    if folder and all(not key.startswith(folder) for subset in there[1:] for key in keys[subset] - keys[first]):
        way = f"its folder, such as {root}{folder.rstrip('/')}"
    else:
        way = f"a list of its patterns, such as {root}{first.patterns[0]}"
    raise DatasetError(
        f"{root}: holds several subsets, by its {README_NAME}: {listed}. Choose one by {way}; {root}** reads all of "
        "them"
    )


def _folder(subset: Subset) -> str:
    """The folder that all patterns of a subset lie in; '' if there is none."""
    folders = {fixed_prefix(pattern).rpartition("/")[0] for pattern in subset.patterns}
    return f"{folders.pop()}/" if len(folders) == 1 and folders != {""} else ""


def read_subsets(text: str) -> list[Subset]:
    """The subsets that the text of a README.md lists, [] where it lists none.

    Raises:
        ValueError: it lists some in a way that is not understood.
    """
    configs = _front_matter(text).get("configs")
    if configs is None:
        return []
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ValueError("configs: is no list of mappings")
    return [
        Subset(
            str(config.get("config_name", "default")),
            tuple(_patterns(config)),
            config.get("default") == "true" or config.get("config_name") == "default",
        )
        for config in configs
    ]


def _patterns(config: Mapping[str, Any]) -> Iterator[str]:
    folder = str(config.get("data_dir") or "").strip("/")
    files = config.get("data_files")
    if files is None:
        yield f"{folder}/**" if folder else "**"
        return
    parts: Any = files.values() if isinstance(files, dict) else files
    for part in [parts] if isinstance(parts, str) else parts:
        paths = part.get("path", []) if isinstance(part, dict) else part
        for path in paths if isinstance(paths, list) else [paths]:
            # ``**`` beside other characters is a star to the Hub.
            relative = re.sub(r"(?<=[^/])\*\*|\*\*(?=[^/])", "*", str(path).removeprefix("./"))
            yield f"{folder}/{relative}" if folder else relative


def _front_matter(text: str) -> dict[str, Any]:
    """Return the ``configs`` between two lines of dashes at the beginning; nothing else there is parsed."""
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    stop = next((number for number, line in enumerate(lines) if number and line.rstrip() == "---"), 0)
    start = next((number for number in range(1, stop) if re.match(r"configs\s*:", lines[number])), None)
    if start is None:
        return {}
    block: list[_Line] = []
    for number in range(start, stop):
        line = _without_comment(lines[number])
        bare = line.lstrip(" ")
        if number > start and bare and line == bare and not bare.startswith("- ") and bare != "-":
            break  # the next key
        if bare:
            block.append((len(line) - len(bare), bare))
    value, rest = _parse(block, 0)
    if rest < len(block) or not isinstance(value, dict):
        raise ValueError(f"not understood: {block[rest][1] if rest < len(block) else block[0][1]!r}")
    return value


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#[^\"']*$", "", line).rstrip()


def _parse(lines: list[_Line], at: int) -> tuple[Any, int]:
    """The value that begins at a line, a mapping or list in YAML's block style, and the line after it."""
    indent, first = lines[at]
    if first == "-" or first.startswith("- "):
        items: list[Any] = []
        while at < len(lines) and lines[at][0] == indent and (lines[at][1] == "-" or lines[at][1].startswith("- ")):
            inner = lines[at][1][1:].lstrip(" ")
            if not inner:
                item, at = _parse_below(lines, at + 1, indent)
            elif _KEY.match(inner):
                lines = [*lines]
                lines[at] = (indent + len(lines[at][1]) - len(inner), inner)
                item, at = _parse(lines, at)
            else:
                item, at = _scalar(inner), at + 1
            items.append(item)
        return items, at
    mapping: dict[str, Any] = {}
    while at < len(lines) and lines[at][0] == indent:
        match = _KEY.match(lines[at][1])
        if match is None:
            raise ValueError(f"not understood: {lines[at][1]!r}")
        key = next(group for group in match.groups()[:3] if group is not None)
        if match[4]:
            mapping[key], at = _scalar(match[4]), at + 1
        else:
            is_list = at + 1 < len(lines) and lines[at + 1][0] == indent and lines[at + 1][1].startswith("-")
            mapping[key], at = _parse(lines, at + 1) if is_list else _parse_below(lines, at + 1, indent)
    return mapping, at


def _parse_below(lines: list[_Line], at: int, indent: int) -> tuple[Any, int]:
    return _parse(lines, at) if at < len(lines) and lines[at][0] > indent else (None, at)


def _scalar(text: str) -> Any:
    """A plain or quoted text, or a list of these in brackets."""
    text = text.strip()
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"not understood: {text!r}")
        return [_scalar(part) for part in text[1:-1].split(",") if part.strip()]
    if text[:1] in ("{", "&", "*", "|", ">", "!"):
        # A plain glob may begin with a star; YAML wants it quoted, and the Hub's own reader refuses it.
        raise ValueError(f"not understood: {text!r}")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text
