"""Writing a data set: samples to shards, shards to a store, and the manifest last."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from ..loader.dataset.class_names import LABEL_FIELD
from ..loader.dataset.manifest import MANIFEST_NAME, Manifest
from ..loader.dataset.source import is_unfinished
from ..loader.dataset.splits import Split
from ..loader.errors import ConfigError, DatasetError
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ShardFormat
from ..loader.order.cached import cached_property
from ..loader.packing.tokenizer import TextEncoder, open_tokenizer
from ..loader.progress import show_progress
from ..storage import NotFoundError, open_store
from .packing.classes import Classes, read_classes, warn_of_siblings
from .packing.dialect import check_decimal_point, check_delimiter
from .packing.grouping import read_extensions
from .packing.identity import describe_function
from .packing.jsonl import JsonlWriter
from .packing.mapping import MapFunction, Mapped, Transform, transformed
from .packing.mds import MdsWriter
from .packing.samples import SampleSource, SourceOptions
from .packing.source import named_source, open_source
from .packing.tables import ArrowWriter, ParquetWriter
from .packing.tar import TarWriter
from .packing.target import Cursor, Target
from .packing.tokens import Tokenize, TokensWriter
from .packing.writer import Sample, Shard, ShardWriter

SHARD_BYTES = 64 << 20
PackFormat = Literal["tar", "parquet", "tokens", "mds", "jsonl", "arrow"]

PackSource: TypeAlias = (
    str | Path | Iterable[Sample] | Iterable[pa.RecordBatch] | Iterable[Sequence[int]] | Iterable[str]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """Summary of a pack. ``classes`` are the names for the numbers in ``cls``; ``dropped`` describes dropped data.

    ``notes`` tell the user how the source was understood. ``kept_shards`` counts those that an interrupted pack had
    written.
    """

    url: str
    format: str
    shards: int
    samples: int
    bytes: int
    seconds: float
    fingerprint: str
    classes: tuple[str, ...] = ()
    dropped: str | None = None
    notes: tuple[str, ...] = ()
    kept_shards: int = 0

    def __str__(self) -> str:
        return (
            f"{self.url}: {self.samples:,} samples, {self.bytes:,} bytes of {self.format} in "
            f"{self.shards} {'shard' if self.shards == 1 else 'shards'}, "
            f"packed in {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments that determine what is written."""

    format: str
    shard_bytes: int
    seq_len: int | None
    dtype: str
    tokenizer: Any
    field: str | None
    map: MapFunction | None
    checksums: bool
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes={self.shard_bytes}: needs 1 or more")
        if self.format not in ("tar", "parquet", "tokens", "mds", "jsonl", "arrow"):
            raise ConfigError(f"format={self.format!r}: pack writes tar, parquet, tokens, mds, jsonl or arrow")
        if self.format != "tokens":
            self._refuse_settings_of_tokens()
        elif self.seq_len is None:
            raise ConfigError("format='tokens' needs a sequence length: give seq_len=, in tokens")
        elif self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len}: a sequence has at least one token")
        elif self.classes is not None:
            raise ConfigError("classes= names the numbers of a field 'cls', which format='tokens' has not")

    def _refuse_settings_of_tokens(self) -> None:
        settings = {name: getattr(self, name) for name in ("seq_len", "tokenizer", "field")}
        given = [f"{name}=" for name, value in settings.items() if value is not None]
        if self.dtype != "uint16":
            given.append("dtype=")
        if given:
            verb = "applies" if len(given) == 1 else "apply"
            raise ConfigError(f"{' and '.join(given)} {verb} to format='tokens', not to format={self.format!r}")

    @cached_property
    def encoder(self) -> TextEncoder | None:
        """Open the tokenizer, if there is one. Raises ConfigError where it cannot be found."""
        return None if self.tokenizer is None else open_tokenizer(self.tokenizer)

    def shard_format(self) -> ShardFormat:
        config = {"seq_len": self.seq_len, "dtype": self.dtype} if self.format == "tokens" else None
        return make_format(self.format, config)

    def writer(self, hints: Mapping[str, pa.DataType]) -> ShardWriter:
        if self.format == "tokens":
            assert self.seq_len is not None
            return TokensWriter(self.shard_bytes, seq_len=self.seq_len, dtype=self.dtype)
        if self.format == "tar":
            return TarWriter(self.shard_bytes)
        if self.format == "mds":
            return MdsWriter(self.shard_bytes)
        if self.format == "jsonl":
            return JsonlWriter(self.shard_bytes)
        kind = ParquetWriter if self.format == "parquet" else ArrowWriter
        return kind(self.shard_bytes, hints, is_whole=self.map is None)

    def transform(self, writer: ShardWriter, source: SampleSource) -> Transform:
        return Transform(
            function=self.map,
            tokenize=Tokenize(self.encoder, self.field) if self.format == "tokens" else None,
            keeps_batches=writer.takes_batches,
            reads_members=source.has_members and self.format in ("parquet", "arrow", "mds"),
        )

    def fingerprint(self, identity: Any) -> str | None:
        """Hash that identifies this job with its source and functions; None if they cannot be identified."""
        functions = [] if self.encoder is None else [_describe_encoder(self.encoder)]
        functions += [] if self.map is None else [describe_function(self.map)]
        if identity is None or None in functions:
            return None
        settings: list[Any] = [self.format, self.shard_bytes, self.seq_len, self.dtype, self.field, self.checksums]
        settings += [] if self.classes is None else [self.classes]
        return hashlib.sha256(json.dumps([identity, functions, settings]).encode()).hexdigest()


