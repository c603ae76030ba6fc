"""From lines of JSON objects to Arrow columns, with Arrow's JSON reader.

Arrow's reader takes one type per column, so that a column of several types is read line by line with Python's ``json``,
and kept as JSON text. A line that Arrow cannot read is refused, whatever Python makes of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from ...errors import FormatError
from ..shard import cut_samples
from .types import MAX_DEPTH, JsonType, from_arrow, infer_type, merge_types, to_arrow

if TYPE_CHECKING:
    from ...columns import IntArray

# Arrow counts a block's bytes in int32, and its strings' too.
SLICE_BYTES = 64 << 20
# For maps whose keys differ from row to row, Arrow takes rows times keys of memory before it reports what it found.
INFERENCE_BYTES = 128 << 10
COLUMNS = 4096
_HEAD_BYTES = 80
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
# Arrow counts rows from what it was given, which is not the shard.
_ROW = re.compile(r"\.? in row \d+$")
_CORRECT = "correct or remove the line"


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a run that hold more than white space: (lines,) int64 ``starts`` and ``stops`` within ``run``.

    ``base`` is the byte of the shard that the run starts at; ``feeds`` counts the line feeds before it, None where that
    is not known.
    """

    run: memoryview
    starts: IntArray
    stops: IntArray
    shard: str
    base: int = 0
    feeds: int | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self.run[self.starts[index] : self.stops[index]])

    @property
    def text(self) -> memoryview:
        """From the first line to the last, with what is between them."""
        return self.run[self.starts[0] : self.stops[-1]] if len(self) else self.run[:0]

    def part(self, start: int, stop: int) -> Lines:
        return Lines(self.run, self.starts[start:stop], self.stops[start:stop], self.shard, self.base, self.feeds)

    def parts(self, part_bytes: int) -> Iterator[Lines]:
        """Runs of whole lines of at most ``part_bytes``, or of one longer line."""
        start = 0
        for span in cut_samples(self.starts, self.stops, part_bytes):
            yield self.part(start, start + span.samples)
            start += span.samples

    def error(self, index: int, problem: str, todo: str = _CORRECT) -> FormatError:
        """The error for one line: names its number, where that is known, its offset and its first bytes."""
        start = int(self.starts[index])
        number = "a line" if self.feeds is None else f"line {self.feeds + bytes(self.run[:start]).count(10) + 1}"
        head = self[index][:_HEAD_BYTES].decode("utf-8", "backslashreplace")
        return FormatError(self.shard, f"{number} {problem}: {head!r}; {todo}", offset=self.base + start)


def find_lines(run: memoryview, shard: str, base: int = 0, feeds: int | None = None) -> Lines:
    """The lines of a run.

    Raises:
        FormatError: a line is not UTF-8, which Arrow would not notice, or nests so deeply that Arrow would crash.
    """
    data = np.frombuffer(run, np.uint8)
    ends = np.flatnonzero(data == 10)
    starts, stops = np.append(0, ends + 1), np.append(ends, len(data))
    some = starts < stops
    starts, stops = starts[some], stops[some]
    first = data[starts]
    blank = [
        index
        for index in np.flatnonzero((first == 32) | (first == 9) | (first == 13)).tolist()
        if not bytes(run[starts[index] : stops[index]]).strip()
    ]
    lines = Lines(run, np.delete(starts, blank), np.delete(stops, blank), shard, base, feeds)
    _refuse_other_text(lines)
    _refuse_depth(lines)
    return lines


def infer_columns(lines: Lines, *, mixed: bool = False) -> tuple[dict[str, JsonType], set[str]]:
    """The columns' types, and which columns have nulls or are missing in some line.

    ``mixed`` says that the shard already has a column of several types, which saves attempts that must fail.

    Raises:
        FormatError: a line cannot be read, or the objects have hardly a key in common.
    """
    types: dict[str, JsonType] = {}
    filled: dict[str, int] = {}
    for part in lines.parts(INFERENCE_BYTES):
        found = (None if mixed else _infer_with_arrow(part)) or _infer_line_by_line(part)
        for name, (kind, count) in found.items():
            types[name] = merge_types(types.get(name, "null"), kind)
            filled[name] = filled.get(name, 0) + count
        if len(types) > COLUMNS:
            raise FormatError(
                lines.shard,
                f"its objects have more than {COLUMNS} different keys: maps, not records; store each map in one field",
                offset=lines.base,
            )
    return types, {name for name, count in filled.items() if count < len(lines)}


