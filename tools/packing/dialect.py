"""Dialect of a CSV file: as the caller says, or as the header shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...loader.errors import ConfigError

TAB_SUFFIXES = (".tsv", ".tsv.gz")
TABLE_SUFFIXES = (".csv", ".csv.gz", *TAB_SUFFIXES)
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAID = re.compile(rb"(?:\xef\xbb\xbf)?\"?sep=(.)\"?\r?\n")  # in the first line, for Excel
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Delimiter, decimal point and number of lines before the header."""

    delimiter: str = ","
    decimal_point: str = "."
    skip_rows: int = 0


def check_delimiter(given: str | None) -> str | None:
    """A delimiter as one character; "tab" is a tab. Raises ConfigError."""
    if given is None:
        return None
    text = "\t" if given in ("tab", "\\t") else given
    if not isinstance(text, str) or len(text) != 1 or text in '"\r\n' or not text.isascii():
        raise ConfigError(f"delimiter={given!r}: give one character, such as ';', or 'tab'")
    return text


def check_decimal_point(given: str | None) -> str | None:
    """Raise ConfigError unless a decimal point is '.', ',' or None."""
    if given not in (None, ".", ","):
        raise ConfigError(f"decimal_point={given!r}: must be '.' or ','")
    return given


def find_dialect(head: bytes, key: str, delimiter: str | None = None, decimal_point: str | None = None) -> Dialect:
    """The dialect of a file by its first bytes, where it is not given.

    A line ``sep=;`` above the header decides. Else a .tsv has tabs, and a .csv what its header has outside of quotes:
    commas, or if it has none semicolons, tabs or bars.

    Raises:
        ValueError: the header has two kinds, and more of that which the name does not tell.
    """
    said = _SAID.match(head)
    skipped = 0 if said is None else 1
    if delimiter is None and said is not None:
        delimiter = said[1].decode("latin-1")
    if delimiter is None:
        delimiter = _read_header(head, is_tab=key.lower().endswith(TAB_SUFFIXES))
    return Dialect(delimiter=delimiter, decimal_point=decimal_point or ".", skip_rows=skipped)


def _read_header(head: bytes, *, is_tab: bool) -> str:
    line = re.split(rb"[\r\n]", _QUOTED.sub(b"", head[: 1 << 20]), maxsplit=1)[0]
    counts = {each: line.count(each.encode()) for each in _NAMES}
    named = "\t" if is_tab else ","
    most = max(counts, key=lambda each: (counts[each], each == named))
    if counts[most] > counts[named] > 0 or (is_tab and counts[most] and not counts[named]):
        raise ValueError(
            f"its header has {counts[most]} {_NAMES[most]} and {counts[named]} {_NAMES[named]}: say which separate "
            f"values, with delimiter={most!r} (--delimiter {'tab' if most == chr(9) else most}) or {named!r}"
        )
    found = [each for each in counts if counts[each]]
    if counts[named] or not found:
        return named
    if len(found) > 1:
        counted = " and ".join(f"{counts[each]} {_NAMES[each]}" for each in found)
        raise ValueError(f"its header has {counted}: say which separate values, with delimiter={most!r} (--delimiter)")
    return found[0]
