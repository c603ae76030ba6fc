"""Shards of mosaicml-streaming's MDS, and the index.json that names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from ...loader.dataset.manifest import Manifest
from ...loader.errors import DatasetError
from ...loader.formats.mds import MdsEntry
from ...loader.formats.mds_encodings import ARRAY_CODES, fixed_size
from .values import dump_json, json_value
from .writer import SampleWriter, Shard

_MOST_BYTES = (1 << 32) - 1  # offsets are u32


class MdsWriter(SampleWriter):
    """Not compressed. The first sample determines the columns and their encodings; MDS has no nulls."""

    suffix = ".mds"

    def __init__(self, shard_bytes: int) -> None:
        super().__init__()
        self._shard_bytes = shard_bytes
        self._encodings: dict[str, str] = {}
        self._samples: list[bytes] = []
        self._held = 0

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        super().resume(state, units)
        self._encodings = dict(state["encodings"])

    def add(self, item: Any) -> list[Shard]:
        if not isinstance(item, Mapping):
            raise DatasetError(f"sample {self.added} is a {type(item).__name__}; MDS shards need dicts")
        sample = {str(name): value for name, value in item.items()}
        if not sample:
            raise DatasetError(f"sample {self.added} has no fields; drop it with map=")
        if not self._encodings:
            names = sorted(sample)
            self._encodings = {name: self._checked(name, sample[name], None) for name in names}
        if sample.keys() != self._encodings.keys():
            raise DatasetError(
                f"sample {self.added} has the fields {sorted(sample)}, the first one {list(self._encodings)}; MDS "
                "needs the same fields in every sample"
            )
        data = self._encode(sample)
        full = self.finish() if self._samples and self._size() + 4 + len(data) > self._shard_bytes else []
        self._samples.append(data)
        self._held += len(data)
        if self._size() > _MOST_BYTES:
            raise DatasetError(f"sample {self.added} has {len(data)} bytes; an MDS shard holds at most 4 GiB")
        self.added += 1
        return full

    def _checked(self, name: str, value: Any, expected: str | None) -> str:
        found = _encoding_of(value)
        if found is None:
            problem = "no value, and MDS has no nulls" if value is None else f"a {type(value).__name__}"
            raise DatasetError(
                f"sample {self.added}, field {name!r}: cannot write {problem}; change it with map=, or pack to parquet"
            )
        if expected is not None and found != expected:
            raise DatasetError(
                f"sample {self.added}, field {name!r}: is {found} in MDS's words, but {expected} in the first sample; "
                "give all samples values of one type"
            )
        return found

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        sizes, parts = [], []
        for name, encoding in self._encodings.items():
            self._checked(name, sample[name], encoding)
            try:
                data = _encode_value(encoding, sample[name])
            except (ValueError, OverflowError) as exc:
                raise DatasetError(f"sample {self.added}, field {name!r}: {exc}") from exc
            if fixed_size(encoding) is None:
                sizes.append(len(data))
            parts.append(data)
        return np.array(sizes, "<u4").tobytes() + b"".join(parts)

    def _head(self) -> bytes:
        config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": self._shard_bytes,
            **_columns(self._encodings),
        }
        return json.dumps(config, sort_keys=True).encode()

    def _size(self) -> int:
        return 4 + 4 * (len(self._samples) + 1) + len(self._head()) + self._held

    def finish(self) -> list[Shard]:
        if not self._samples:
            return []
        count, head = len(self._samples), self._head()
        first = 4 + 4 * (count + 1) + len(head)
        offsets = first + np.concatenate([[0], np.cumsum([len(data) for data in self._samples])])
        data = b"".join((np.array([count, *offsets], "<u4").tobytes(), head, *self._samples))
        self._samples, self._held = [], 0
        return [Shard(data, self.added, {"encodings": self._encodings}, MdsEntry(count, len(data), self._encodings))]

    def companions(self, manifest: Manifest) -> Mapping[str, bytes]:
        counts = np.bincount(manifest.shard_index, weights=manifest.samples, minlength=len(manifest.shards))
        shards = [
            {
                "version": 2,
                "format": "mds",
                "compression": None,
                "hashes": [],
                "size_limit": self._shard_bytes,
                "samples": int(samples),
                "raw_data": {"basename": shard.key, "bytes": shard.size, "hashes": {}},
                "zip_data": None,
                **_columns(self._encodings),
            }
            for shard, samples in zip(manifest.shards, counts, strict=True)
        ]
        return {"index.json": json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()}


def _columns(encodings: Mapping[str, str]) -> dict[str, list[Any]]:
    return {
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [fixed_size(encoding) for encoding in encodings.values()],
    }


def _encoding_of(value: Any) -> str | None:
    """The encoding of a value; None if MDS has none that is read without unpickling."""
    if isinstance(value, (bool, np.bool_, list, tuple, Mapping)):
        return "json"
    if isinstance(value, np.generic):
        return str(value.dtype.name) if value.dtype.kind in "iuf" else None
    if isinstance(value, np.ndarray):
        return "ndarray" if value.dtype.name in ARRAY_CODES and value.ndim else None
    kinds: dict[type, str] = {int: "int", float: "float64", str: "str", bytes: "bytes", Decimal: "str_decimal"}
    for kind, encoding in kinds.items():
        if isinstance(value, kind):
            return encoding
    return "str" if hasattr(value, "isoformat") else None


def _encode_value(encoding: str, value: Any) -> bytes:
    if encoding == "json":
        return dump_json(value).encode()
    if encoding == "bytes":
        return bytes(value)
    if encoding in ("str", "str_decimal"):
        return str(json_value(value)).encode()
    if encoding == "ndarray":
        return _encode_array(np.ascontiguousarray(value))
    if encoding == "int" and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit into int64; change it with map=, or pack to parquet")
    return np.array(value, np.dtype("int64" if encoding == "int" else encoding).newbyteorder("<")).tobytes()


def _encode_array(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Encode as [dtype code: 1] [ndim << 2 | log2 of a size's bytes: 1] [shape] [values]."""
    log2 = next(bits for bits in range(4) if max(array.shape) < 1 << (8 << bits))
    head = bytes((ARRAY_CODES[array.dtype.name], array.ndim << 2 | log2))
    values = array.astype(array.dtype.newbyteorder("<"))
    return head + np.array(array.shape, f"<u{1 << log2}").tobytes() + values.tobytes()