def _infer_with_arrow(part: Lines) -> dict[str, tuple[JsonType, int]] | None:
    """Each column's type and its number of values; None where Arrow cannot read all lines with one type per column."""
    try:
        table = _parse(part, None)
    except pa.ArrowException:
        return None
    if table.num_rows != len(part) or any(_has_infinity(chunk) for column in table.columns for chunk in column.chunks):
        return None
    found: dict[str, tuple[JsonType, int]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kinds = [from_arrow(chunk) for chunk in column.chunks]
        kind: JsonType = "null"
        for each in kinds:
            if each is None:
                return None
            kind = merge_types(kind, each)
        found[name] = (kind, table.num_rows - column.null_count)
    return found


def _infer_line_by_line(part: Lines) -> dict[str, tuple[JsonType, int]]:
    found: dict[str, tuple[JsonType, int]] = {}
    for row in parsed_rows(part, check_keys=True):  # Arrow does not look at columns of several types
        for name, value in row.items():
            kind, count = found.get(name, ("null", 0))
            found[name] = merge_types(kind, infer_type(value)), count + (value is not None)
    # What is inferred must also be read: this refuses what Python understands and Arrow does not.
    _read_typed(part, {name: kind for name, (kind, _) in found.items() if kind != "any"}, _CORRECT)
    return found


def read_columns(lines: Lines, types: Mapping[str, JsonType]) -> dict[str, pa.Array]:
    """The columns in ``types``; those of type 'any' as JSON text.

    Raises:
        FormatError: a line cannot be read, or a value does not have its column's type.
    """
    typed = {name: kind for name, kind in types.items() if kind != "any"}
    todo = "the shard may have changed after it was indexed: index it again, or correct the line"
    tables = [_read_typed(part, typed, todo) for part in lines.parts(SLICE_BYTES)]
    columns = {name: _joined([table.column(name) for table in tables], to_arrow(kind)) for name, kind in typed.items()}
    rows = list(parsed_rows(lines)) if len(typed) < len(types) else []
    for name in types.keys() - typed.keys():
        texts = [None if row.get(name) is None else json.dumps(row[name]) for row in rows]
        columns[name] = pa.array(texts, pa.large_string())
    return {name: columns[name] for name in types}


def _read_typed(part: Lines, types: Mapping[str, JsonType], todo: str) -> pa.Table:
    """The columns in ``types``. Raises FormatError for the first line that Arrow cannot read as these types."""
    schema = pa.schema([(name, to_arrow(kind)) for name, kind in types.items()])
    found = _attempt(part, schema)
    if not isinstance(found, str):
        return found
    reason = found
    while len(part) > 1:
        half = part.part(0, len(part) // 2)
        found = _attempt(half, schema)
        part, reason = (half, found) if isinstance(found, str) else (part.part(len(half), len(part)), reason)
    for _ in parsed_rows(part):  # where Python cannot read the line either, its words are clearer
        pass
    found = _attempt(part, schema)
    raise part.error(0, f"cannot be read ({found if isinstance(found, str) else reason})", todo)


def _attempt(part: Lines, schema: pa.Schema) -> pa.Table | str:
    """The lines as a table, or why Arrow cannot read them."""
    try:
        table = _parse(part, schema)
    except pa.ArrowException as exc:
        return _ROW.sub("", str(exc)).removeprefix("JSON parse error: ")
    return table if table.num_rows == len(part) else f"{table.num_rows} objects in {len(part)} lines"


def _parse(part: Lines, schema: pa.Schema | None) -> pa.Table:
    """The rows with the columns of ``schema``, or with all of them and inferred types. Raises ArrowException."""
    _refuse_other_values(part)
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    text = part.text
    # One block: Arrow cannot read a line that lies in several.
    read = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    return pj.read_json(pa.BufferReader(pa.py_buffer(text)), read_options=read, parse_options=parse)


def _has_infinity(array: pa.Array) -> bool:
    """Return whether a float is infinite: spelled so, or an integer of hundreds of digits, which Arrow overflows."""
    if pa.types.is_floating(array.type):
        return bool(np.isinf(array.to_numpy(zero_copy_only=False)).any())
    if pa.types.is_struct(array.type):
        return any(_has_infinity(child) for child in array.flatten())
    return pa.types.is_list(array.type) and _has_infinity(array.values)


def _refuse_other_text(lines: Lines) -> None:
    data = np.frombuffer(lines.run, np.uint8)
    if not (data > 127).any():
        return
    try:
        str(lines.run, "utf-8")
    except UnicodeDecodeError as exc:
        row = max(int(np.searchsorted(lines.starts, exc.start, side="right")) - 1, 0)
        raise lines.error(row, "is not UTF-8", "write the shard in UTF-8") from exc


def _refuse_depth(lines: Lines) -> None:
    data = np.frombuffer(lines.run, np.uint8)
    # Of all opening brackets each object's first is one: what is left may all be in one line.
    opened = np.count_nonzero(data == ord("{")) + np.count_nonzero(data == ord("["))
    if opened - np.count_nonzero(data[lines.starts] == ord("{")) < MAX_DEPTH:
        return
    # The four brackets, and few other characters, have these bits.
    places = np.flatnonzero((data & 0xD9) == 0x59)
    kinds = data[places] | 0x20
    steps = (kinds == 0x7B).astype(np.int64) - (kinds == 0x7D)
    depths = np.cumsum(steps)
    if not len(places) or depths.max() - depths.min() < MAX_DEPTH:
        return
    before = np.searchsorted(places, lines.starts)
    some = np.flatnonzero(before < np.searchsorted(places, lines.stops))
    if not len(some):
        return
    deepest = np.maximum.reduceat(depths, before[some]) - (depths - steps)[before[some]]
    for index in some[deepest > MAX_DEPTH].tolist():
        if _depth(lines[index]) > MAX_DEPTH:
            raise lines.error(index, f"nests more than {MAX_DEPTH} deep", "store the deep value as text")


def _refuse_other_values(lines: Lines) -> None:
    """Raise ArrowInvalid where a line does not begin an object.

    Arrow takes a line of null for an object without keys, and crashes where it finds nothing else.
    """
    data = np.frombuffer(lines.run, np.uint8)
    for index in np.flatnonzero(data[lines.starts] != ord("{")).tolist():
        if not lines[index].lstrip().startswith(b"{"):
            raise pa.ArrowInvalid("a line that holds no object")


def _depth(line: bytes) -> int:
    """Depth to which a line nests; brackets in strings do not count."""
    kinds = np.frombuffer(_STRING.sub(b"", line), np.uint8)
    kinds = kinds[(kinds & 0xD9) == 0x59] | 0x20
    return int(np.cumsum((kinds == 0x7B).astype(np.int64) - (kinds == 0x7D)).max(initial=0))


def _joined(columns: list[pa.ChunkedArray], kind: pa.DataType) -> pa.Array:
    """One array; strings that do not fit into int32 offsets as large strings."""
    column = pa.chunked_array([chunk for column in columns for chunk in column.chunks], kind)
    if pa.types.is_string(column.type) and column.nbytes >= 1 << 31:
        column = column.cast(pa.large_string())
    joined = column.combine_chunks()
    return joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined


def parsed_rows(lines: Lines, *, check_keys: bool = False) -> Iterator[dict[str, Any]]:
    """Each line as Python reads it. Raises FormatError for one that is not a JSON object.

    With ``check_keys`` also for one that has an object with a key twice, or with a key that is not Unicode, or a number
    with a fraction or exponent beyond float64.
    """
    hook, number = (_checked_object, _finite) if check_keys else (None, None)
    for index in range(len(lines)):
        try:
            row = json.loads(lines[index], object_pairs_hook=hook, parse_float=number)
        except json.JSONDecodeError as exc:
            raise lines.error(index, f"is not JSON ({exc.msg} at column {exc.colno})") from exc
        except (ValueError, RecursionError) as exc:
            raise lines.error(index, f"cannot be read ({exc})") from exc
        if not isinstance(row, dict):
            raise lines.error(index, f"is a JSON {type(row).__name__}, not an object")
        yield row


def _finite(text: str) -> float:
    """Raises ValueError for a number beyond float64; of one with hundreds of digits Arrow, too, makes infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"Number too big for float64: {text if len(text) < 40 else text[:30] + '...'}")
    return value


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that comes twice, or that is not Unicode."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    for name in found:
        if not name.isascii():
            name.encode()
    return found