def _describe_encoder(encoder: TextEncoder) -> list[Any] | None:
    return describe_function(encoder.tokenizer) if encoder.is_function else ["tokenizer", encoder.fingerprint]


def pack(
    source: PackSource,
    target_url: str | Path,
    *,
    format: PackFormat = "tar",  # noqa: A002 - the word that users know
    shard_bytes: int = SHARD_BYTES,
    map: MapFunction | None = None,  # noqa: A002 - the word that users know
    processes: int = 0,
    seq_len: int | None = None,
    dtype: str = "uint16",
    tokenizer: Callable[[str], Sequence[int]] | str | PathLike[str] | Any | None = None,
    field: str | None = None,
    source_format: ShardFormat | str | None = None,
    split: Split | None = None,
    follow_links: bool = False,
    extensions: Sequence[str] | None = None,
    delimiter: str | None = None,
    decimal_point: str | None = None,
    classes: Classes | None = None,
    checksums: bool = True,
    overwrite: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    cluster: str | None = None,
) -> PackSummary:
    """Write a data set, a folder, tables or an iterable of samples as shards of about ``shard_bytes``, and a manifest.

    A source is what the loader reads (of any format, in its order); a folder of loose files, which are grouped into
    samples by their name up to the first dot, with a ``cls`` if every file lies in one of several subfolders; CSV
    files, each row a sample; or an iterable of dicts (for tables also of Arrow record batches, for tokens of texts or
    lists of integers). ``source_format`` says what is meant where shards lie among other files: a format, "csv", or
    "files". ``split`` is that of ``DistributedDataLoader``. ``extensions`` are the endings of loose files to take, such
    as ["jpg", "seg.png"]: what is before them is the key. Without it, dots are part of the key where the names of all
    files show that they are (``cat.0.jpg``); names that do not show it are refused.

    ``delimiter`` and ``decimal_point`` are those of CSV files, where their headers do not tell the one, and the other
    is a comma.

    ``classes`` are the names of the classes in the order of their numbers: a list, a file of them, or another data set
    whose numbers to take, such as the training split's. Without it the subfolders are numbered in the order of their
    names. The names are kept in the manifest: ``loader.dataset.classes``.

    ``map`` turns a sample into one, several or, with None, none. With ``processes`` it and ``tokenizer`` run in so many
    of them, and with ``cluster`` on the Ray cluster at that address ("here": one that is started on this machine); what
    is written is the same. ``seq_len``, ``dtype``, ``tokenizer`` and ``field`` (the field that holds text
    or integers) apply to tokens only. A tokenizer is what ``Packing`` takes, whose texts are encoded many at a time, or
    a function from one text to its tokens. With ``checksums`` the manifest has one per chunk, which readers verify.

    What is written, by ``format``:

    - tar: one member per field: bytes as they are, text as UTF-8, numbers, decimals and times as text, arrays in .npy
      fields, any JSON value in .json fields; without ``__key__``, the ordinal is the key
    - parquet: zstd, row groups of about 4 MiB, with the source's schema, or that of the first 256 rows; NumPy arrays of
      one shape and dtype become fixed-size lists, and tensors in batches
    - arrow: uncompressed IPC files, record batches of about 4 MiB; else as parquet
    - mds: uncompressed shards and index.json; the first sample fixes the encodings; no missing values
    - jsonl: uncompressed; times and decimals as text, arrays as lists, NaN as null; no bytes
    - tokens: raw little-endian uint16 or uint32, every shard of whole sequences; texts follow each other without a
      separator, so let the tokenizer add one

    Labels (``cls``, ``id``) and texts (``txt``) of a tar become integers and text in tables. What a format cannot hold
    is refused with the sample's name. ``overwrite`` replaces shards of the same names, but none of the source; if more
    remain, an error names those to delete first.

    Each shard is written whole and the manifest last, so that readers refuse an interrupted pack. Run again with the
    same source and options, it goes on after the last shard that it noted; with others, or from an iterable, it starts
    anew. A target that is not empty is refused unless ``overwrite``, which always starts anew.

    Raises:
        ConfigError: the arguments contradict each other, or shards that are read would be overwritten.
        DatasetError: the source is empty, a sample cannot be written, or the target is not empty.
    """
    if processes < 0:
        raise ConfigError(f"processes={processes}: needs 0 or more")
    if cluster is not None:
        _check_spread(processes, is_work=map is not None or tokenizer is not None)
    job = _Job(
        format=format, shard_bytes=shard_bytes, seq_len=seq_len, dtype=dtype, tokenizer=tokenizer, field=field, map=map,
        checksums=checksums, classes=read_classes(classes, storage_options),
    )  # fmt: skip
    started = time.monotonic()
    url = _folder_url(target_url)
    job.writer({})  # refuses arguments before anything is listed
    _ = job.encoder
    options = SourceOptions(
        follow_links=follow_links,
        classes=job.classes,
        extensions=None if extensions is None else read_extensions(extensions),
        delimiter=check_delimiter(delimiter),
        decimal_point=check_decimal_point(decimal_point),
        is_mapped=map is not None,
    )
    with named_source():
        opened = open_source(
            source,
            storage_options=source_storage_options,
            format=source_format,
            split=split,
            options=options,
            progress=progress,
            group=1 if processes == 0 and cluster is None else 64,
            replaced=url if overwrite else None,
        )
    try:
        writer = job.writer(opened.hints)
        store = open_store(url, storage_options=storage_options)
        try:
            target = Target(
                store, job.shard_format(), writer.suffix, job=job.fingerprint(opened.identity), checksums=checksums
            )
            if opened.classes:
                warn_of_siblings(url, opened.classes, storage_options)
            target.begin(overwrite=overwrite)
            kept = len(target.written)
            before = 0 if target.cursor is None else opened.before(target.cursor.piece)
            with show_progress("packing", opened.total, unit="samples", enabled=progress) as advance:
                advance(before)
                begin = (0, 0) if target.cursor is None else (target.cursor.piece, target.cursor.number)
                transform = job.transform(writer, opened)
                batches = opened.batches(begin[0])
                parts = transformed(batches, transform, processes, first=before, begin=begin, cluster=cluster)
                with closing(parts):
                    target.put_all(_cut(writer, parts, target.cursor, advance))
            if not target.written:
                raise DatasetError(f"{url}: the source has no samples; nothing was packed")
            manifest = target.finish(writer.samples(), writer.companions(target.manifest()), opened.classes)
        finally:
            store.close()
    finally:
        opened.close()
    return PackSummary(
        url=store.url,
        format=format,
        shards=len(manifest.shards),
        samples=manifest.num_samples,
        bytes=sum(info.size for info in manifest.shards),
        seconds=time.monotonic() - started,
        fingerprint=manifest.fingerprint,
        classes=manifest.classes or (),
        dropped=writer.dropped if isinstance(writer, TokensWriter) else None,
        notes=(*opened.notes, *writer.notes(), *_note_of_classes(opened.classes, manifest)),
        kept_shards=kept,
    )


