"""Values on their way into a shard: as plain Python, as JSON, as the bytes of a tar member."""

from __future__ import annotations

import datetime
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from ...loader.columns import AnyArray, python_values
from ...loader.errors import DatasetError
from ...loader.formats.arrow.columns import file_bytes, is_file_struct, value_bytes

_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_NS = 86_400 * 10**9
_PARTS = re.compile(r"(.*?)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")
_TIMES = (datetime.date, datetime.time)  # a datetime is a date
_TEXTS = frozenset(("txt", "text", "transcript"))
_NUMBERS = frozenset(("cls", "cls2", "index", "inx", "id"))
_JSON = frozenset(("json", "jsn"))


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a record batch as dicts: vectors and tensors as NumPy arrays, an image with its name as its bytes.

    Raises:
        FormatError: an image's name without its bytes.
        DatasetError: times inside of lists or structs that Python's cannot hold.
    """
    columns = [_values_of(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    for row in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, row, strict=True))


def _values_of(name: str, column: pa.Array) -> list[Any]:
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType) and not column.null_count:
        return list(column.to_numpy_ndarray())
    if isinstance(column, pa.ExtensionArray):
        return _values_of(name, column.storage)
    if pt.is_struct(kind) and is_file_struct(kind):
        return list(file_bytes(column, name, "the source").to_pylist())
    if pt.is_fixed_size_list(kind) and value_bytes(kind.value_type) and _is_number(kind.value_type):
        flat = column.flatten()
        if not column.null_count and not flat.null_count:
            return list(flat.to_numpy(zero_copy_only=False).reshape(len(column), kind.list_size))
    try:
        return python_values(column)
    except (ValueError, OverflowError) as exc:  # nanoseconds and far years, which Python's times cannot hold
        try:
            return list(time_texts(column))
        except pa.ArrowException:
            problem = f"Python has no form for a value of {kind} ({exc}); pack to parquet or arrow, without map="
            raise DatasetError(f"column {name!r}: {problem}") from exc


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def arrow_value(value: Any) -> Any:
    """A value as Arrow takes it."""
    if isinstance(value, memoryview):
        return bytes(value)
    if not isinstance(value, np.generic):
        return value
    return value if _is_fine_time(value) else value.item()


def read_member(name: str, value: Any, *, parse: bool) -> Any:
    """A tar member's bytes as a column's value: labels as int, text as str; with ``parse``, JSON and arrays too.

    Raises:
        ValueError: the bytes are not what the name says.
    """
    kind = name.rpartition(".")[2]
    if value is None or not isinstance(value, bytes):
        return value
    try:
        if kind in _NUMBERS:
            return int(value)
        if kind in _TEXTS:
            return value.decode()
        if parse and kind in _JSON:
            return json.loads(value)
        if parse and kind == "npy":
            return np.load(io.BytesIO(value), allow_pickle=False)
    except (ValueError, EOFError) as exc:
        problem = f"field {name!r} is not what its name says: {exc}"
        raise ValueError(f"{problem}; rename the field, or change it with map=") from exc
    return value


def json_value(value: Any) -> Any:
    """A value as JSON that is read back alike: times and decimals as text, arrays as lists, NaN as null.

    Raises:
        ValueError: JSON, or its readers, have nothing for it.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, np.ndarray):
        return [json_value(each) for each in value.tolist()]
    if isinstance(value, np.generic):
        return json_value(_item(value))
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError("JSON has no infinity")
        return None if math.isnan(value) else value
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, (Decimal, datetime.timedelta)):
        return str(value)
    if isinstance(value, Mapping):
        return {_json_key(name): json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise ValueError("JSON has no bytes; pack to tar, parquet, arrow or mds")
    raise ValueError(f"JSON has nothing for a {type(value).__name__}")


def _item(value: np.generic) -> Any:
    """As Python's value; times of which Python has none, as text."""
    return str(value) if _is_fine_time(value) else value.item()


def _is_fine_time(value: np.generic) -> bool:
    """Return whether a time is finer than Python's: its ``item()`` is then a number."""
    return isinstance(value, (np.datetime64, np.timedelta64)) and isinstance(value.item(), int)


def _json_key(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"the key {name!r} is not text")
    return name


def dump_json(value: Any) -> str:
    """Raises ValueError as ``json_value`` does, and for text that is not Unicode."""
    text = json.dumps(json_value(value), ensure_ascii=False)
    text.encode()
    return text


def encode_member(name: str, value: Any, key: str) -> tuple[str, bytes]:
    """A field as a tar member: its name, and bytes by the extension of the name.

    bytes are kept, str becomes UTF-8; numbers, times and decimals are written as text; ``.npy`` takes arrays, ``.json``
    any JSON value. Lists and mappings, and arrays, get ``.json`` or ``.npy`` added to a name without it.

    Raises:
        DatasetError: there is no such form of the value.
    """
    kind = name.rpartition(".")[2]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return name, bytes(value)
    try:
        if kind == "npy" or (isinstance(value, np.ndarray) and kind != "json"):
            return name if kind == "npy" else f"{name}.npy", _npy(value)
        if kind == "json" or isinstance(value, (list, tuple, Mapping)):
            return name if kind == "json" else f"{name}.json", dump_json(value).encode()
        if isinstance(value, str):
            return name, value.encode()
    except ValueError as exc:
        raise DatasetError(f"sample {key!r}, field {name!r}: {exc}") from exc
    if isinstance(value, np.generic):
        value = _item(value)
    if isinstance(value, str):
        return name, value.encode()
    if isinstance(value, (bool, int, float, Decimal, datetime.timedelta)):
        return name, str(value).encode()
    if isinstance(value, _TIMES):
        return name, value.isoformat().encode()
    raise DatasetError(
        f"sample {key!r}, field {name!r}: cannot write a {type(value).__name__}; use bytes, text, a number, an array "
        "or a list"
    )


def _npy(value: Any) -> bytes:
    array: AnyArray = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("an array of Python objects; use an array of numbers")
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


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
