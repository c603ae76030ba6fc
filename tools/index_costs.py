"""Finds what each sample of a data set costs: the value of a column, the length of a field, or the bytes of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from ..loader.columns import ArrayColumn, Block, BytesColumn, Column, ObjectColumn, unpack_records
from ..loader.counters import Counters
from ..loader.dataset.cost_index import cost_key, costs_to_bytes
from ..loader.dataset.manifest import Manifest
from ..loader.errors import ConfigError, DatasetError
from ..loader.formats.arrow.columns import is_list, is_text
from ..loader.formats.detect import make_format
from ..loader.formats.schema import NULL_SUFFIX
from ..loader.limits import usable_memory
from ..loader.order.costs.costs import LARGEST, CostValues, narrow_type
from ..loader.progress import show_progress
from ..loader.reading.chunk_source import ChunkSource
from ..storage import open_store
from ..storage.suggestions import did_you_mean
from .inspect import sample_sizes

_EXPRESSION = re.compile(r"(?:(?P<name>[\w.:-]+)=)?(?P<body>(?:len:|value:)?[^*=]+)(?:\*(?P<factor>\d+(?:\.\d+)?))?")
_BYTES = "bytes"
FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class CostExpression:
    """Expression of a cost: ``[NAME=]bytes``, ``[NAME=]FIELD`` or ``[NAME=]len:FIELD``; ``*FACTOR`` may follow each.

    ``field`` None is the bytes of all fields together; with ``is_length`` a cost is the length of the field's value: of
    a list or array its elements, of text its characters, of bytes the bytes. Costs are whole numbers; a factor
    turns others into such, as in ``seconds*1000``.
    """

    name: str
    text: str
    field: str | None
    is_length: bool = False
    factor: float = 1.0

    @staticmethod
    def parse(text: str) -> CostExpression:
        """Read an expression. Raises ConfigError if it is none."""
        found = _EXPRESSION.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"cost={text!r}: write the name of a column, len:FIELD or bytes, as in --cost tokens, --cost len:text; "
                "a name for the index goes before it, as in --cost tokens=len:text"
            )
        body = found["body"].strip()
        kind, mark, field = body.partition(":")
        is_length = mark == ":" and kind == "len"
        named = field if is_length or (mark == ":" and kind == "value") else body
        return CostExpression(
            name=found["name"] or body,
            text=body + (f"*{found['factor']}" if found["factor"] else ""),
            field=None if body == _BYTES else named,
            is_length=is_length,
            factor=float(found["factor"] or 1),
        )


def index_costs(
    manifest: Manifest,
    expression: CostExpression | str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> CostValues:
    """The cost of every sample, (samples,) uint16 or uint32 by sample id. Reads the field of all samples once.

    Raises:
        ConfigError: there is no such field, or it has neither numbers nor a length.
        DatasetError: a sample's cost is negative, missing, not finite, no whole number or above 2**32 - 1; names the
            sample and its shard.
        StorageError, FormatError: a chunk cannot be read.
    """
    wanted = CostExpression.parse(expression) if isinstance(expression, str) else expression
    if wanted.field is not None and wanted.field not in manifest.fields:
        raise ConfigError(
            f"cost={wanted.text!r}: no field {wanted.field!r} among {sorted(manifest.fields)}"
            f"{did_you_mean(wanted.field, manifest.fields)}"
        )
    store = open_store(manifest.url, storage_options=storage_options)
    try:
        columns = None if wanted.field is None else [wanted.field]
        shard_format = make_format(manifest.format, manifest.config)
        source = ChunkSource(manifest, shard_format, store, columns, Counters(), usable_memory())
        found = np.empty(manifest.num_samples, np.uint32)
        with show_progress("costs", manifest.num_samples, unit="samples", enabled=progress) as advance:
            for chunk in range(manifest.num_chunks):
                block = source.load(chunk)
                first = int(manifest.first_ids[chunk])
                found[first : first + block.samples] = _checked(_costs(block, wanted), wanted, manifest, first)
                advance(block.samples)
    finally:
        store.close()
    return found.astype(narrow_type(int(found.max())), copy=False)


def write_costs(
    manifest: Manifest,
    expression: CostExpression,
    values: CostValues,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write an index of costs beside the manifest; returns its URL. An index of this name is replaced as a whole.

    Raises:
        ConfigError: ``values`` are not (samples,) uint16 or uint32.
        StorageError: the store refused or did not answer.
    """
    is_array = isinstance(values, np.ndarray) and values.dtype.kind == "u" and values.dtype.itemsize in (2, 4)
    if not is_array or values.shape != (manifest.num_samples,):
        found = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ConfigError(
            f"values are {found}; give one cost a sample, ({manifest.num_samples},) uint16 or uint32, of index_costs"
        )
    store = open_store(manifest.url, storage_options=storage_options)
    try:
        key = cost_key(expression.name, manifest.fingerprint)
        store.put(key, costs_to_bytes(expression.name, expression.text, values, manifest.fingerprint))
        return f"{store.url}/{key}"
    finally:
        store.close()


