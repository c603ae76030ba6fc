"""Search for a value in a column: a sample's key, or any field that is a scalar or text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.suggestions import did_you_mean
from ..columns import KEY_COLUMN, ArrayColumn, BytesColumn, Column
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest


def searched_field(manifest: Manifest, field: str | None) -> str:
    """Choose the field to search: the one named, else that of the samples' keys.

    Raises:
        ConfigError: the data set has no such field, or no keys; names its fields.
    """
    has_keys = manifest.format == "tar"
    if field is None and has_keys:
        return KEY_COLUMN
    if field is None:
        raise ConfigError(
            f"samples of {manifest.format} shards have no key; say which to search by field= (--field): "
            f"{', '.join(sorted(manifest.fields))}"
        )
    if field not in manifest.fields and not (has_keys and field == KEY_COLUMN):
        raise ConfigError(
            f"there is no field {field!r} to search; the fields are {', '.join(sorted(manifest.fields))}"
            f"{did_you_mean(field, manifest.fields)}"
        )
    return field


def find_rows(column: Column, value: Any, field: str) -> list[int]:
    """Find the rows of ``column`` that hold ``value``; text stands for the number, time or bytes that it writes.

    Raises:
        ConfigError: values of the field cannot be compared with it.
    """
    if isinstance(column, ArrayColumn):
        return _find_scalar(column, value, field)
    if isinstance(column, BytesColumn):
        return _find_bytes(column, _as_stored(value, field))
    values = column.take(np.arange(column.num_rows))
    if any(isinstance(found, np.ndarray) for found in values):
        raise ConfigError(f"field {field!r} holds arrays, which cannot be searched")
    return [row for row, found in enumerate(values) if found is not None and (found == value or str(found) == value)]


def _as_stored(value: Any, field: str) -> bytes:
    """Convert ``value`` to bytes: a shell's word, or a file's name, that is not UTF-8 to its own."""
    try:
        stored = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{value!r} is no text: it has a surrogate that stands for no byte") from exc
    # Keys are text, in which bytes that are not UTF-8 are written out.
    return stored.decode("utf-8", "backslashreplace").encode() if field == KEY_COLUMN else stored


def _find_scalar(column: ArrayColumn, value: Any, field: str) -> list[int]:
    values = column.values
    if values.ndim > 1:
        raise ConfigError(f"field {field!r} holds arrays {list(values.shape[1:])}, which cannot be searched")
    try:
        if values.dtype.kind == "b" and isinstance(value, str):
            value = {"true": True, "false": False}[value.lower()]
        wanted = np.array(value).astype(values.dtype, casting="unsafe")
        if not isinstance(value, str) and wanted != value:
            return []  # 1.5 is no integer, and 300 no uint8
        rows: list[int] = np.flatnonzero(values == wanted).tolist()
    except (ValueError, TypeError, KeyError, OverflowError) as exc:
        raise ConfigError(f"field {field!r} holds {values.dtype}, and {value!r} is none") from exc
    return rows


def _find_bytes(column: BytesColumn, wanted: bytes) -> list[int]:
    lengths = column.stops - column.starts
    alike = np.flatnonzero((column.starts >= 0) & (lengths == len(wanted))).tolist()
    return [row for row in alike if column.buffer[column.starts[row] : column.stops[row]] == wanted]