def _check_spread(processes: int, *, is_work: bool) -> None:
    if processes:
        raise ConfigError(f"processes={processes}, and a cluster in their place: give one of them")
    if not is_work:
        raise ConfigError("a cluster takes over the work of map= and tokenizer=, and neither is given; pack without it")


def _note_of_classes(classes: Sequence[str], manifest: Manifest) -> tuple[str, ...]:
    is_lost = bool(classes) and manifest.classes is None
    return (f"the class names are not kept, since no sample has a field {LABEL_FIELD!r}",) if is_lost else ()


def _cut(
    writer: ShardWriter, parts: Iterable[Mapped], cursor: Cursor | None, advance: Callable[[int], None]
) -> Iterator[tuple[Shard, Cursor]]:
    """Yield the shards of a stream from ``cursor`` on, each with the cursor after it."""
    skipped = 0  # units that an earlier pack has written
    if cursor is not None:
        writer.resume(cursor.state, cursor.units)
        skipped = cursor.into
    begun: deque[tuple[int, int, int]] = deque()  # (units before it, piece, number) of each part
    for part in parts:
        advance(part.rows)
        begun.append((writer.added - skipped, part.piece, part.number))
        for item in [part.items] if isinstance(part.items, pa.RecordBatch) else part.items:
            taken = min(skipped, writer.units(item)) if skipped else 0
            skipped -= taken
            if taken and taken == writer.units(item):
                continue
            for shard in writer.add(writer.rest(item, taken) if taken else item):
                yield shard, _cursor_after(shard, begun)
    for shard in writer.finish():
        yield shard, _cursor_after(shard, begun)


