"""Where values lie in chunks is known to the next process: for the same bytes alone, in no more room than it may."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from penstock.loader import DistributedDataLoader, TarFormat, open_manifest
from penstock.loader.columns import Block, BytesColumn
from penstock.loader.dataset.manifest import Manifest
from penstock.loader.formats.tar import format as tar_format
from penstock.loader.reading import layouts
from penstock.loader.reading import mapped as mapped_chunks
from penstock.loader.reading.checksum import sum_chunks
from penstock.loader.reading.layouts import IN_CHUNK, KeptLayouts, Layout, Layouts
from penstock.storage import ObjectChangedError

FORMAT = TarFormat(chunk_bytes=32 << 10)
FIELDS = ("__id__", "__key__", "bin", "cls", "note")
CHUNKS = 5


def tar_of(samples: int, seed: int, salt: bytes = b"") -> bytes:
    """A tar of samples with a blob, a label, and in every third one a note; keys are no ASCII."""
    rng, sink = np.random.default_rng(seed), io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for number in range(samples):
            fields = {"bin": rng.bytes(3000 + number)[: -len(salt) or None] + salt, "cls": b"%d" % number}
            if number % 3 == 0:
                fields["note"] = b"n" * (100 + number)
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{seed}-{number:04d}{'é' if seed else ''}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


FEWEST_SAMPLES = layouts._FEWEST_SAMPLES


@pytest.fixture(autouse=True)
def few_samples_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_FEWEST_SAMPLES", 1)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The chunks whose headers are walked."""
    found: list[tuple[str, int]] = []
    read_members = tar_format.read_members

    def note(run: memoryview, shard: str, base: int, *, whole: bool) -> Any:
        found.append((shard, base))
        return read_members(run, shard, base, whole=whole)

    monkeypatch.setattr(tar_format, "read_members", note)
    return found


@pytest.fixture(params=[True, False], ids=["with checksums", "without"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(2):
        (data / f"{shard}.tar").write_bytes(tar_of(20, shard))
    if request.param:
        index(data)
    return data


def index(data: Path) -> Manifest:
    (data / "penstock-manifest.arrow").unlink(missing_ok=True)
    manifest = sum_chunks(open_manifest(data, format=FORMAT, progress=False), progress=False)
    (data / "penstock-manifest.arrow").write_bytes(manifest.to_bytes())
    return manifest


def rows_of(data: Path | Manifest, **options: Any) -> list[tuple[Any, ...]]:
    settings: dict[str, Any] = {"batch_size": 4, "format": FORMAT, "decode": None, "with_ids": True, "seed": 3}
    with DistributedDataLoader(data, **settings | options) as loader:
        names = [name for name in FIELDS if name in ("__id__", *(options.get("columns") or FIELDS))]
        return [row for batch in loader for row in zip(*(list(batch[name]) for name in names), strict=True)]


def test_another_loader_walks_no_headers_and_has_the_same_samples(folder: Path, walks: list[Any]) -> None:
    first = rows_of(folder)
    assert len(walks) == len(set(walks)) > 2
    walks.clear()
    assert rows_of(folder) == first
    assert rows_of(folder, storage_options={"mapped_reads": False}) == first
    assert not walks
    assert rows_of(folder, columns=["cls"]) == [(id_, label) for id_, _, _, label, _ in first]
    assert walks  # of other columns other layouts


def test_layouts_of_two_ranks_are_kept_together(folder: Path, walks: list[Any]) -> None:
    for rank in range(2):
        rows_of(folder, rank=rank, world_size=2, batch_size=2)
    walks.clear()
    rows_of(folder)
    assert not walks


@pytest.mark.slow
def test_data_sets_of_equal_shapes_keep_layouts_of_their_own(folder: Path, walks: list[Any]) -> None:
    twin = folder.with_name("twin")
    twin.mkdir()
    for shard in range(2):
        (twin / f"{shard}.tar").write_bytes(tar_of(20, shard, salt=b"salt"))
    if (folder / "penstock-manifest.arrow").exists():
        index(twin)
    first = [rows_of(each) for each in (folder, twin)]
    walks.clear()
    assert [rows_of(each) for each in (folder, twin)] == first
    assert not walks


def test_of_values_that_were_rewritten_the_new_ones_are_read(folder: Path, walks: list[Any]) -> None:
    has_sums = (folder / "penstock-manifest.arrow").exists()
    first = rows_of(folder)
    (folder / "1.tar").write_bytes(tar_of(20, 1, salt=b"salt"))
    os.utime(folder / "1.tar", ns=(1, 1))
    if has_sums:
        index(folder)
    walks.clear()
    second = rows_of(folder)
    assert not has_sums or "1.tar" in {shard for shard, _ in walks}  # without, headers alone are compared
    changed = [(before, after) for before, after in zip(first, second, strict=True) if before != after]
    assert len(changed) == 20
    assert all(after[2].endswith(b"salt") and after[0] == before[0] for before, after in changed)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:99] + b"?" + data[100:], lambda _: b""])
