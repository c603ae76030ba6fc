"""Group loose files into samples: find where in a file's name the key ends and the field begins.

WebDataset cuts at the first dot: ``a.jpg`` and ``a.seg.png`` are one sample. But in ``cat.0.jpg`` and ``J. Smith.jpg``
the first dot is part of the name. A name by itself does not tell; all names of a folder mostly do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...loader.columns import KEY_COLUMN
from ...loader.errors import ConfigError, DatasetError
from ...loader.formats.shard import CODEC_SUFFIXES
from ...storage import ObjectInfo

# What is between the first dot and the last ending of a field, such as "seg" in seg.png: words, no numbers.
_WORDS = re.compile(r"[a-z_][a-z0-9_-]*(\.[a-z_][a-z0-9_-]*)*")
_MARKS = ("_", "-", "~")


class _Name(NamedTuple):
    """A file's name: all that lies before the first dot, what lies between, and the last ending; without the dots."""

    path: str
    stem: str
    middle: str
    ending: str

    @property
    def field(self) -> str:
        """The field by WebDataset's rule."""
        return f"{self.middle}.{self.ending}" if self.middle else self.ending


@dataclass(frozen=True, slots=True)
class Grouped:
    """Samples in the order of their keys, each with its files by field; and what the user should know of them."""

    samples: list[tuple[str, dict[str, ObjectInfo]]]
    notes: list[str]


def group_files(files: Sequence[ObjectInfo], url: str, extensions: Sequence[str] | None = None) -> Grouped:
    """The samples that files make. ``extensions``: those of the fields, lower-case; files without one are left out.

    Keys have no dot in their last part, as a tar's readers would cut them there.

    Raises:
        DatasetError: a file has no extension, or that of the key, two files are one field of a sample, or it is not
            clear which files are one sample.
    """
    notes: list[str] = []
    if extensions is None:
        names = [_cut(info.key) for info in files]
        for name in names:
            if not name.ending:
                raise DatasetError(
                    f"{url}/{name.path}: has no extension to name its field; rename or remove it, or say which files "
                    "to take with extensions= (--extensions)"
                )
        endings = _find_endings(names, url)
        cuts = [(name.stem, name.field) if endings is None else _cut_at(name.path, endings) for name in names]
    else:
        cuts = [_cut_at(info.key, extensions) for info in files]
        others = sorted({_cut(info.key).ending for info, cut in zip(files, cuts, strict=True) if cut is None})
        if others:
            others_listed = ", ".join(f".{ending}" if ending else "none" for ending in others[:5])
            count = sum(cut is None for cut in cuts)
            if count == len(files):
                raise DatasetError(
                    f"{url}: no file ends in {' or '.join(extensions)}; their endings are {others_listed}"
                )
            notes.append(f"{count:,} files with other extensions are left out ({others_listed})")
    taken = [(*cut, info) for cut, info in zip(cuts, files, strict=True) if cut is not None]
    keys, mark = _without_dots({key for key, _, _ in taken})
    if mark:
        dotted, field, info = next(
            each for each in sorted(taken, key=lambda each: each[:2]) if each[0] != keys[each[0]]
        )
        notes.append(
            f"dots in names belong to the key, as {mark!r}: {info.key} is field {field!r} of sample {keys[dotted]!r}"
        )
    samples: dict[str, dict[str, ObjectInfo]] = {}
    for key, field, info in sorted(taken, key=lambda each: each[:2]):
        if field == KEY_COLUMN:
            raise DatasetError(f"{url}/{info.key}: the field {field!r} is the sample's key; rename the file")
        fields = samples.setdefault(keys[key], {})
        if field in fields:
            raise DatasetError(f"{url}/{info.key}: sample {key!r} has two files for field {field!r}")
        fields[field] = info
    return Grouped(list(samples.items()), notes)


def read_extensions(given: Iterable[str] | str) -> tuple[str, ...]:
    """Extensions as they are compared: lower-case, without a dot in front. Raises ConfigError."""
    names = tuple(
        str(each).strip().lower().removeprefix(".") for each in ([given] if isinstance(given, str) else given)
    )
    if not names or not all(names) or any("/" in name for name in names):
        raise ConfigError(f"extensions={given!r}: give endings of files, such as ['jpg', 'seg.png']")
    return names


