"""The sources of ``pack``: a folder of files, a table, or any iterable, each read as a stream of samples (dicts)."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import zstandard

from ...storage import NotFoundError, ObjectInfo, Store, open_store, split_url
from ..columns import KEY_COLUMN
from ..errors import DatasetError, FormatError

Sample = Mapping[str, Any]

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".csv", ".csv.gz", ".parquet", ".pq")
_BATCH_ROWS = 8192


@contextmanager
def open_samples(
    source: str | Path | Iterable[Sample], storage_options: Mapping[str, Any] | None = None, *, batches: bool = False
) -> Iterator[tuple[Iterator[Any], tuple[str, ...]]]:
    """The samples of a source, and the names of its classes where its folders are classes.

    With ``batches``, a Parquet or CSV table is read as Arrow record batches.

    Raises:
        DatasetError: the folder is empty.
        FormatError: the table cannot be read; the message names the line if it is known.
    """
    if not isinstance(source, (str, Path)):
        yield iter(source), ()
        return
    url = str(source)
    if url.lower().endswith(TABLE_SUFFIXES):
        with _open_object(url, storage_options) as file:
            columnar = batches and not is_json_lines(url)
            yield read_batches(file, url) if columnar else read_table(file, url), ()
        return
    store = open_store(url, storage_options=storage_options)
    try:
        listing = [info for info in store.list() if not _is_hidden(info.key)]
        if not listing:
            raise DatasetError(f"{url}: the folder holds no files; there is nothing to pack")
        classes = find_classes(info.key for info in listing)
        yield read_folder(store, listing, classes), classes
    finally:
        store.close()


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def _key_of(path: str) -> tuple[str, str]:
    """(key, field) of a file: 'a/b.seg.png' is field 'seg.png' of sample 'a/b', as in WebDataset."""
    folder, slash, name = path.rpartition("/")
    stem, _, field = name.partition(".")
    return f"{folder}{slash}{stem}", field.lower()


def find_classes(keys: Iterable[str]) -> tuple[str, ...]:
    """The sorted names of the folders if every file lies in one of two or more folders; otherwise nothing."""
    folders: set[str] = set()
    for key in keys:
        folder, slash, name = key.partition("/")
        if not slash or "/" in name:
            return ()
        folders.add(folder)
    return tuple(sorted(folders)) if len(folders) > 1 else ()


def read_folder(store: Store, listing: Iterable[ObjectInfo], classes: tuple[str, ...] = ()) -> Iterator[Sample]:
    """Samples of a folder: files whose names differ only after the first dot form one sample.

    With ``classes``, a sample without a field ``cls`` gets the ordinal of its folder as ``cls``.
    """
    ordinals = {name: ordinal for ordinal, name in enumerate(classes)}
    order = sorted(listing, key=lambda info: _key_of(info.key))
    sample: dict[str, Any] = {}
    for info in order:
        key, field = _key_of(info.key)
        if not field:
            raise DatasetError(f"{store.url}/{info.key}: has no extension to name its field; rename or remove it")
        if sample.get(KEY_COLUMN) != key:
            if sample:
                yield sample
            sample = {KEY_COLUMN: key}
            if classes:
                sample["cls"] = ordinals[key.partition("/")[0]]
        if field in sample and field != "cls":
            raise DatasetError(f"{store.url}/{info.key}: sample {key!r} has two files for field {field!r}")
        sample[field] = bytes(store.get(info.key, etag=info.etag))
    if sample:
        yield sample


def is_json_lines(name: str) -> bool:
    return ".jsonl" in name.lower() or name.lower().endswith(".ndjson")


def read_table(file: Any, name: str) -> Iterator[Sample]:
    """The rows of a JSONL, CSV or Parquet file, as dicts."""
    if is_json_lines(name):
        yield from _read_json_lines(file, name)
        return
    for batch in read_batches(file, name):
        yield from batch.to_pylist()


def read_batches(file: Any, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a CSV or Parquet file, as Arrow record batches."""
    lowered = name.lower()
    try:
        if lowered.endswith((".parquet", ".pq")):
            yield from pyarrow.parquet.ParquetFile(file).iter_batches(_BATCH_ROWS)
            return
        stream = gzip.GzipFile(fileobj=file) if lowered.endswith(".gz") else file
        yield from pyarrow.csv.open_csv(stream)
    except (pa.ArrowException, EOFError, gzip.BadGzipFile) as exc:
        raise FormatError(name, f"cannot be read as a table: {exc}") from exc


def _read_json_lines(file: Any, name: str) -> Iterator[Sample]:
    stream: Any = file
    if name.lower().endswith(".gz"):
        stream = gzip.GzipFile(fileobj=file)
    elif name.lower().endswith(".zst"):
        stream = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise FormatError(name, f"line {number} is a {type(row).__name__}; each line must be an object {{...}}")
            yield row
    except (ValueError, EOFError, OSError, zstandard.ZstdError) as exc:
        raise FormatError(name, f"line {number + (not isinstance(exc, ValueError))} cannot be read: {exc}") from exc


@contextmanager
def _open_object(url: str, storage_options: Mapping[str, Any] | None) -> Iterator[Any]:
    if "://" not in url:
        try:
            with Path(url).expanduser().open("rb") as local:
                yield local
        except FileNotFoundError as exc:
            raise NotFoundError(f"{url}: no such file") from exc
        return
    root, key = split_url(url)
    store = open_store(root, storage_options=storage_options)
    try:
        with io.BytesIO(store.get(key)) as remote:
            yield remote
    finally:
        store.close()
