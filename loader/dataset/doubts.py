"""Doubts that the names of shards raise: missing shards, and shards that hold the same samples twice.

``NAME-00000-of-00012``, as TensorFlow, Beam, the Hugging Face Hub and T5X write them, says how many there are. One name
with two endings, ``a.jsonl`` beside ``a.jsonl.gz``, is one shard in two forms. Nothing is read here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...storage import ObjectInfo
from ..errors import DatasetError
from .listing import match_glob

_NUMBERED = re.compile(r"(.*?)(\d{1,18})([-_])of\3(\d{1,18})(?!\d)(.*)", re.DOTALL)
_HASH = re.compile(r"-[0-9a-f]{8,}$")
_NAMED = 5
_MOST = 10_000_000  # shards of one name; a larger total is a number of something else


class DoubtfulDatasetWarning(UserWarning):
    """A data set can be read, but its contents suggest that some of it is missing, or comes twice."""


def warn_doubt(text: str) -> None:
    warnings.warn(text, DoubtfulDatasetWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A shard called ``head``, number, "-of-", ``total``, ``rest``, and its format's ending; ``rest`` may be a hash."""

    key: str
    head: str
    digits: str
    dash: str
    total: str
    rest: str
    ending: str

    @property
    def number(self) -> int:
        return int(self.digits)

    @property
    def name(self) -> tuple[str, str]:
        """The prefix that all shards of one list share, and their suffix unless it is a hash."""
        return self.head, "" if self.is_hashed else self.rest

    @property
    def is_hashed(self) -> bool:
        return _HASH.fullmatch(self.rest) is not None

    def call(self, number: int) -> str:
        """The key of another shard of the list."""
        rest = "-*" if self.is_hashed else self.rest
        return f"{self.head}{number:0{len(self.digits)}d}{self.dash}of{self.dash}{self.total}{rest}{self.ending}"


def heed_names(
    url: str,
    keys: Iterable[str],
    suffixes: Sequence[str],
    tell: Callable[[str], None] = warn_doubt,
    *,
    globs: Sequence[str] = (),
) -> None:
    """Refuse shards that come twice by their names, and ``tell`` of those that are missing.

    ``keys`` leave out shards that the caller named one by one: those are as he wants them. With ``globs``, shards that
    come twice get a warning instead of a refusal, and shards that fit none of the globs are not missed.

    Raises:
        DatasetError: names the shards, and what to do.
    """
    stems = _cut_suffixes(list(keys), suffixes)
    numbered = _find_numbered(stems)
    doubled = _find_forms(stems) or _find_writings(numbered)
    root = url.rstrip("/") + "/"
    if doubled and not globs:
        raise DatasetError(
            f"{root}: {doubled}, and samples would come twice. Remove what is not wanted, or name the shards by a "
            f"pattern or a list; {root}** reads all of them"
        )
    if doubled:
        tell(f"{root}: {doubled}; the pattern fits both, so samples may come twice")
    missing = _find_missing(numbered)
    if missing and globs:
        infos = [ObjectInfo(key, 0) for key in missing]
        fitting = {info.key for glob in globs for info in match_glob(glob, infos)}
        missing = [key for key in missing if key in fitting]
    if missing:
        more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        are = "is" if len(missing) == 1 else "are"
        tell(
            f"{root}: {', '.join(missing[:_NAMED])}{more} {are} missing, as the names of the other shards tell; it is "
            "read without. Where a part is wanted, a pattern or a list that names it alone says so"
        )


def _cut_suffixes(keys: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, str]]:
    """Keys, each as what is before the format's ending, and that ending."""
    longest = sorted(suffixes, key=len, reverse=True)
    cut = []
    for key in keys:
        lower = key.lower()
        length = next((len(suffix) for suffix in longest if lower.endswith(suffix)), 0)
        cut.append((key[: len(key) - length], key[len(key) - length :]))
    return cut


def _find_numbered(stems: Sequence[tuple[str, str]]) -> list[_Numbered]:
    found = []
    for stem, ending in stems:
        match = _NUMBERED.fullmatch(stem) if "of" in stem else None
        if match is not None and "/" not in match[5] and 0 < int(match[4]) < _MOST:
            head, digits, dash, total, rest = match.groups()
            found.append(_Numbered(stem + ending, head, digits, dash, total, rest, ending))
    return found


def _find_forms(stems: Sequence[tuple[str, str]]) -> str:
    """Describe a shard that is stored in two forms; "" if there is none."""
    if len({ending for _, ending in stems}) < 2:
        return ""
    known: dict[str, str] = {}
    pairs = [(stem + known[stem], stem + ending) for stem, ending in stems if known.setdefault(stem, ending) != ending]
    return f"{' and '.join(pairs[0])} are one shard in two forms, by their names{_more(len(pairs))}" if pairs else ""


def _find_writings(numbered: Sequence[_Numbered]) -> str:
    """Describe two writings of one list of shards, side by side; "" if there are none."""
    totals: dict[tuple[str, str], _Numbered] = {}
    places: dict[tuple[tuple[str, str], int, str], _Numbered] = {}
    pairs = []
    for shard in numbered:
        first = totals.setdefault(shard.name, shard)
        same = places.setdefault((shard.name, shard.number, shard.ending), shard)
        if first.total != shard.total:
            pairs.append((first.key, shard.key))
        elif same is not shard:
            pairs.append((same.key, shard.key))
    if not pairs:
        return ""
    return f"{' and '.join(pairs[0])} are of two writings of one data set, by their names{_more(len(pairs))}"


def _more(count: int) -> str:
    return f" (and {count - 1:,} more)" if count > 1 else ""


def _find_missing(numbered: Sequence[_Numbered]) -> list[str]:
    """The keys of shards that are missing from their lists, in order."""
    lists: dict[tuple[tuple[str, str], str], dict[int, _Numbered]] = {}
    for shard in numbered:
        lists.setdefault((shard.name, shard.total), {})[shard.number] = shard
    missing: list[str] = []
    for there in lists.values():
        example = next(iter(there.values()))
        total = int(example.total)
        first = 1 if total in there and 0 not in there else 0
        if len(there) < total and max(there) < first + total:
            missing += [example.call(number) for number in range(first, first + total) if number not in there]
    return missing
