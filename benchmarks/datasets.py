"""Generated data sets of the workloads that loaders are compared on: bytes, images, tokens, rows, text.

The same bytes for the same size every time. What is compressed compresses as real data does: pictures are smoothed
noise at several scales, categories of the click log follow a power law.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..loader.errors import ConfigError
from ..storage import open_store
from ..tools.pack import pack
from .harness.job import Decode, PeerLayout

_DISTINCT = 400  # pictures; a data set repeats them, and nothing in its way could profit from that
_SEQ_LEN = 2048
_ROWS_IN_SHARD, _ROWS_IN_GROUP = 62_500, 62_500
_DENSE, _CATEGORIES = 13, 26


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload: a data set of ``samples`` at scale 1, and how it is read.

    Cases of one ``data`` share a data set. Those that are ``everywhere`` are measured on several ranks and with a
    delay, too, the others on one rank.
    """

    name: str
    title: str
    samples: int
    batch_size: int
    decode: Decode
    write: Callable[[str, int], None]
    data: str
    peer_layout: PeerLayout = "plain"
    everywhere: bool = False
    views: bool = False
    """Whether its raw bytes are also read as views, by the contenders that hand those out."""


def write_blobs(folder: str, samples: int, *, mean_bytes: int) -> None:
    """Tar shards of random bytes, of three quarters to five quarters of ``mean_bytes``, each with a class."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3 * mean_bytes // 4, 5 * mean_bytes // 4, samples)
    rows = ({"__key__": f"{i:09d}", "bin": rng.bytes(int(size)), "cls": i % 1000} for i, size in enumerate(sizes))
    pack(rows, folder, format="tar", shard_bytes=_shard_bytes(samples * mean_bytes), progress=False)


def write_text(folder: str, samples: int) -> None:
    """JSON lines of a number and a text of 20 to 300 words, which follow a power law."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, int(size))) for size in rng.integers(2, 11, 20_000)])
    lengths = rng.integers(20, 300, samples)
    rows = (
        {"id": i, "text": " ".join(words[np.minimum(rng.zipf(1.2, length), 20_000) - 1])}
        for i, length in enumerate(lengths)
    )
    pack(rows, folder, format="jsonl", shard_bytes=_shard_bytes(samples * 1000), progress=False)


