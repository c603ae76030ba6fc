"""Bad data sets, end to end: an error of our own that names shard and offset, and no thread left."""

from __future__ import annotations

import errno
import io
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder, PenstockError, open_manifest
from penstock.loader import ConfigError, DatasetError, DecodeError, FormatError, Mixture, Source
from penstock.storage import AccessDeniedError, Fault, MemoryStore, NotFoundError, ObjectChangedError


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 30
    while left := [thread.name for thread in started_threads() if thread.name.startswith("penstock-")]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def first_error(source: str | list[str], **options: Any) -> PenstockError:
    with pytest.raises(PenstockError) as caught, DistributedDataLoader(source, batch_size=4, **options) as loader:
        list(loader)
    return caught.value


def put_all(store: MemoryStore, folder: Path) -> str:
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return store.url


def test_an_empty_prefix_says_that_nothing_is_there(tmp_path, memory_store):
    for source in (str(tmp_path), memory_store.url):
        error = first_error(source)
        assert isinstance(error, DatasetError | NotFoundError)
        assert source in str(error)


def test_a_missing_folder_and_a_missing_bucket_are_named(tmp_path):
    for source in (str(tmp_path / "none"), "mem://no-such-bucket-here/train"):
        error = first_error(source)
        assert isinstance(error, DatasetError | NotFoundError)
        assert "none" in str(error) or "no-such-bucket-here" in str(error)


def test_a_missing_shard_of_a_list_is_named(tmp_path, memory_store):
    write_tars(tmp_path, [9, 9])
    put_all(memory_store, tmp_path)
    for root in (str(tmp_path), memory_store.url):
        error = first_error([f"{root}/shard-00000.tar", f"{root}/shard-00007.tar"])
        assert isinstance(error, DatasetError | NotFoundError)
        assert "shard-00007.tar" in str(error)


def test_s3_answers_for_what_is_not_there_and_not_allowed_are_errors_of_our_own(s3_url):
    url, options = s3_url
    assert url in str(first_error(url, storage_options=options))
    missing = first_error(f"{url}-none", storage_options=options)
    assert isinstance(missing, NotFoundError | DatasetError)
    denied = first_error(url, storage_options={**options, "secret_key": "not-the-secret"})
    assert isinstance(denied, AccessDeniedError)
    assert "not-the-secret" not in str(denied)


@pytest.mark.parametrize("keep", [0, 100, 9000])
def test_a_tar_cut_short_is_named_with_its_offset(tmp_path, keep):
    write_tars(tmp_path, [30, 30])
    path = tmp_path / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:keep])
    error = first_error(str(tmp_path))
    assert isinstance(error, FormatError)
    assert "shard-00001.tar" in str(error)


def test_a_member_size_that_lies_is_named_with_its_offset(tmp_path):
    write_tars(tmp_path, [30])
    path = tmp_path / "shard-00000.tar"
    data = bytearray(path.read_bytes())
    info = tarfile.TarInfo("00000000.txt")
    info.size = 1 << 30
    data[:512] = info.tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(data)
    error = first_error(str(tmp_path))
    assert isinstance(error, FormatError)
    assert "shard-00000.tar" in str(error)
    assert error.offset is not None


@pytest.mark.parametrize("damage", ["footer", "length", "magic"])
def test_a_corrupt_parquet_footer_is_named(tmp_path, damage):
    for number in range(2):
        pq.write_table(pa.table({"n": np.arange(50)}), tmp_path / f"part-{number}.parquet")
    path = tmp_path / "part-1.parquet"
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    start, stop = {"footer": (footer, footer + 30), "length": (-8, -4), "magic": (-4, len(data))}[damage]
    data[start:stop] = b"\xff" * len(data[start:stop])
    path.write_bytes(data)
    error = first_error(str(tmp_path))
    assert isinstance(error, FormatError)
    assert "part-1.parquet" in str(error)


