"""Snapshots: a bucket as bytes, values and last sequences together, under one checksum."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...storage.hashing import xxh3_64
from ..errors import ServerRefusedError
from .bucket import Bucket, Gradients, Piece
from .holding import HeldBucket
from .rows import HeldRows

_MAGIC = b"penstkB1"
_HEAD = struct.Struct("<8sQQ")  # magic, checksum of the rest, bytes of the description
_TYPES = {"float32": torch.float32, "int64": torch.int64}


class _Tensors:
    """Tensors one after another, referred to by their number."""

    def __init__(self) -> None:
        self.described: list[tuple[str, list[int]]] = []
        self.chunks: list[bytes] = []

    def put(self, tensor: Tensor) -> int:
        array = tensor.detach().contiguous().numpy()
        self.described.append((str(array.dtype), list(array.shape)))
        self.chunks.append(array.tobytes())
        return len(self.chunks) - 1


def snapshot(bucket: HeldBucket, fenced: Mapping[str, int], *, run: str, schema: str) -> bytes:
    """Write a bucket of a run as bytes; ``fenced`` are the last incarnations of workers that were forgotten."""
    tensors = _Tensors()

    def state_of(state: dict[str, Tensor]) -> dict[str, int]:
        return {key: tensors.put(tensor) for key, tensor in state.items()}

    described = {
        "run": run,
        "schema": schema,
        "bucket": bucket.number,
        "version": bucket.version,
        "changes": bucket.changes,
        "sequences": bucket.sequences,
        "clocks": bucket.clocks,
        "fenced": dict(fenced),
        "settled": bucket.settled,
        "counted": sorted(bucket.counted),
        "pieces": [[*key, tensors.put(one.values), state_of(one.state)] for key, one in bucket.pieces.items()],
        "tables": {
            name: [
                tensors.put(torch.from_numpy(one.ids)),
                tensors.put(torch.from_numpy(one.versions)),
                tensors.put(one.values),
                state_of(one.state),
            ]
            for name, one in bucket.tables.items()
        },
        "pending": [
            {
                "numbers": [one.worker, one.step, int(one.bases[0]), one.weight, one.rate, one.arrived],
                "pieces": [[*key, tensors.put(tensor)] for key, tensor in one.pieces.items()],
                "rows": {
                    table: [tensors.put(torch.from_numpy(ids)), tensors.put(values)]
                    for table, (ids, _, values) in one.rows.items()
                },
            }
            for one in bucket.pending
        ],
        "tensors": tensors.described,
    }
    text = json.dumps(described).encode()
    body = b"".join([struct.pack("<Q", len(text)), text, *tensors.chunks])
    return _HEAD.pack(_MAGIC, xxh3_64(body), len(body)) + body


def restore(data: bytes, *, run: str, schema: str, place: str = "a snapshot") -> Bucket:
    """Read a bucket of a run from the bytes of ``snapshot``.

    Raises:
        ServerRefusedError: they are damaged, or of another run or model; the message names ``place``.
    """
    described, body = _checked(data, place)
    for name, expected in (("run", run), ("schema", schema)):
        if described[name] != expected:
            raise ServerRefusedError(
                f"{place} is of {name} {described[name]!r}, and this server of {expected!r}; "
                f"restore a checkpoint of this run and model"
            )
    tensors: list[Tensor] = []
    offset = 0
    for kind, shape in described["tensors"]:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, np.dtype(kind), count, offset).reshape(shape).copy()
        tensors.append(torch.from_numpy(array))
        offset += array.nbytes
    number = described["bucket"]
    pieces = {
        (name, index): Piece(tensors[values], {key: tensors[place] for key, place in state.items()})
        for name, index, values, state in described["pieces"]
    }
    tables = {
        name: HeldRows(
            ids=tensors[ids].numpy(),
            values=tensors[values],
            state={key: tensors[place] for key, place in state.items()},
            versions=tensors[versions].numpy(),
        )
        for name, (ids, versions, values, state) in described["tables"].items()
    }
    return Bucket(
        number=number,
        version=described["version"],
        changes=described["changes"],
        sequences={worker: (pair[0], pair[1]) for worker, pair in described["sequences"].items()},
        clocks=described["clocks"],
        fenced=described["fenced"],
        settled=described["settled"],
        counted=set(described["counted"]),
        pending=[_pending(number, one, tensors) for one in described["pending"]],
        pieces=pieces,
        tables=tables,
    )


def _pending(number: int, described: dict[str, Any], tensors: list[Tensor]) -> Gradients:
    worker, step, base, weight, rate, arrived = described["numbers"]
    rows = {}
    for table, (ids, values) in described["rows"].items():
        found = tensors[ids].numpy()
        rows[table] = found, np.full(len(found), number, np.int64), tensors[values]
    return Gradients(
        worker=worker,
        step=step,
        weight=weight,
        rate=rate,
        arrived=arrived,
        buckets=np.array([number], np.int64),
        bases=np.array([base], np.int64),
        pieces={(name, index): tensors[place] for name, index, place in described["pieces"]},
        rows=rows,
    )


def _checked(data: bytes, place: str) -> tuple[dict[str, Any], bytes]:
    """Return the description and the bytes of the tensors, once the checksum holds."""
    damaged = f"{place} is damaged; restore the bucket from a replica or an older checkpoint"
    if len(data) < _HEAD.size + 8:
        raise ServerRefusedError(f"{damaged}: it has {len(data)} bytes")
    magic, checksum, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or len(body) != length or xxh3_64(body) != checksum:
        raise ServerRefusedError(f"{damaged}: its checksum does not hold")
    (size,) = struct.unpack_from("<Q", body)
    described: dict[str, Any] = json.loads(body[8 : 8 + size])
    return described, body[8 + size :]
