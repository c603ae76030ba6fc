"""Estimate from a Parquet column's pages how much they repeat values: the footer does not tell its opened size."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq

_DICTIONARY_PAGE = 2
_I32, _STRUCT = 5, 12
# A page of values as they are spends 4 bytes on each length; indices into a dictionary are 32 bits at most.
_INDEX_BYTES = 4.1
_REPEATS = 2
PAGE_HEADER_BYTES = 64  # more than the fields of a dictionary page's header that are read


def repeats_values(column: pq.ColumnChunkMetaData, header: bytes) -> bool:
    """Return whether text or binaries take much less memory as indices into their dictionary than as values.

    That is so where the column holds hardly anything but indices, or where its values, as long as the dictionary's on
    average, would take more than twice its pages. ``header`` begins with the header of the dictionary's page.
    """
    facts = read_dictionary_facts(header)
    if facts is None:
        return False
    size, entries = facts
    index_bytes = column.total_uncompressed_size - size
    mean = size / max(1, entries)
    return bool(
        index_bytes <= _INDEX_BYTES * column.num_values
        or column.num_values * mean > _REPEATS * column.total_uncompressed_size
    )


def read_dictionary_facts(header: bytes) -> tuple[int, int] | None:
    """Uncompressed bytes and number of values of a dictionary page; None where the bytes are no such page's header.

    The header is a PageHeader of parquet.thrift in Thrift's compact protocol.
    """
    try:
        fields: dict[int, int] = {}
        stream = iter(header)
        for number, kind in _fields(stream):
            if kind == _I32:
                fields[number] = _zigzag(stream)
            elif kind == _STRUCT and number == 7:
                inner = next(_fields(stream), (0, 0))
                is_page = fields.get(1) == _DICTIONARY_PAGE and inner == (1, _I32)
                return (fields[2], _zigzag(stream)) if is_page else None
            else:
                return None
    except (StopIteration, RuntimeError, KeyError):  # a generator turns the end of its stream into RuntimeError
        pass
    return None


def _fields(stream: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Number and type of each field of a struct; the caller reads its value off the stream."""
    number = 0
    while (byte := next(stream)) != 0:
        number = number + (byte >> 4) if byte >> 4 else _zigzag(stream)
        yield number, byte & 15


def _zigzag(stream: Iterator[int]) -> int:
    value = shift = 0
    while True:
        byte = next(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            return (value >> 1) ^ -(value & 1)
        shift += 7
