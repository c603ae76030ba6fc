"""From lines of JSON objects to Arrow columns: Arrow's reader where it can, Python's where it must.

Arrow refuses some lines that Python reads (doubled keys, huge numbers, unpaired surrogates) and reads some that are no
lines (objects over two lines, two on one); the number of rows tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from ...columns import IntArray
from ...errors import FormatError
from .types import MAX_DEPTH, JsonType, conform, from_arrow, infer_type, merge_types, to_arrow

# Arrow counts a block's bytes in int32, and its strings' too.
SLICE_BYTES = 64 << 20
# Arrow takes rows times keys of memory for maps with keys of their own in each row, before it says what it found.
INFERENCE_BYTES = 128 << 10
COLUMNS = 4096
_HEAD_BYTES = 80


def find_lines(run: memoryview) -> tuple[IntArray, IntArray]:
    """(lines,) int64 starts and stops of the lines that hold more than white space, without their line feeds."""
    data = np.frombuffer(run, np.uint8)
    feeds = np.flatnonzero(data == 10)
    starts, stops = np.append(0, feeds + 1), np.append(feeds, len(data))
    some = starts < stops
    starts, stops = starts[some], stops[some]
    first = data[starts]
    blank = [
        index
        for index in np.flatnonzero((first == 32) | (first == 9) | (first == 13)).tolist()
        if not bytes(run[starts[index] : stops[index]]).strip()
    ]
    return np.delete(starts, blank), np.delete(stops, blank)


def infer_columns(
    run: memoryview, shard: str, base: int, *, mixed: bool = False
) -> tuple[int, dict[str, JsonType], set[str]]:
    """How many lines there are, the columns' types, and which columns have nulls or are missing in some line.

    ``base`` is where the run starts in the shard. ``mixed`` spares Arrow a try where the shard has columns already
    that it does not take.

    Raises:
        FormatError: a line that is no JSON object, or objects that have no keys in common.
    """
    starts, stops = find_lines(run)
    check_text(run, starts, stops, shard, base)
    found = None if mixed or _is_deep(run, starts, stops) else _infer_with_arrow(run, len(starts))
    types, nulls = found or _infer_with_python(_rows(run, starts, stops, shard, base), len(starts))
    if len(types) > COLUMNS:
        raise FormatError(
            shard, f"objects with more than {COLUMNS} different keys: maps, not records; pack them as text", offset=base
        )
    return len(starts), types, nulls


def _infer_with_arrow(run: memoryview, lines: int) -> tuple[dict[str, JsonType], set[str]] | None:
    """Types and nulls; None where Arrow does not take the rows or not as they are."""
    types: dict[str, JsonType] = {}
    filled: dict[str, int] = {}
    rows = 0
    for part in _slices(run, INFERENCE_BYTES):
        table = _read_with_arrow(part, None)
        if table is None:
            return None
        rows += table.num_rows
        for field, column in zip(table.schema, table.columns, strict=True):
            types[field.name] = merge_types(types.get(field.name, "null"), from_arrow(field.type))
            filled[field.name] = filled.get(field.name, 0) + table.num_rows - column.null_count
        if "any" in types.values():
            return None
    return (types, {name for name, count in filled.items() if count < rows}) if rows == lines else None


def _infer_with_python(rows: Iterable[dict[str, Any]], lines: int) -> tuple[dict[str, JsonType], set[str]]:
    types: dict[str, JsonType] = {}
    filled: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            types[name] = merge_types(types.get(name, "null"), infer_type(value))
            filled[name] = filled.get(name, 0) + (value is not None)
    return types, {name for name, count in filled.items() if count < lines}


def read_columns(
    run: memoryview, types: Mapping[str, JsonType], shard: str, base: int
) -> tuple[int, dict[str, pa.Array]]:
    """How many lines there are, and the columns in ``types``; of type 'any' as JSON text.

    Raises:
        FormatError: a line that is no JSON object, or a value that is not of its column's type.
    """
    starts, stops = find_lines(run)
    check_text(run, starts, stops, shard, base)
    typed = {name: kind for name, kind in types.items() if kind != "any"}
    loose = [name for name, kind in types.items() if kind == "any"]
    table = None
    if not _is_deep(run, starts, stops):
        table = _read_with_arrow(run, pa.schema([(name, to_arrow(kind)) for name, kind in typed.items()]))
    if table is None or table.num_rows != len(starts):
        typed, loose, table = {}, list(types), None
    columns = {name: _joined(table.column(name)) for name in typed} if table is not None else {}
    if loose or table is None:
        rows = list(_rows(run, starts, stops, shard, base))
        for name in loose:
            values = [row.get(name) for row in rows]
            columns[name] = _from_values(values, name, types[name], starts, shard, base)
    return len(starts), {name: columns[name] for name in types}


def check_text(run: memoryview, starts: IntArray, stops: IntArray, shard: str, base: int) -> None:
    """Raise FormatError where the text is not UTF-8, which Arrow would not notice."""
    data = np.frombuffer(run, np.uint8)
    if not (data > 127).any():
        return
    try:
        str(run, "utf-8")
    except UnicodeDecodeError as exc:
        row = max(int(np.searchsorted(starts, exc.start, side="right")) - 1, 0)
        head = bytes(run[starts[row] : min(stops[row], starts[row] + _HEAD_BYTES)])
        raise FormatError(
            shard, f"a line that is not UTF-8: {head!r}; write it anew in UTF-8", offset=base + int(starts[row])
        ) from exc


def _is_deep(run: memoryview, starts: IntArray, stops: IntArray) -> bool:
    """Whether a line may nest deeper than MAX_DEPTH; brackets in strings count too, so that it may also not."""
    data = np.frombuffer(run, np.uint8)
    # The four brackets, and few others, have these bits.
    places = np.flatnonzero((data & 0xD9) == 0x59)
    kinds = data[places] | 0x20
    steps = (kinds == 0x7B).astype(np.int64) - (kinds == 0x7D)
    depths = np.cumsum(steps)
    if not len(places) or depths.max() - depths.min() < MAX_DEPTH:
        return False
    before = np.searchsorted(places, starts)
    some = before < np.searchsorted(places, stops)
    before = before[some]
    if not len(before):
        return False
    return bool((np.maximum.reduceat(depths, before) - (depths - steps)[before] > MAX_DEPTH).any())


def _read_with_arrow(run: memoryview, schema: pa.Schema | None) -> pa.Table | None:
    """The rows as a table with ``schema``, or with inferred types; None where Arrow does not take them."""
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    tables = []
    try:
        for part in _slices(run, SLICE_BYTES):
            # One block: Arrow cannot read a line that lies in several.
            read = pj.ReadOptions(use_threads=False, block_size=len(part) + 1)
            tables.append(pj.read_json(pa.BufferReader(pa.py_buffer(part)), read_options=read, parse_options=parse))
        return pa.concat_tables(tables)
    except pa.ArrowException:
        return None


def _slices(run: memoryview, slice_bytes: int) -> Iterator[memoryview]:
    """Runs of whole lines of at most ``slice_bytes``, or of one longer line."""
    start = 0
    while len(run) - start > slice_bytes:
        feed = bytes(run[start : start + slice_bytes]).rfind(b"\n")
        if feed < 0:
            feed = bytes(run[start:]).find(b"\n")
        if feed < 0:
            break
        if run[start : start + feed + 1].tobytes().strip():
            yield run[start : start + feed + 1]
        start += feed + 1
    if run[start:].tobytes().strip():
        yield run[start:]


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """One array; strings that do not fit into int32 offsets as large strings."""
    if pa.types.is_string(column.type) and column.nbytes >= 1 << 31:
        column = column.cast(pa.large_string())
    joined = column.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def _rows(run: memoryview, starts: IntArray, stops: IntArray, shard: str, base: int) -> Iterator[dict[str, Any]]:
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        line = bytes(run[start:stop])
        try:
            row = json.loads(line)
            problem = "" if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
        except (ValueError, RecursionError) as exc:
            row, problem = None, f"no JSON that can be read ({exc})"
        if problem:
            raise FormatError(
                shard,
                f"a line that is {problem}: {line[:_HEAD_BYTES].decode('utf-8', 'backslashreplace')!r}; "
                "mend or remove the line",
                offset=base + start,
            )
        yield row


def _from_values(values: Sequence[Any], name: str, kind: JsonType, starts: IntArray, shard: str, base: int) -> pa.Array:
    if kind == "any":
        return pa.array([None if value is None else json.dumps(value) for value in values], pa.large_string())
    conformed = []
    for value, start in zip(values, starts.tolist(), strict=True):
        try:
            conformed.append(conform(value, kind))
        except TypeError as exc:
            raise FormatError(
                shard,
                f"column '{name}' has {exc} as the index says; the shard changed after it was indexed: index it anew",
                offset=base + start,
            ) from exc
    return pa.array(conformed, to_arrow(kind))