def write_thumbnails(folder: str, samples: int) -> None:
    """Tar shards of JPEGs of about 10 KB, each with a class."""
    pictures = make_pictures(_DISTINCT, 160, 208, quality=84)
    shard_bytes = _shard_bytes(samples * sum(map(len, pictures)) // len(pictures))
    pack(_labelled(pictures, samples), folder, format="tar", shard_bytes=shard_bytes, progress=False)


def write_photos(folder: str, samples: int) -> None:
    """Tar shards of JPEGs of about 500 x 375 pixels, each with a class."""
    pictures = make_pictures(_DISTINCT, 375, 500, quality=90)
    shard_bytes = _shard_bytes(samples * sum(map(len, pictures)) // len(pictures))
    pack(_labelled(pictures, samples), folder, format="tar", shard_bytes=shard_bytes, progress=False)


def _shard_bytes(total: int) -> int:
    """At least 16 shards, so that even small data sets have a shard for each worker of a peer; none above 64 MiB."""
    return max(1 << 18, min(64 << 20, total // 16))


def _labelled(pictures: list[bytes], samples: int) -> Iterator[dict[str, Any]]:
    for i in range(samples):
        yield {"__key__": f"{i:09d}", "jpg": pictures[i % len(pictures)], "cls": i % 1000}


def make_pictures(count: int, height: int, width: int, *, quality: int) -> list[bytes]:
    """JPEGs whose spectrum falls off like a photograph's, some in portrait and some in landscape format.

    Raises:
        ConfigError: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError as exc:
        raise ConfigError("generating images needs OpenCV; pip install 'penstock[images]'") from exc
    rng = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        tall, wide = (width, height) if number % 4 == 3 else (height, width)
        pixels = np.zeros((tall, wide, 3), np.float32)
        for scale in (2, 4, 8, 16, 32, 64):
            noise = rng.standard_normal((-(-tall // scale) + 1, -(-wide // scale) + 1, 3)).astype(np.float32)
            pixels += cv2.resize(noise, (wide, tall), interpolation=cv2.INTER_CUBIC) * scale**0.8
        pixels = 128 + 48 * (pixels - pixels.mean()) / pixels.std()
        _, data = cv2.imencode(".jpg", np.clip(pixels, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, quality])
        encoded.append(data.tobytes())
    return encoded


def write_tokens(folder: str, samples: int) -> None:
    """Token files of sequences of 2,048 uint16."""
    rng = np.random.default_rng(0)
    sequences: Any = (rng.integers(0, 50_257, _SEQ_LEN, dtype=np.uint16) for _ in range(samples))
    shard_bytes = _shard_bytes(samples * _SEQ_LEN * 2)
    pack(sequences, folder, format="tokens", seq_len=_SEQ_LEN, shard_bytes=shard_bytes, progress=False)


def write_clicks(folder: str, samples: int) -> None:
    """Parquet files of a label, 13 float32 and 26 int32 categories, in row groups of about 10 MB, snappy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = open_store(folder)
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, samples, _ROWS_IN_SHARD)):
        rows = min(_ROWS_IN_SHARD, samples - start)
        columns: dict[str, Any] = {"label": rng.integers(0, 2, rows, dtype=np.int32)}
        for i in range(_DENSE):
            columns[f"dense_{i}"] = rng.lognormal(size=rows).astype(np.float32)
        for i in range(_CATEGORIES):
            columns[f"category_{i}"] = (rng.zipf(1.3, rows) % (1 << 24)).astype(np.int32)
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file, row_group_size=_ROWS_IN_GROUP, compression="snappy")
        store.put(f"clicks-{number:05d}.parquet", file.getvalue())


CASES = {
    case.name: case
    for case in (
        Case(
            name="bytes-6k",
            title="raw bytes, 6 KB",
            samples=60_000,
            batch_size=256,
            decode="none",
            write=partial(write_blobs, mean_bytes=6_000),
            data="blobs-6k",
            views=True,
        ),
        Case(
            name="bytes-40k",
            title="raw bytes, 40 KB",
            samples=8_000,
            batch_size=64,
            decode="none",
            write=partial(write_blobs, mean_bytes=40_000),
            data="blobs-40k",
            views=True,
            everywhere=True,
        ),
        Case(
            name="bytes-1m",
            title="raw bytes, 1 MB",
            samples=400,
            batch_size=8,
            decode="none",
            write=partial(write_blobs, mean_bytes=1_000_000),
            data="blobs-1m",
            views=True,
        ),
        Case(
            name="images",
            title="photos, cropped to 224 px",
            samples=6_000,
            batch_size=64,
            decode="224",
            write=write_photos,
            data="photos",
        ),
        Case(
            name="tokens",
            title="tokens, 2,048 per sample",
            samples=65_536,
            batch_size=64,
            decode="auto",
            write=write_tokens,
            data="tokens",
            everywhere=True,
        ),
        Case(
            name="rows",
            title="click log, 40 columns of Parquet",
            samples=1_000_000,
            batch_size=4096,
            decode="none",
            write=write_clicks,
            data="clicks",
        ),
        Case(
            name="rows-packed",
            title="click log, packed by hand",
            samples=1_000_000,
            batch_size=4096,
            decode="none",
            write=write_clicks,
            data="clicks",
            peer_layout="packed",
        ),
        Case(
            name="jsonl",
            title="lines of JSON, 1 KB",
            samples=200_000,
            batch_size=256,
            decode="none",
            write=write_text,
            data="text",
        ),
    )
}


def make_case(case: Case, root: Path, scale: float) -> Path:
    """The folder of a case's data set at a given scale; generated if it does not exist."""
    samples = max(64, int(case.samples * scale))
    folder = root / f"{case.data}-{samples}"
    done = folder.with_suffix(".done")
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        case.write(str(folder), samples)
        done.touch()
    return folder
