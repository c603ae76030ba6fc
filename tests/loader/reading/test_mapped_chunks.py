"""Chunks of local archives are mapped: the same samples, and of a file that changes an error before a wrong one."""

from __future__ import annotations

import io
import os
import resource
import tarfile
import warnings
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.loader import DistributedDataLoader, Mixture, Source, TarFormat, open_manifest
from penstock.loader.counters import Counters
from penstock.loader.formats.detect import make_format
from penstock.loader.order.spans import Span, SpanPlanner
from penstock.loader.pipeline import tuning
from penstock.loader.reading import mapped as mapped_chunks
from penstock.loader.reading.chunk_source import ChunkSource
from penstock.storage import LocalStore, NotFoundError, ObjectChangedError
from penstock.storage.memory import mapped

SAMPLES, BATCH = 96, 8
FORMAT = TarFormat(chunk_bytes=64 << 10)
pytestmark = pytest.mark.usefixtures("small_chunks_too")


def blob(number: int) -> bytes:
    return np.random.default_rng(number).bytes(5000 + 97 * number)


def write_shard(path: Path, numbers: range, salt: bytes = b"") -> None:
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode=mode) as archive:  # type: ignore[call-overload]
        for number in numbers:
            fields = {"bin": blob(number)[: -len(salt) or None] + salt, "cls": b"%d" % number}
            if number % 3 == 0:
                fields["extra"] = b"e" * (4000 + number)
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{number:04d}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not mapped.can_map(tmp_path.stat().st_dev):
        pytest.skip(f"nothing is mapped of {mapped.kind_of_disk(tmp_path.stat().st_dev) or 'this file system'}")
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(2):
        write_shard(data / f"{shard}.tar", range(shard * SAMPLES // 2, (shard + 1) * SAMPLES // 2))
    return data


def load(url: Any, **options: Any) -> DistributedDataLoader:
    settings: dict[str, Any] = {"batch_size": BATCH, "decode": None, "format": FORMAT, "seed": 3, "with_ids": True}
    return DistributedDataLoader(url, **{**settings, **options})


def rows_of(loader: DistributedDataLoader) -> list[tuple[Any, ...]]:
    with loader:
        return [
            row
            for batch in loader
            for row in zip(*(list(batch[name]) for name in ("__id__", "bin", "cls", "extra")), strict=True)
        ]


@pytest.mark.slow
def test_samples_are_those_that_are_read_into_memory(folder: Path, maps: list[str]) -> None:
    found = rows_of(load(folder))
    assert set(maps) == {"0.tar", "1.tar"}
    maps.clear()
    assert found == rows_of(load(folder, storage_options={"mapped_reads": False}))
    assert not maps
    assert sorted(int(number) for number, *_ in found) == list(range(SAMPLES))
    for number, data, label, extra in found:
        assert data == blob(int(number))
        assert label == b"%d" % number
        assert extra == (b"e" * (4000 + int(number)) if number % 3 == 0 else None)


@pytest.mark.slow
def test_rows_that_stay_in_chunks_are_gathered_more_at_once(
    folder: Path, maps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SPAN_BYTES", "_MOST_SPAN_BYTES"):
        monkeypatch.setattr(tuning, name, 3 * BATCH * 12_000)  # else all of so few steps are one span
    plan, steps = SpanPlanner.plan_next, set[int]()

    def note(planner: SpanPlanner, most: int) -> Span:
        span = plan(planner, most)
        steps.add(span.steps)
        return span

    monkeypatch.setattr(SpanPlanner, "plan_next", note)
    found = []
    in_memory = {"storage_options": {"mapped_reads": False}}
    for most, options in (
        (8, {}), (8, {"raw": "view"}), (8, {"raw": "view", "storage_options": {"mapped_reads": "views"}}),
        (2, in_memory), (2, {"decode": {"bin": len}}), (2, {"memory_limit": "2MB"}),
    ):  # fmt: skip
        with load(folder, format=TarFormat(chunk_bytes=256 << 10), **options) as loader:
            found.append([batch["__id__"].tolist() for _ in range(8) for batch in loader])
        assert max(steps) == most, options
        steps.clear()
    assert maps
    assert all(ids == found[0] for ids in found)


def test_decoders_and_mixtures_are_given_the_same(folder: Path, maps: list[str]) -> None:
    def size(data: memoryview | bytes) -> int:
        return len(data)

    decoded = rows_of(load(folder, decode={"bin": size}))
    assert maps
    maps.clear()
    assert sorted(data for _, data, *_ in decoded) == [len(blob(number)) for number in range(SAMPLES)]
    with load(Mixture({"a": Source(folder)})) as loader:
        batch = next(iter(loader))
    assert maps
    assert all(data == blob(int(label)) for data, label in zip(batch["bin"], batch["cls"], strict=True))


@pytest.mark.parametrize("options", [{"raw": "view"}, {"max_bad_chunks": 2}, {"on_error": "skip"}])
def test_what_is_looked_at_later_or_quarantined_is_read(folder: Path, maps: list[str], options: dict[str, Any]) -> None:
    assert len(rows_of(load(folder, **options))) == SAMPLES
    assert not maps


VIEWS: dict[str, Any] = {"raw": "view", "storage_options": {"mapped_reads": "views"}}


@pytest.mark.slow
def test_views_are_mapped_where_files_are_said_to_stay(folder: Path, maps: list[str]) -> None:
    expected = rows_of(load(folder, raw="view"))
    assert not maps
    kept = rows_of(load(folder, **VIEWS))
    assert set(maps) == {"0.tar", "1.tar"}
    assert kept == expected
    decoded = rows_of(load(folder, **VIEWS, decode={"bin": bytes}))
    assert [data for _, data, *_ in decoded] == [data for _, data, *_ in expected]
    for path in folder.iterdir():  # whoever keeps a view keeps the file
        path.unlink()
    assert kept == expected


def test_files_are_as_they_were_indexed_when_views_of_them_are_made(folder: Path) -> None:
    def check(batch: Any) -> None:
        for number, data in zip(batch["cls"], batch["bin"], strict=True):
            assert data == blob(int(number))

    with load(folder, **VIEWS) as loader:
        kept = next(iter(loader))
        for shard in range(2):
            fresh = folder.parent / "fresh.tar"
            write_shard(fresh, range(shard * SAMPLES // 2, (shard + 1) * SAMPLES // 2), b"new")
            fresh.replace(folder / f"{shard}.tar")
        with pytest.raises(ObjectChangedError):
            deque(map(check, chain.from_iterable(repeat(loader))), 0)  # some batches were made before
    check(kept)
    with warnings.catch_warnings(action="ignore"):  # torch says once a process that it is not writable
        torch.frombuffer(kept["bin"][0], dtype=torch.uint8).zero_()  # is a page of its own then, and no crash
    assert not any(kept["bin"][0])


@pytest.mark.slow
def test_bytes_and_bad_data_are_as_ever_where_views_are_mapped(folder: Path, maps: list[str]) -> None:
    expected = rows_of(load(folder))
    maps.clear()
    assert rows_of(load(folder, storage_options=VIEWS["storage_options"])) == expected
    assert maps
    maps.clear()
    assert len(rows_of(load(folder, **VIEWS, max_bad_chunks=2))) == SAMPLES
    assert not maps


@pytest.mark.slow
def test_an_archive_in_a_compressed_file_is_the_same(tmp_path: Path, folder: Path) -> None:
    zipped = tmp_path / "zipped"
    zipped.mkdir()
    write_shard(zipped / "0.tar.gz", range(SAMPLES))
    assert {row[1:] for row in rows_of(load(zipped, format=None))} == {row[1:] for row in rows_of(load(folder))}


@pytest.fixture
def opened(folder: Path) -> tuple[ChunkSource, Any]:
    """A source that maps, and the field of its first chunk."""
    manifest = open_manifest(folder, format=FORMAT)
    source = ChunkSource(
        manifest, make_format(manifest.format, manifest.config), LocalStore(folder), None, Counters(), maps_files=True
    )
    return source, source.load(0).columns["bin"]


def test_chunks_that_were_mapped_before_it_shows_that_none_should_be_are_read_into_memory(
    folder: Path, maps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    source, read = (
        ChunkSource(manifest, FORMAT, LocalStore(folder), None, Counters(), maps_files=maps_files)
        for maps_files in (True, False)
    )
    fetched = [source.fetch(chunk) for chunk in (0, 1)]
    assert maps
    monkeypatch.setattr(mapped_chunks.MappedChunks, "guard", lambda *_: None)
    for chunk in (0, 1):
        found, wanted = source.open(chunk, fetched[chunk]).columns["bin"], read.load(chunk).columns["bin"]
        assert type(found) is type(wanted)
        assert found.take(np.arange(3)) == wanted.take(np.arange(3))


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1024)
        file.write(b"other")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (rewrite, ObjectChangedError),
        (lambda path: os.truncate(path, 10), ObjectChangedError),
        (lambda path: path.with_name("1.tar").replace(path), ObjectChangedError),
        (Path.unlink, NotFoundError),
    ],
)
def test_a_file_that_changes_before_its_values_are_taken_is_an_error(
    folder: Path, opened: tuple[ChunkSource, Any], harm: Callable[[Path], None], error: type[Exception]
) -> None:
    column = opened[1]
    rows = np.array([0, 2])
    assert column.take(rows) == [blob(0), blob(2)]
    assert [bytes(value) for value in column.copies(rows)] == [blob(0), blob(2)]
    harm(folder / "0.tar")
    with pytest.raises(error, match=r"0\.tar"):
        column.take(rows)


def test_what_is_written_between_two_looks_at_a_file_is_found(
    folder: Path, opened: tuple[ChunkSource, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    column = opened[1]
    check = LocalStore.check_unchanged

    def check_then_write(self: LocalStore, key: str, etag: str) -> None:
        check(self, key, etag)
        rewrite(folder / key)

    monkeypatch.setattr(LocalStore, "check_unchanged", check_then_write)
    with pytest.raises(ObjectChangedError, match=r"0\.tar has changed"):
        column.take(np.array([0]))


def test_a_run_whose_data_are_rewritten_ends_with_an_error_and_no_wrong_sample(folder: Path) -> None:
    with load(folder) as loader:
        next(iter(loader))
        for shard in ("0.tar", "1.tar"):
            rewrite(folder / shard)
        with pytest.raises(ObjectChangedError, match=r"\.tar has changed"):  # noqa: PT012
            for _ in range(50):  # epochs: some batches were made before
                for batch in loader:
                    assert all(data == blob(int(label)) for data, label in zip(batch["bin"], batch["cls"], strict=True))


def test_chunks_are_read_into_memory_where_the_kernel_does_not_keep_them(
    opened: tuple[ChunkSource, Any], maps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, column = opened
    faults = iter(range(10**6))
    slow = SimpleNamespace(
        getrusage=lambda _: SimpleNamespace(ru_majflt=next(faults)), RUSAGE_THREAD=resource.RUSAGE_THREAD
    )
    source.load(1)
    assert maps
    monkeypatch.setattr(mapped_chunks, "resource", slow)
    for _ in range(mapped_chunks._TRIALS):
        assert column.take(np.array([1])) == [blob(1)]
    maps.clear()
    block = source.load(1)
    assert not maps
    assert block.columns["bin"].take(np.array([0])) is not None
