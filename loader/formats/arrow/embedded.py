"""Files inside of a table: struct<bytes, path>, as Hugging Face's data sets keep images and sounds."""

from __future__ import annotations

import reprlib

import pyarrow as pa

from ...errors import FormatError


def file_bytes(array: pa.StructArray, name: str, shard: str) -> pa.Array:
    """The bytes of each file in a column; null where there is no file.

    Raises:
        FormatError: there is a path without bytes, so that the file lies elsewhere.
    """
    children = array.flatten()
    data = children[array.type.get_field_index("bytes")]
    if data.null_count:
        paths = children[array.type.get_field_index("path")].filter(data.is_null()).drop_null()
        if len(paths):
            path = reprlib.repr(paths[0].as_py())
            raise FormatError(
                shard,
                f"column {name!r} holds a path ({path}) without bytes, and files elsewhere are not read; write the "
                "table with the bytes in it, as datasets' to_parquet() does, or leave the column out",
            )
    return data