def test_an_object_that_changes_while_it_is_read_is_named(tmp_path, memory_store):
    write_tars(tmp_path, [30])
    url = put_all(memory_store, tmp_path)
    with DistributedDataLoader(url, batch_size=4) as loader:
        memory_store.inject(Fault(change_to=b"other bytes" * 1000))
        with pytest.raises(ObjectChangedError, match=r"shard-00000\.tar"):
            list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_a_field_that_a_sample_lacks_is_none_or_named_where_a_tensor_needs_it(tmp_path, processes):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.txt", b"0"), ("0.jpg", b"not decoded"), ("1.txt", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with DistributedDataLoader(str(tmp_path), batch_size=2, decode=None, shuffle=False) as loader:
        assert next(iter(loader))["jpg"] == [b"not decoded", None]
    with (
        pytest.raises(DecodeError, match=r"sample 1 \(number 1 of a\.tar, key '1'\): has no field 'jpg'"),
        DistributedDataLoader(
            str(tmp_path),
            batch_size=1,
            rank=1,
            world_size=2,
            shuffle=False,
            processes=processes,
            decode={"jpg": ImageDecoder(size=8)},
        ) as loader,
    ):
        list(loader)


def test_a_full_disk_under_the_cache_costs_no_sample(tmp_path, memory_store, monkeypatch):
    write_tars(tmp_path / "tars", [30, 30])
    url = put_all(memory_store, tmp_path / "tars")
    refused = []

    def refuse(fd: int, data: bytes) -> int:
        refused.append(len(data))
        raise OSError(errno.ENOSPC, "No space left on device")

    with DistributedDataLoader(url, batch_size=4, cache_dir=tmp_path / "cache", with_ids=True) as loader:
        monkeypatch.setattr("penstock.storage.caching.disk.os.write", refuse)
        delivered = [sample for batch in loader for sample in batch["__id__"].tolist()]
        monkeypatch.undo()
    assert refused
    assert sorted(delivered) == list(range(60))


def test_all_batches_before_the_one_that_needs_a_bad_chunk_are_delivered(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table({"x": range(64 * number, 64 * number + 64)}), tmp_path / f"{number}.parquet")
    manifest = open_manifest(str(tmp_path))
    (tmp_path / "2.parquet").unlink()
    seen: list[int] = []
    with DistributedDataLoader(manifest, batch_size=3, shuffle=False, lanes=1, rank=0, world_size=1) as loader:
        batches = iter(loader)
        for _ in range(42):
            seen += next(batches)["x"].tolist()
        for _ in range(2):  # also where it is tried again
            with pytest.raises(NotFoundError, match=r"2\.parquet"):
                next(batches)
    assert seen == list(range(126))


def test_a_field_whose_name_the_loader_needs_is_refused(tmp_path):
    fields = {"__id__": [7, 8], "__valid__": [0, 0], "__source__": [5, 5], "x": [1, 2]}
    pq.write_table(pa.table(fields), tmp_path / "a.parquet")
    one = partial(DistributedDataLoader, tmp_path, batch_size=2, rank=0, world_size=1)
    for name, options in (("__id__", {"with_ids": True}), ("__valid__", {"last_batch": "pad"})):
        with pytest.raises(ConfigError, match=f"has a field '{name}', which .* adds to batches in its place; leave"):
            one(**options)
        with one(**options, columns=["x"]) as loader:
            assert sorted(next(iter(loader))["x"].tolist()) == [1, 2]
    with one() as loader:  # nothing is added: they are fields as others are
        assert sorted(next(iter(loader))["__id__"].tolist()) == [7, 8]
    mixture = Mixture({"a": Source(tmp_path, columns=["x", "__source__"])})
    with pytest.raises(ConfigError, match="source 'a' has a field '__source__', which with_ids=True adds"):
        DistributedDataLoader(mixture, batch_size=2, rank=0, world_size=1, with_ids=True)