def _checked(costs: FloatArray, wanted: CostExpression, manifest: Manifest, first: int) -> FloatArray:
    scaled = costs * wanted.factor
    with np.errstate(invalid="ignore"):
        is_good = (scaled >= 0) & (scaled <= LARGEST) & (scaled == np.floor(scaled))
        if wanted.factor != 1:  # then rounding is what was asked for
            is_good = (scaled >= 0) & (scaled <= LARGEST)
    bad = np.flatnonzero(~is_good)
    if not len(bad):
        rounded: FloatArray = np.rint(scaled)
        return rounded
    sample = first + int(bad[0])
    shard, row = manifest.shard_of(sample)
    value = costs[bad[0]]
    problem, cure = "is no cost", "costs are numbers from 0 to 4,294,967,295"
    if np.isnan(value):
        problem, cure = (
            "is missing or not a number",
            "give every sample a cost, or leave such samples out of the shards",
        )
    elif value < 0:
        problem = "is negative"
    elif value * wanted.factor > LARGEST:
        problem, cure = "is too large", f"give a smaller unit, as in --cost '{wanted.text}*0.001'"
    elif value != np.floor(value):
        problem, cure = "is no whole number", f"give a factor, as in --cost '{wanted.text}*1000'"
    raise DatasetError(
        f"{manifest.url}{shard}: the cost {wanted.text!r} of sample {sample} (number {row} of the shard) {problem}: "
        f"{value:g}; {len(bad):,} such in its chunk. {cure[0].upper()}{cure[1:]}"
    )


def _costs(block: Block, wanted: CostExpression) -> FloatArray:
    """(samples,): NaN where a value is missing."""
    if wanted.field is None:
        return sample_sizes(block).astype(np.float64)
    column = block.columns.get(wanted.field)
    if column is None:
        for records in block.records:
            if wanted.field in records.names:
                column = ArrayColumn(unpack_records(records, records.rows)[wanted.field])
    if column is None:  # no sample of this chunk has the field
        return np.full(block.samples, np.nan)
    found = _lengths(column, wanted) if wanted.is_length else _values(column, wanted)
    costs: FloatArray = found.astype(np.float64)
    nulls = block.columns.get(wanted.field + NULL_SUFFIX)
    if isinstance(nulls, ArrayColumn):  # where a value is missing there is a 0
        costs[nulls.values] = np.nan
    return costs


def _lengths(column: Column, wanted: CostExpression) -> Any:
    if isinstance(column, BytesColumn):
        if column.text:
            texts = column.take(np.arange(len(column.starts)))
            return np.array([np.nan if text is None else len(text) for text in texts], np.float64)
        return np.where(column.starts >= 0, (column.stops - column.starts).astype(np.float64), np.nan)
    if isinstance(column, ArrayColumn):
        if column.values.ndim < 2:
            raise ConfigError(
                f"cost={wanted.text!r}: the field holds single numbers, which have no length; leave out len:"
            )
        return np.full(len(column.values), column.values.shape[1])
    if type(column) is not ObjectColumn:  # its array is of encoded values, or of some
        values = column.take(np.arange(column.num_rows))
        return np.array([_length(value, wanted) for value in values], np.float64)
    array = column.values
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        lengths = pc.utf8_length(array)
    elif is_list(array.type) or pt.is_fixed_size_list(array.type):
        lengths = pc.list_value_length(array)
    elif pt.is_binary(array.type) or pt.is_large_binary(array.type):
        lengths = pc.binary_length(array)
    else:
        raise ConfigError(f"cost={wanted.text!r}: values of type {array.type} have no length")
    return _to_numbers(lengths)


def _length(value: Any, wanted: CostExpression) -> float:
    """Items of a list, array or object, characters of a text, bytes."""
    if value is None:
        return float("nan")
    try:
        return float(len(value))
    except TypeError as exc:
        raise ConfigError(f"cost={wanted.text!r}: a value of type {type(value).__name__} has no length") from exc


def _values(column: Column, wanted: CostExpression) -> Any:
    if isinstance(column, ArrayColumn):
        if column.values.ndim > 1 or column.values.dtype.kind not in "biuf":
            raise ConfigError(
                f"cost={wanted.text!r}: the field holds {column.values.dtype} of shape {column.values.shape[1:]}, not "
                f"single numbers; for their length write len:{wanted.field}"
            )
        return column.values
    if isinstance(column, BytesColumn):
        return np.array([_number(value, wanted) for value in column.take(np.arange(len(column.starts)))], np.float64)
    kind = column.values.type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind)):
        raise ConfigError(f"cost={wanted.text!r}: values of type {kind} are no numbers; for a length write len:FIELD")
    return _to_numbers(column.values)


def _to_numbers(array: pa.Array) -> Any:
    return pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)


def _number(value: bytes | str | None, wanted: CostExpression) -> float:
    """A number that stands as text in a file or string."""
    if value is None:
        return float("nan")
    try:
        return float(value)
    except ValueError:
        shown = value[:40]
        raise ConfigError(
            f"cost={wanted.text!r}: the field holds {shown!r}, which is no number; for its length write "
            f"len:{wanted.field}"
        ) from None