def test_a_damaged_file_is_not_used(
    folder: Path, own_index_cache: Path, walks: list[Any], damage: Callable[[bytes], bytes]
) -> None:
    first = rows_of(folder)
    (kept,) = own_index_cache.glob("layouts-*/*.arrow")
    kept.write_bytes(damage(kept.read_bytes()))
    walks.clear()
    assert rows_of(folder) == first
    assert walks
    walks.clear()
    assert rows_of(folder) == first
    assert not walks  # it was written again


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, own_index_cache: Path, walks: list[Any]) -> None:
    first = rows_of(folder)
    (own_index_cache / f"layouts-{os.geteuid()}").chmod(0o770)
    walks.clear()
    assert rows_of(folder) == first
    assert walks


def test_nothing_is_kept_of_encrypted_data(tmp_path: Path, own_index_cache: Path) -> None:
    from penstock.loader import pack

    samples = ({"__key__": str(i), "bin": b"secret" * 1000} for i in range(30))
    options = {"encryption_key": bytes(32)}
    pack(samples, tmp_path / "data", format="tar", progress=False, storage_options=options)
    assert len(rows_of_secret(tmp_path / "data", options)) == 30
    assert not list(own_index_cache.glob("layouts-*/*.arrow"))


def rows_of_secret(data: Path, options: dict[str, Any]) -> list[bytes]:
    with DistributedDataLoader(data, batch_size=5, decode=None, storage_options=options) as loader:
        return [value for batch in loader for value in batch["bin"]]


def layout_of(seed: int) -> Layout:
    starts = np.array([0, -1, 70, 300])
    stops = np.array([50, -1, 90, 300])
    keys, ends = "ab" * 4, np.arange(2, 10, 2)
    columns = {
        "__key__": BytesColumn(memoryview(keys.encode()), ends - 2, ends, text=True, ascii=keys),
        "other": BytesColumn(memoryview("éé".encode()), np.array([0, 2, 0, 2]), np.array([2, 4, 0, 2]), text=True),
        "bin": BytesColumn(IN_CHUNK, starts, stops),
    }
    return Layout(seed, 1000 + seed, Block(4, 1234, columns))


def test_a_layout_is_what_it_was_and_for_its_bytes_alone(tmp_path: Path, folder: Path) -> None:
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    KeptLayouts(manifest, None, tmp_path).save({number: layout_of(number) for number in (4, 0)})
    KeptLayouts(manifest, None, tmp_path).save({2: layout_of(2), 4: layout_of(7)})
    kept = KeptLayouts(manifest, None, tmp_path)
    assert kept.find(1, 1 << 20) is None
    for number, seed in ((0, 0), (2, 2), (4, 7)):
        found, wanted = kept.find(number, 1 << 20), layout_of(seed)
        assert found is not None
        assert (found.checksum, found.length) == (wanted.checksum, wanted.length)
        assert (found.block.samples, found.block.nbytes) == (4, 1234)
        assert list(found.block.columns) == list(wanted.block.columns)
        for name, column in wanted.block.columns.items():
            got: Any = found.block.columns[name]
            assert isinstance(column, BytesColumn)
            assert (got.buffer is IN_CHUNK) == (column.buffer is IN_CHUNK)
            assert (bytes(got.buffer), got.text, got.ascii) == (bytes(column.buffer), column.text, column.ascii)
            assert got.starts.dtype == got.stops.dtype == np.int64
            assert (got.starts.tolist(), got.stops.tolist()) == (column.starts.tolist(), column.stops.tolist())
    layouts = Layouts(1 << 20, is_framed=True, kept=KeptLayouts(manifest, None, tmp_path))
    data = memoryview(bytes(1002))
    assert layouts.find(2, data, 2) is not None
    assert layouts.find(2, data, 3) is None
    assert layouts.find(2, data[:-1], 2) is None
    assert layouts.nbytes > 0


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"chunk_bytes": 1}},
        {"schema": {"fields": ["bin"]}},
        {"samples": np.arange(CHUNKS)},
    ],
)
def test_layouts_of_another_manifest_are_not_seen(tmp_path: Path, folder: Path, change: dict[str, Any]) -> None:
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    KeptLayouts(manifest, None, tmp_path).save({0: layout_of(0)})
    assert KeptLayouts(manifest, None, tmp_path).find(0, 1 << 20) is not None
    if "samples" in change:
        change = {"samples": manifest.samples[::-1].copy() + np.arange(manifest.num_chunks)}
    assert KeptLayouts(replace(manifest, **change), None, tmp_path).find(0, 1 << 20) is None


