"""Checksums of a manifest are compared as long as the data are the same, and where they are not used it is said."""

from __future__ import annotations

import os
import shutil
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader, ParquetFormat, open_manifest, pack, verify
from penstock.cli import run
from penstock.loader import ChecksumError, StaleManifestWarning

FORMATS = ["tar", "parquet", "arrow", "jsonl"]


def write(folder: Path, form: str) -> Path:
    rng = np.random.default_rng(0)
    samples = ({"__key__": f"{i:03d}", "x": rng.bytes(400).hex(), "y": i} for i in range(60))
    pack(samples, folder, format=form, shard_bytes=20_000, progress=False)
    return folder


def add_empty(folder: Path, form: str) -> None:
    """A shard without samples, as Spark and tools that filter write them."""
    shard = folder / f"shard-000000.{form}"
    path = folder / f"z-empty.{form}"
    if form == "tar":
        tarfile.open(path, "w").close()
    elif form == "jsonl":
        path.write_text("\n")
    elif form == "parquet":
        pq.write_table(pq.read_table(shard).slice(0, 0), path)
    else:
        table = pa.ipc.open_file(shard).read_all().slice(0, 0)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)


def damage(folder: Path, form: str) -> str:
    """Alter a value as a disk may that errs: at the same size and time."""
    manifest = open_manifest(folder)
    chunk = next(chunk for i in range(manifest.num_chunks) if (chunk := manifest.chunk(i)).shard == manifest.shards[1])
    shard = folder / chunk.shard.key
    data, status = bytearray(shard.read_bytes()), shard.stat()
    data[chunk.offset + chunk.length // 2] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    return shard.name


def read(folder: Path) -> int:
    with DistributedDataLoader(str(folder), batch_size=8, last_batch="partial", decode=None) as loader:
        return sum(len(batch["y"]) for batch in loader)


@pytest.mark.parametrize("form", FORMATS)
def test_a_shard_without_samples_leaves_the_checksums_of_all_others(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path / "data", form)
    before = open_manifest(folder)
    add_empty(folder, form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = open_manifest(folder)
    assert after.checks_all
    assert after.fingerprint == before.fingerprint
    some = sorted(str(path) for path in folder.glob(f"[sz]*.{form}"))[1:]
    assert open_manifest(some).checks_all
    assert verify(some).checksums
    assert run(["index", str(folder)]) == 0
    assert open_manifest(folder).checks_all
    damaged = damage(folder, form)
    with pytest.raises(ChecksumError, match=damaged):
        read(folder)
    assert verify(folder).bad_shards == (damaged,)
    assert verify(some).bad_shards == (damaged,)


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_with_a_shard_without_samples_keeps_its_checksums(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path / "data", form)
    add_empty(folder, form)
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, copy_function=shutil.copyfile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_manifest(copied).checks_all
        assert read(copied) == 60
    shutil.copyfile(folder / f"shard-000000.{form}", copied / f"z-more.{form}")
    with pytest.warns(StaleManifestWarning, match="compares no checksums"):
        more = open_manifest(copied)
    assert more.num_samples > 60


def test_checksums_that_come_later_are_compared_by_who_knew_the_data_set_without_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "parquet")
    add_empty(folder, "parquet")
    assert run(["index", str(folder), "--no-checksums"]) == 0
    assert not open_manifest(folder, cache_dir=tmp_path / "cache").checks_all
    assert run(["index", str(folder)]) == 0
    assert open_manifest(folder, cache_dir=tmp_path / "cache").checks_all


def test_a_format_that_leaves_the_checksums_of_a_manifest_unused_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path, "parquet")
    smaller = ParquetFormat(chunk_bytes=1 << 20)
    with pytest.warns(StaleManifestWarning, match=r"parquet \(chunk_bytes=4.*chunk_bytes=1.* compares no checksums"):
        assert open_manifest(folder, format=smaller).checksums is None
    with pytest.warns(StaleManifestWarning, match="compares no checksums"):
        verify(folder, format=smaller)
