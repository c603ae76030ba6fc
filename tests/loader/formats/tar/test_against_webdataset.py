"""What webdataset reads from a tar, TarFormat reads: keys, fields and bytes, sample by sample.

But for links, which webdataset passes over, and for samples in parts, which are refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from folder_store import FolderStore, open_all, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from penstock.loader.errors import FormatError
from penstock.loader.formats.tar.format import TarFormat
from penstock.loader.formats.tar.names import find_field_dot

Member = tuple[str, bytes]


def write_tar(members: list[Member | tarfile.TarInfo], dialect: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=dialect) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            info.mtime = 1.5 if dialect == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def read_with_webdataset(data: bytes) -> list[dict[str, Any]]:
    members = tar_file_expander([{"url": "shard.tar", "stream": io.BytesIO(data)}])
    samples = [dict(sample) for sample in group_by_keys(members)]
    for sample in samples:
        sample.pop("__url__")
    return samples


def read_with_ours(folder: Path, data: bytes, name: str = "shard.tar", chunk_bytes: int = 4096) -> list[dict[str, Any]]:
    (folder / name).write_bytes(data)
    blocks = open_all(FolderStore(folder), TarFormat(chunk_bytes=chunk_bytes))
    (folder / name).unlink()
    return [row for block in blocks for row in rows_of(block)]


def info_of(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


MEMBERS: list[Member | tarfile.TarInfo] = [
    ("__index__.json", b"{}"),
    ("__meta__/a.jpg", b"meta"),
    ("__cover__", b"meta"),
    info_of("d", tarfile.DIRTYPE),
    ("d/a.b.seg.png", b"png"),
    ("d/a.JPG", b"jpg" * 700),
    ("d/README", b"no dot: in no sample, and no end of one"),
    ("d/a.cls", b"7"),
    info_of("d/latest", tarfile.SYMTYPE, "a.cls"),
    info_of("d/first", tarfile.LNKTYPE, "d/a.cls"),
    ("e/a.cls", b""),
    ("./x.y/z.txt", b"x" * 511),
    ("./x.y/z.json", b"x" * 512),
    ("w/.hidden", b"h"),
    (".hidden", b"h"),
    ("a.b/.hidden", b"h"),
    ("end.", b"an empty field"),
    ("grün/ß.Äx", b"text"),
    ("long/" + "k" * 94 + ".txt", b"a name of 103 bytes"),
    ("long/" + "k" * 94 + ".cls", b"a name of 103 bytes"),
    ("d/a.cls", b"the first key again, a sample of its own"),
]
VERY_LONG: list[Member] = [(f"{'v' * 300}/{'k' * 200}.txt", b"t" * 1000), (f"{'v' * 300}/{'k' * 200}.cls", b"1")]


@pytest.mark.parametrize("chunk_bytes", [512, 4096, 1 << 20])
@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_reads_as_webdataset_reads_it(tmp_path: Path, dialect: int, chunk_bytes: int) -> None:
    members = MEMBERS + (VERY_LONG if dialect != tarfile.USTAR_FORMAT else [])
    data = write_tar(members, dialect)
    expected = read_with_webdataset(data)
    assert len(expected) >= 9
    assert read_with_ours(tmp_path, data, chunk_bytes=chunk_bytes) == expected


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.zst"])
def test_compressed_shards_read_as_the_plain_one(tmp_path: Path, ending: str) -> None:
    data = write_tar(MEMBERS, tarfile.PAX_FORMAT)
    codec = zstandard if ending.endswith("zst") else bz2 if "bz2" in ending else gzip
    packed = codec.compress(data)
    assert read_with_ours(tmp_path, packed, "shard" + ending) == read_with_webdataset(data)


names = st.text(alphabet="ab._/", min_size=1, max_size=12)


@settings(max_examples=400, deadline=None)
@given(names)
def test_names_split_where_webdataset_splits_them(name: str) -> None:
    key, field = base_plus_ext(name)
    dot = find_field_dot(name.encode())
    top = name.split("/")[0]
    if (len(top) >= 4 and top.startswith("__") and top.endswith("__")) or key is None:
        assert dot == -1
    else:
        assert (name[:dot], name[dot + 1 :]) == (key, field)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.one_of(
                names, st.builds("{}.{}".format, st.text("ab/é\n", min_size=1, max_size=120), st.sampled_from("xyZ"))
            ),
            st.binary(max_size=3) | st.integers(0, 2000).map(bytes),
        ),
        max_size=12,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([512, 2048, 1 << 20]),
)
def test_any_names_and_sizes_read_as_webdataset_reads_them(
    tmp_path: Path, members: list[Member], dialect: int, chunk_bytes: int
) -> None:
    data = write_tar(list(members), dialect)
    try:
        expected: list[dict[str, Any]] | None = read_with_webdataset(data)
    except ValueError:
        expected = None
    try:
        ours: list[dict[str, Any]] | None = read_with_ours(tmp_path, data, chunk_bytes=chunk_bytes)
    except FormatError as error:
        # A field given twice is an error in both; an archive without any sample, and samples in parts, are in ours.
        ours = [] if "belongs to a sample" in str(error) else None
        if "in parts" in str(error) and expected is not None:
            keys = [sample["__key__"] for sample in expected]
            assert len(set(keys)) < len(keys)
            return
    assert ours == expected