def test_layouts_take_no_more_room_than_they_may(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    KeptLayouts(manifest, None, tmp_path).save({0: layout_of(0)})
    assert KeptLayouts(manifest, None, tmp_path).find(0, 10) is None  # of memory
    (file,) = tmp_path.glob("layouts-*/*.arrow")
    size = file.stat().st_size
    monkeypatch.setattr(layouts, "_MOST_BYTES", size)
    KeptLayouts(manifest, None, tmp_path).save({n: layout_of(n) for n in range(100)})
    assert file.stat().st_size == size
    monkeypatch.setattr(layouts, "_FEWEST_SAMPLES", 5)
    KeptLayouts(manifest, ["bin"], tmp_path).save({0: layout_of(0)})
    assert list(tmp_path.glob("layouts-*/*.arrow")) == [file]


@pytest.mark.parametrize(("chunks", "are_kept"), [(7, False), (8, True)])
def test_layouts_of_few_samples_are_kept_where_they_are_of_many_chunks(
    chunks: int, are_kept: bool, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_FEWEST_SAMPLES", FEWEST_SAMPLES)
    manifest = open_manifest(folder, format=FORMAT, progress=False)
    KeptLayouts(manifest, None, tmp_path).save({number: layout_of(number) for number in range(chunks)})
    assert (KeptLayouts(manifest, None, tmp_path).find(0, 1 << 20) is not None) == are_kept


def test_a_user_without_a_home_reads_all_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rows_of(folder)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert rows_of(folder) == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("has_sums", [True, False])
def test_of_a_mapped_file_that_is_written_to_while_it_is_opened_nothing_is_delivered_or_kept(
    has_sums: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_chunks, "_LEAST_BYTES", 1)
    shard, read_members, before = tmp_path / "1.tar", tar_format.read_members, tar_of(20, 1)
    shard.write_bytes(before)
    status = shard.stat()
    manifest = open_manifest(shard, progress=False)
    if has_sums:
        manifest = sum_chunks(manifest, progress=False)
    assert manifest.num_chunks == 1

    def write_first(run: memoryview, key: str, base: int, *, whole: bool) -> Any:
        with shard.open("r+b") as file:  # a label, which nobody looks at again
            file.seek(before.index(b"7".ljust(512, b"\0")))
            file.write(b"8")
        os.utime(shard, ns=(1, 1))  # whatever the clock's steps are
        return read_members(run, key, base, whole=whole)

    for columns in (["cls"], None):
        with monkeypatch.context() as patch:
            patch.setattr(tar_format, "read_members", write_first)
            with pytest.raises(ObjectChangedError):
                rows_of(manifest, columns=columns, format=None)
        shard.write_bytes(before)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        labels = [row[1 if columns else 3] for row in rows_of(manifest, columns=columns, format=None)]
        assert sorted(labels) == sorted(b"%d" % n for n in range(20))


def test_what_is_made_of_the_same_bytes_is_that_of_the_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, Layout] = {}
    monkeypatch.setattr(KeptLayouts, "save", lambda self, layouts: found.update(layouts))
    rows_of(folder)
    told = [
        (chunk, layout.length, layout.block.samples, name, column.text, column.ascii)
        for chunk, layout in sorted(found.items())
        for name, column in sorted(layout.block.columns.items())
    ]
    places = [
        (column.starts.tolist(), column.stops.tolist(), column.buffer is IN_CHUNK or column.buffer.tobytes())
        for _, layout in sorted(found.items())
        for _, column in sorted(layout.block.columns.items())
    ]
    digest = xxhash.xxh3_64_hexdigest(repr((told, places)).encode())
    assert (layouts._VERSION, digest) == (1, "dfb585943cc3de32"), (
        "raise _VERSION: what older releases kept is read as this"
    )
