"""Samples as one record of bytes each, for peers whose format holds records and knows no fields."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...loader.errors import ConfigError
from ..harness.layout import Layout

_KINDS = ("bytes", "text", "array", "vector")


class RecordCodec:
    """Encodes samples of a layout, and decodes them: arrays as views of the record, bytes as copies."""

    def __init__(self, layout: Layout) -> None:
        unfit = [name for name, field in layout.items() if field["kind"] not in _KINDS]
        if unfit:
            raise ConfigError(f"a record holds bytes, text and numbers, and not the values of the fields {unfit}")
        self._fixed = [
            (name, np.dtype(field["dtype"]), tuple(field["shape"]))
            for name, field in layout.items()
            if field["kind"] == "array"
        ]
        self._free = [(name, field) for name, field in layout.items() if field["kind"] != "array"]
        self._lengths = f"<{len(self._free)}I"

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        parts = [np.ascontiguousarray(sample[name], dtype).tobytes() for name, dtype, _ in self._fixed]
        free = [_to_bytes(sample[name], field) for name, field in self._free]
        return b"".join((struct.pack(self._lengths, *map(len, free)), *parts, *free))

    def decode(self, record: bytes | memoryview) -> dict[str, Any]:
        view, sample = memoryview(record), {}
        lengths = struct.unpack_from(self._lengths, view)
        at = struct.calcsize(self._lengths)
        for name, dtype, shape in self._fixed:
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(view[at : at + size], dtype)
            sample[name] = values.reshape(shape) if shape else values[0]
            at += size
        for (name, field), length in zip(self._free, lengths, strict=True):
            sample[name] = _from_bytes(view[at : at + length], field)
            at += length
        return sample


def _to_bytes(value: Any, field: Mapping[str, Any]) -> bytes:
    if value is None:
        return b""
    if field["kind"] == "vector":
        return np.asarray(value, field["dtype"]).tobytes()
    return value.encode() if isinstance(value, str) else bytes(value)


def _from_bytes(view: memoryview, field: Mapping[str, Any]) -> Any:
    if field["kind"] == "vector":
        return np.frombuffer(view, field["dtype"]).copy()
    return str(view, "utf-8") if field["kind"] == "text" else bytes(view)
