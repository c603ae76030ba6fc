"""Times that Python's cannot hold, as the text that Python writes of others: nanoseconds, far years, long durations."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_NS = 86_400 * 10**9
_PARTS = re.compile(r"(.*?)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")


def time_texts(column: pa.Array) -> list[str | None]:
    """Dates, times and durations as text, in the form of ``isoformat()`` and ``str(timedelta)``, with all digits.

    Raises:
        pa.ArrowException: a value, or a type, that has no text.
    """
    text: Callable[[Any], str]
    if pt.is_duration(column.type):
        values = column.cast(pa.int64()).to_pylist()
        text = partial(_duration, unit_ns=_UNIT_NS[column.type.unit])
    else:
        values, text = column.cast(pa.string()).to_pylist(), _moment
    return [None if value is None else text(value) for value in values]


def _duration(value: int, unit_ns: int) -> str:
    days, rest = divmod(value * unit_ns, _DAY_NS)
    text = str(datetime.timedelta(microseconds=rest // 1000))
    if rest % 1000:
        text += ("" if "." in text else ".000000") + f"{rest % 1000:03d}"
    return f"{days} day{'' if abs(days) == 1 else 's'}, {text}" if days else text


def _moment(text: str) -> str:
    """Arrow's text of a moment as ``isoformat()`` has it: a T, a zone with a colon, no zeros below what there is."""
    found = _PARTS.fullmatch(text)
    if found is None or text.startswith("<"):  # as in "<value out of range: ...>"
        raise pa.ArrowInvalid(text)
    start, fraction, zone = found[1].replace(" ", "T", 1), found[2] or "", found[3] or ""
    if not fraction.strip("0"):
        fraction = ""
    elif len(fraction) <= 6 or fraction.endswith("000"):
        fraction = fraction[:6].ljust(6, "0")
    zone = "+00:00" if zone == "Z" else f"{zone[:3]}:{zone[-2:]}" if zone else ""
    return start + (f".{fraction}" if fraction else "") + zone