def _cut(path: str) -> _Name:
    folder, slash, base = path.rpartition("/")
    stem, _, rest = base.partition(".")
    rest = rest.lower()
    middle, _, ending = rest.rpartition(".")
    if middle and f".{ending}" in CODEC_SUFFIXES:  # nii.gz is one ending
        middle, _, before = middle.rpartition(".")
        ending = f"{before}.{ending}"
    return _Name(path, f"{folder}{slash}{stem}", middle, ending)


def _cut_at(path: str, endings: Collection[str]) -> tuple[str, str] | None:
    """Key and field of a file, by the longest of the endings; None if it has none."""
    base = path.rpartition("/")[2].lower()
    parts = base.split(".")
    for start in range(1, len(parts)):
        ending = ".".join(parts[start:])
        if ending in endings and len(ending) + 1 < len(base):
            return path[: -len(ending) - 1], ending
    return None


def _find_endings(names: Sequence[_Name], url: str) -> frozenset[str] | None:
    """The endings that are fields where dots are part of some names; None where WebDataset's rule holds for all.

    A middle of words is part of a field if the sample has a file without one (``a.jpg`` beside ``a.seg.png``), or if
    other samples have that field too; there are no more such fields than samples. Another middle, a number perhaps, is
    part of the name, but where several samples all have the same of them, as views have.

    Raises:
        DatasetError: it is not clear.
    """
    dotted = [name for name in names if name.middle]
    if not dotted:
        return None
    plain = {name.stem for name in names if not name.middle}
    counts = Counter(name.field for name in dotted)
    words = [name for name in dotted if _WORDS.fullmatch(name.middle)]
    fields = {name for name in words if name.stem in plain or counts[name.field] > 1 or len(names) == 1}
    unclear = _find_too_many([name for name in words if name.stem not in plain], fields)
    others = [name for name in dotted if name not in fields]
    unclear = unclear or next((name for name in others if name.stem in plain), None) or _find_view(others)
    if unclear is not None:
        raise DatasetError(_ask(unclear, url))
    if not others:
        return None
    of_names = {name.ending for name in others} | {name.ending for name in names if not name.middle}
    endings = frozenset(of_names | {name.field for name in fields})
    cuts = {name: _cut_at(name.path, endings) or (name.stem, name.field) for name in names}
    sizes = Counter(key for key, _ in cuts.values())
    unclear = next((name for name in fields if sizes[cuts[name][0]] < 2), None)
    if unclear is not None:
        raise DatasetError(_ask(unclear, url))
    return endings


def _find_too_many(alone: Sequence[_Name], fields: Collection[_Name]) -> _Name | None:
    """One of the files ``alone``, without a plain one beside them, if as fields they were more than their samples."""
    grouped = [name for name in alone if name in fields]
    if len({name.stem for name in alone}) == 1 < len(alone):
        return alone[0]
    return grouped[0] if len({name.field for name in grouped}) > len({name.stem for name in grouped}) else None


def _find_view(names: Sequence[_Name]) -> _Name | None:
    """One of the names, if they may be views of samples: all of many samples have the same middles, two or more."""
    middles: dict[str, set[str]] = {}
    for name in names:
        middles.setdefault(name.stem, set()).add(name.middle)
    first = next(iter(middles.values()), set[str]())
    is_grid = 1 < len(first) < len(middles) and all(found == first for found in middles.values())
    return names[0] if is_grid else None


def _ask(name: _Name, url: str) -> str:
    base = name.path.rpartition("/")[2]
    stem = name.stem.rpartition("/")[2]
    longer = base[: -len(name.ending) - 1]
    return (
        f"{url}: the names do not tell where the key ends: {name.path} may be field {name.field!r} of sample {stem!r}, "
        f"or field {name.ending!r} of sample {longer!r}; say which endings are fields, with "
        f"extensions=[{name.ending!r}] (--extensions {name.ending}) for the latter; for the former name {name.field!r} "
        "there, and all others"
    )


def _without_dots(keys: Collection[str]) -> tuple[Mapping[str, str], str]:
    """Each key without dots in its last part, all still different; and what is in their place, '' if there are none."""
    dotted = {key for key in keys if "." in key.rpartition("/")[2]}
    if not dotted:
        return {key: key for key in keys}, ""
    marks = iter(_MARKS)
    mark = next(marks)
    while True:
        found = {key: _with_mark(key, mark) if key in dotted else key for key in keys}
        if len(set(found.values())) == len(found):
            return found, mark
        mark = next(marks, mark + "_")


def _with_mark(key: str, mark: str) -> str:
    folder, slash, base = key.rpartition("/")
    return f"{folder}{slash}{base.replace('.', mark)}"
