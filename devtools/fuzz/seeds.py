"""Small valid inputs of every kind, from which damaged ones are made."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from penstock.loader.order.selecting import Subset
from penstock.loader.pipeline.delivery_log import MAGIC, SKIP_MAGIC

ROWS = 12


def tars() -> list[bytes]:
    formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    return [_tar(kind, stem) for kind in formats for stem in ("", "folder/" + "long" * 30 + "/ä")]


def _tar(kind: int, stem: str) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind) as tar:
        for row in range(4):
            values = {"cls": b"%d" % row, "json": b'{"a": [1, 2]}', "npy": npys()[row], "txt": b"word " * 200}
            for field, value in values.items():
                info = tarfile.TarInfo(f"{stem}{row:06d}.{field}")
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
    return sink.getvalue().rstrip(b"\0") + bytes(1024)


def repair_tar(data: bytearray) -> None:
    """State the right sum in every block that looks like a header."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def compressed(seeds: list[bytes]) -> list[bytes]:
    """Compress each of ``seeds`` as gzip, as bzip2, and as zstd with its size stated and without."""
    packed = [gzip.compress(seed, mtime=0) for seed in seeds] + [bz2.compress(seed) for seed in seeds]
    for sized in (True, False):
        packed += [zstandard.ZstdCompressor(write_content_size=sized).compress(seed) for seed in seeds]
    return packed