def _cursor_after(shard: Shard, begun: deque[tuple[int, int, int]]) -> Cursor:
    while len(begun) > 1 and begun[1][0] <= shard.stop:
        begun.popleft()
    units, piece, number = begun[0]
    return Cursor(shard.stop, piece, number, shard.stop - units, shard.state)


def _folder_url(target: str | Path) -> str:
    if not str(target):
        raise ConfigError("a target is a URL or a path, not ''")
    return str(target).rstrip("/") + "/"


def pack_once(source: PackSource, target_url: str | Path, **options: Any) -> PackSummary | None:
    """``pack`` with its ``options`` if the target is empty; otherwise do nothing and return None.

    A target that an interrupted pack left behind is packed again.

    Raises:
        ConfigError, DatasetError: as ``pack``.
    """
    if unknown := sorted(set(options) - set(inspect.signature(pack).parameters)):
        raise ConfigError(f"{', '.join(unknown)}: unknown options of pack")
    store = open_store(_folder_url(target_url), storage_options=options.get("storage_options"))
    try:
        keys = {info.key for info in store.list()}
        is_whole = bool(keys) and not (MANIFEST_NAME in keys and is_unfinished(store.get(MANIFEST_NAME)))
    except NotFoundError:
        is_whole = False  # the first put creates the folder or bucket, or fails
    finally:
        store.close()
    return None if is_whole else pack(source, target_url, **options)
