"""Raw values as views of chunks: what ``raw="view"`` promises."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tar_dataset import write_tars

from penstock.loader import ByteViews, ConfigError, DistributedDataLoader, pack
from penstock.loader.columns import Block, BytesColumn
from penstock.loader.reading.chunk_memory import Leases

VALUES = [b"", b"short", None, b"twelve bytes", b"thirteen byte", bytes(range(256))]


@pytest.fixture
def tars(tmp_path):
    write_tars(tmp_path, [30, 21, 40], value_bytes=2000)
    return str(tmp_path)


def batches(url, **options):
    with DistributedDataLoader(url, decode=None, seed=5, with_ids=True, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("rank", [0, 2])
def test_views_hold_the_bytes_of_the_same_samples_in_the_same_order(tars, last_batch, rank):
    share = {"batch_size": 9, "last_batch": last_batch, "rank": rank, "world_size": 3}
    for plain, viewed in zip(batches(tars, **share), batches(tars, raw="view", **share), strict=True):
        assert torch.equal(plain["__id__"], viewed["__id__"])
        assert viewed["__key__"] == plain["__key__"]  # text stays text
        for name in ("bin", "txt"):
            assert isinstance(viewed[name], ByteViews)
            assert viewed[name].to_bytes() == list(viewed[name]) == plain[name]
            assert viewed[name].arrow().to_pylist() == plain[name]


def test_nulls_of_a_parquet_column_are_missing_in_every_form(tmp_path):
    pq.write_table(pa.table({"blob": pa.array(VALUES * 7, pa.binary())}), tmp_path / "a.parquet", row_group_size=10)
    for batch in batches(str(tmp_path), batch_size=42, raw="view"):
        expected = [VALUES[i % len(VALUES)] for i in batch["__id__"].tolist()]
        views = batch["blob"]
        assert views.to_bytes() == expected
        assert views.arrow().to_pylist() == expected
        assert views.missing.tolist() == views.gather().missing.tolist() == [value is None for value in expected]


def test_a_field_that_a_sample_or_a_chunk_lacks_is_missing(tmp_path):
    write_tars(tmp_path / "a", [6])
    write_tars(tmp_path / "b", [6])
    table = (tmp_path / "b" / "shard-00000.tar").read_bytes().replace(b".bin\0", b".raw\0")
    # the checksum of a header is the sum of its bytes
    fixed = bytearray(table)
    for at in range(0, len(fixed), 512):
        if fixed[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    (tmp_path / "a" / "shard-00001.tar").write_bytes(fixed)
    (batch,) = batches(str(tmp_path / "a"), batch_size=12, raw="view")
    (plain,) = batches(str(tmp_path / "a"), batch_size=12)
    assert batch["bin"].to_bytes() == plain["bin"]
    assert batch["raw"].to_bytes() == plain["raw"]
    assert batch["raw"].missing.sum() == batch["bin"].missing.sum() == 6


@pytest.mark.parametrize("are_large", [False, True])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 5), slice(4, 0, -2), slice(0, 0), slice(0, 1)])
def test_gathered_bytes_lie_end_to_end_between_their_offsets(monkeypatch, rows, are_large):
    if are_large:
        monkeypatch.setattr("penstock.loader.decoding.byte_views._JOINED_BYTES", 0)
    views, expected = ByteViews(VALUES)[rows], VALUES[rows]
    data, offsets, missing = views.gather()
    views.arrow().validate(full=True)
    assert offsets.dtype == torch.int64
    ends = zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
    assert [bytes(data[a:b].numpy()) for a, b in ends] == [value or b"" for value in expected]
    assert missing.tolist() == [value is None for value in expected]
    data.zero_()  # it is the user's own memory
    assert views.to_bytes() == expected


def test_views_are_read_only_outlive_the_loader_and_are_pickled_as_bytes(tars):
    last = batches(tars, batch_size=16, raw="view")[-1]
    plain = batches(tars, batch_size=16)[-1]
    gc.collect()
    assert last["bin"].to_bytes() == plain["bin"] == pickle.loads(pickle.dumps(last["bin"])).to_bytes()
    with pytest.raises(TypeError, match="read-only"):
        last["bin"][0][0] = 1


def test_picked_rows_are_named_by_number_or_by_a_mask():
    views = ByteViews(VALUES)
    assert views.pick([5, -5]).to_bytes() == [VALUES[5], VALUES[1]]
    assert views.pick(~views.missing).to_bytes() == [value for value in VALUES if value is not None]
    assert views.pick(torch.tensor([True] + [False] * 5)).to_bytes() == [b""]
    for rows in ([6], [True]):
        with pytest.raises(IndexError):
            views.pick(rows)
    assert (views.index(b"short"), views.count(None), None in views) == (1, 1, True)
    assert [*reversed(views)] == VALUES[::-1]


def test_frameworks_that_move_batches_leave_views_alone(tars):
    collections = pytest.importorskip("lightning_utilities.core.apply_func")
    batch = {"views": ByteViews(VALUES), "n": torch.zeros(3)}
    moved = collections.apply_to_collection(batch, torch.Tensor, lambda tensor: tensor.to("meta"))
    assert moved["n"].is_meta
    assert moved["views"] is batch["views"]


@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(None, None, 2), slice(3, 9)])
def test_a_transform_may_return_any_part_of_a_view(tars, rows):
    def cut(sample):
        return {"bin": sample["bin"][rows]}

    for plain, viewed in zip(
        batches(tars, batch_size=9, transform=cut), batches(tars, batch_size=9, transform=cut, raw="view"), strict=True
    ):
        assert [bytes(value) for value in viewed["bin"]] == plain["bin"]


@pytest.mark.parametrize(("raw", "given"), [("bytes", bytes), ("view", memoryview)])
def test_decoders_and_transforms_of_users_get_what_raw_says(tars, raw, given):
    seen = set()

    def decode(value):
        seen.add(type(value))
        return bytes(value)[0]

    def transform(sample):
        seen.add(type(sample["txt"]))
        return sample

    options = {"batch_size": 16, "raw": raw, "decode": {"bin": decode, "txt": None}, "transform": transform}
    with DistributedDataLoader(tars, seed=5, **options) as loader:
        batch = next(iter(loader))
        sample = loader.dataset[0]
        assert loader.peek()["bin"].tolist() == batch["bin"].tolist()
    assert seen == {given}
    assert type(sample["txt"]) is given
    assert isinstance(batch["txt"], ByteViews if raw == "view" else list)
    assert batch["bin"].tolist() == [batch_bytes[0] for batch_bytes in batches(tars, batch_size=16)[0]["bin"]]


def test_collate_gets_views(tars):
    kinds = batches(tars, batch_size=4, raw="view", collate=lambda samples: {type(s["bin"]) for s in samples})
    assert kinds == [{memoryview}] * len(kinds)


def test_raw_that_cannot_work_is_refused_by_name(tars):
    with pytest.raises(ConfigError, match=r"raw='view' with processes=2"):
        DistributedDataLoader(tars, batch_size=4, raw="view", processes=2)
    with pytest.raises(ConfigError, match=r"raw='tensor': must be 'bytes' or 'view'"):
        DistributedDataLoader(tars, batch_size=4, raw="tensor")


def column_of(nbytes):
    return BytesColumn(memoryview(bytes(nbytes)), np.array([0]), np.array([nbytes]))


def test_a_chunk_is_charged_from_when_the_reader_drops_it_until_its_last_view_dies():
    leases = Leases(1000)
    column = column_of(600)
    first, second = leases.lend(column.buffer), leases.lend(column.buffer)
    assert leases.retained_bytes == 0  # the reader holds it
    leases.drop(Block(1, 600, {"a": column}))
    assert leases.retained_bytes == 600
    part = first[5:9]
    del first, second
    assert leases.retained_bytes == 600
    del part
    assert leases.retained_bytes == 0


def test_spans_of_a_chunk_share_its_array_as_long_as_a_view_lives():
    leases = Leases(1000)
    column, other = column_of(600), column_of(300)
    first, again, beside = leases.lend(column.buffer), leases.lend(column.buffer), leases.lend(other.buffer)
    assert first.obj is again.obj
    assert (first.nbytes, beside.nbytes) == (600, 300)
    part = memoryview(column.buffer)[10:20]  # of the same owner: an array of its own
    assert bytes(leases.lend(part)) == bytes(part)
    assert leases.lend(column.buffer).nbytes == 600
    array = weakref.ref(first.obj)
    leases.drop(Block(1, 600, {"a": column}))
    del first
    assert leases.retained_bytes == 600
    del again
    assert array() is None
    assert leases.retained_bytes == 0
    assert leases.lend(column.buffer).nbytes == 600


def test_parts_of_views_keep_only_their_own_buffers():
    views = ByteViews([None, b"one", None, b"two", b"three", None])
    for rows, buffers in (([0], 0), ([1, 3], 2), ([2, 5, 0], 0), ([4, 4, 0, 4], 1), ([], 0)):
        picked = views.pick(rows)
        assert picked.to_bytes() == [views.to_bytes()[i] for i in rows]
        assert len(picked._buffers) == buffers
        assert picked.pick(range(len(rows))).arrow().to_pylist() == picked.to_bytes()
    assert views[:1].to_bytes() == [None]
    assert len(views[::-2]._buffers) == 2
    assert len(ByteViews()[:]) == 0


def test_beyond_the_limit_nothing_is_lent_until_views_die():
    leases = Leases(1000)
    one, other = column_of(600), column_of(600)
    held = leases.lend(one.buffer)
    assert leases.lend(other.buffer) is None
    assert leases.lend(one.buffer) is not None  # it costs nothing more
    del held
    assert leases.lend(other.buffer) is not None


def kept_bytes(views):
    """Bytes of all memory that the views keep alive."""
    owners = {}
    for view in views:
        owner = view.obj
        while isinstance(owner, (np.ndarray, memoryview)):
            owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
        owners[id(owner)] = len(owner)
    return sum(owners.values())


@pytest.mark.slow
def test_one_value_kept_of_every_batch_keeps_no_more_than_half_of_the_budget_alive(tmp_path):
    write_tars(tmp_path, [100] * 8, value_bytes=20_000)  # 16 MB in 8 chunks
    options = {"batch_size": 8, "raw": "view", "memory_limit": "10MB", "lanes": 2, "window": 1}
    with DistributedDataLoader(str(tmp_path), decode=None, **options) as loader:
        kept = [batch["bin"][0] for batch in loader]
        assert loader._resources.pipeline._leases.retained_bytes > 1e6
    assert len(kept) == 100
    assert kept_bytes(kept) < 0.5 * 0.75 * 10e6 + 100 * 20_100
    assert kept_bytes(kept) > 100 * 20_000  # some were lent


def test_a_field_that_takes_little_of_its_chunk_is_copied(tmp_path):
    samples = [{"__key__": f"{i:03d}", "jpg": bytes(2000), "caption": b"c" * 100} for i in range(50)]
    pack(samples, tmp_path, format="tar", progress=False)
    with DistributedDataLoader(str(tmp_path), batch_size=16, decode=None, raw="view") as loader:
        batch = next(iter(loader))
    assert kept_bytes([batch["jpg"][0]]) > 50 * 2000  # the chunk
    assert kept_bytes([batch["caption"][0]]) == 100


HOARD = """
import sys
from penstock.loader import DistributedDataLoader
from penstock.storage.observability.process_usage import peak_resident_bytes
with DistributedDataLoader(sys.argv[1], batch_size=16, decode=None, raw="view", memory_limit="48MB") as loader:
    next(iter(loader))
    before = peak_resident_bytes()
    kept = [batch["bin"] for _ in range(2) for batch in loader]
    print(sum(views.nbytes for views in kept), peak_resident_bytes() - before)
"""


@pytest.mark.slow
def test_who_keeps_every_batch_pays_for_its_values_and_the_budget_alone(tmp_path):
    write_tars(tmp_path, [200] * 10, value_bytes=40_000)  # 80 MB
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", HOARD, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    values, grown = map(int, done.stdout.split())
    assert values > 150e6
    assert grown < values + 48e6 + 30e6, f"{grown / 1e6:.0f} MB for {values / 1e6:.0f} MB of values"