def tables() -> list[pa.Table]:
    """Make tables that have, together, columns of every type that the loader reads."""
    numbers = list(range(ROWS))
    some = [number if number % 3 else None for number in numbers]
    texts = [None if number == 5 else f"text {number} " * (number % 4) for number in numbers]
    lists = [[number] * (number % 4) for number in numbers]
    plain = {"id": pa.array(numbers), "x": pa.array(some, pa.float32()), "b": pa.array([n % 2 == 0 for n in numbers])}
    views = {
        "view": pa.array(texts, pa.string_view()),
        "bytes": pa.array([None if t is None else t.encode() for t in texts], pa.binary_view()),
    }
    nested = {
        "list": pa.array(lists, pa.list_(pa.int32())),
        "fixed": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"a": n, "b": t} for n, t in zip(numbers, texts, strict=True)]),
        "map": pa.array([[(str(n), n)] for n in numbers], pa.map_(pa.string(), pa.int64())),
    }
    text = {
        "text": pa.array(texts),
        "large": pa.array(texts, pa.large_string()),
        "words": pa.array(["a word", "another"] * (ROWS // 2)).dictionary_encode(),
        "time": pa.array(numbers, pa.timestamp("us")),
        "raw": pa.array([b"%4d" % n for n in numbers], pa.binary(4)),
    }
    return [pa.table(columns) for columns in (plain, text, nested, views, {**plain, **text})]


def parquets() -> list[bytes]:
    found = []
    for table in tables():
        for compression in ("none", "zstd"):
            sink = io.BytesIO()
            pq.write_table(table, sink, row_group_size=5, compression=compression, store_schema=compression == "none")
            found.append(sink.getvalue())
    return found


def arrows(*, stream: bool) -> list[bytes]:
    found = []
    for table in tables():
        for compression in (None, "zstd"):
            options = pa.ipc.IpcWriteOptions(compression=compression)
            sink = pa.BufferOutputStream()
            opened = pa.ipc.new_stream if stream else pa.ipc.new_file
            with opened(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=5)
            found.append(sink.getvalue().to_pybytes())
    return found


def token_indexes() -> list[bytes]:
    """Make Megatron's .idx of ``MEGATRON_TOKENS`` int32 tokens."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    return [head + struct.pack("<iiqqqqq", 32, MEGATRON_TOKENS - 32, 0, 128, 0, 1, 2)]


MEGATRON_TOKENS = 128


def mds_shard() -> bytes:
    samples = [struct.pack("<II", 5, 3) + b"words" + struct.pack("<q", row) + b"abc" for row in range(ROWS)]
    first = 4 * (ROWS + 2)
    offsets = first + np.cumsum([0, *map(len, samples)])
    return struct.pack("<I", ROWS) + offsets.astype("<u4").tobytes() + b"".join(samples)


def mds_index(raw_bytes: int, **changes: Any) -> bytes:
    entry: dict[str, Any] = {
        "format": "mds",
        "samples": ROWS,
        "raw_data": {"basename": "s.mds", "bytes": raw_bytes, "hashes": {}},
        "zip_data": None,
        "column_names": ["text", "number", "more"],
        "column_encodings": ["str", "int", "bytes"],
        "column_sizes": [None, 8, None],
        **changes,
    }
    return json.dumps({"version": 2, "shards": [entry]}).encode()


def json_lines() -> list[bytes]:
    rows = [{"a": n, "b": n / 2, "c": "tëxt", "d": [[n], []], "e": {"f": None, "g": True}} for n in range(ROWS)]
    return ["".join(json.dumps(row, ensure_ascii=plain) + "\n" for row in rows).encode() for plain in (True, False)]


def npys() -> list[bytes]:
    arrays = (np.arange(6.0).reshape(2, 3), np.zeros((2, 2), "f2", order="F"), np.array(["ab", "c"]), np.array(3))
    return [_npy(array) for array in arrays]


def _npy(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def npzs() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        sink = io.BytesIO()
        save(sink, x=np.arange(4), y=np.ones((2, 2)))
        found.append(sink.getvalue())
    return found


def images() -> list[bytes]:
    """Make one image of each kind, and a lossless JPEG."""
    import cv2  # of an extra

    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3), np.uint8)
    found = [cv2.imencode(ending, pixels)[1].tobytes() for ending in (".jpg", ".png", ".webp", ".bmp", ".tiff")]
    return [*found, lossless_jpeg(64, 96)]


def lossless_jpeg(height: int, width: int, before_the_frame: bytes = b"") -> bytes:
    """Make a grey image, RGB, whose samples are all as predicted: one bit each, of the only code that there is."""
    components = b"".join(bytes((name, 0x11, 0)) for name in b"RGB")
    frame = struct.pack(">HBHHB", 17, 8, height, width, 3) + components
    codes = struct.pack(">HB16BB", 20, 0, 1, *[0] * 15, 0)
    scan = struct.pack(">HB", 12, 3) + b"R\0G\0B\0" + b"\1\0\0"
    head = b"\xff\xd8" + before_the_frame + b"\xff\xc3" + frame
    return head + b"\xff\xc4" + codes + b"\xff\xda" + scan + bytes(-(-3 * height * width // 8)) + b"\xff\xd9"


def jpegs() -> list[bytes]:
    """Make small JPEGs that are large enough to be decoded in part: of each subsampling, and with restart markers."""
    import cv2

    noise = np.random.default_rng(0).integers(0, 255, (15, 18, 3), np.uint8)
    pixels = cv2.resize(noise, (180, 150), interpolation=cv2.INTER_LINEAR)
    factors = ("444", "422", "440", "420", "411")
    options = [[cv2.IMWRITE_JPEG_SAMPLING_FACTOR, getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{f}")] for f in factors]
    options += [[cv2.IMWRITE_JPEG_RST_INTERVAL, 5], [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]]
    return [cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 20, *one])[1].tobytes() for one in options]


def delivery_logs() -> list[bytes]:
    header = {"fingerprint": "f", "num_samples": 8, "rank": 0, "world_size": 1, "started_ns": 1, "launch": "l"}
    records = ([MAGIC, 0, 0, 4, 4, 0, 1, 2, 3], [SKIP_MAGIC, 0, 4, 6, 0], [MAGIC, 0, 6, 8, 2, 6, 7])
    body = b"".join(np.array(record, "<i8").tobytes() for record in records)
    subset = {**header, "subset": Subset.share(0.0, 0.5).to_dict()}
    return [json.dumps(head).encode() + b"\n" + body for head in (header, subset)]
