"""The loader as its users see it: exact epochs, exact resumes, batches of the right kind, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder, Manifest, TokensFormat
from penstock.loader import (
    BadChunkWarning,
    ConfigError,
    DatasetError,
    DecodeError,
    FormatError,
    LoaderClosedError,
    PartitionError,
    StateMismatchError,
)

SIZES = [37, 5, 80, 1, 64, 23, 90, 12]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def ranks(source: str | Manifest, world_size: int, **options: Any) -> list[DistributedDataLoader]:
    return [DistributedDataLoader(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def ids_of(batch: dict[str, Any]) -> list[int]:
    ids: list[int] = batch["__id__"].tolist()
    return ids


def penstock_threads() -> list[str]:
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


def test_an_epoch_is_every_sample_once_and_its_fields_belong_together(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial", with_ids=True) as loader:
        seen = {}
        for batch in loader:
            for sample_id, text, key, data in zip(
                ids_of(batch), batch["txt"], batch["__key__"], batch["bin"], strict=True
            ):
                assert int(text) == int(key) == sample_id
                assert data == np.random.default_rng(sample_id).bytes(40)
                seen[sample_id] = seen.get(sample_id, 0) + 1
        assert seen == dict.fromkeys(range(sum(SIZES)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_gets_the_same_number_of_batches(tars, last_batch, world_size):
    loaders = ranks(tars, world_size, batch_size=11, last_batch=last_batch, with_ids=True)
    counts = [sum(1 for _ in loader) for loader in loaders]
    assert counts == [len(loaders[0])] * world_size
    for loader in loaders:
        loader.close()


def test_padding_marks_what_it_repeats(tars):
    delivered = []
    for loader in ranks(tars, 5, batch_size=32, last_batch="pad", with_ids=True):
        for batch in loader:
            assert len(batch["__id__"]) == len(batch["__valid__"]) == len(batch["txt"]) == 32
            delivered += batch["__id__"][batch["__valid__"]].tolist()
        loader.close()
    assert sorted(delivered) == list(range(sum(SIZES)))


def test_a_rank_without_a_sample_of_the_last_batch_still_gets_a_padded_one(tmp_path):
    write_tars(tmp_path, [9])
    batches = [list(loader) for loader in ranks(str(tmp_path), 4, batch_size=2, last_batch="pad", with_ids=True)]
    assert [len(of_rank) for of_rank in batches] == [2, 2, 2, 2]
    assert [of_rank[1]["__valid__"].sum().item() for of_rank in batches] == [1, 0, 0, 0]


def test_the_next_pass_is_the_next_epoch_in_another_order(tars):
    with DistributedDataLoader(tars, batch_size=50, with_ids=True) as loader:
        first = [sample for batch in loader for sample in ids_of(batch)]
        assert loader.epoch == 1
        second = [sample for batch in loader for sample in ids_of(batch)]
        assert first != second
        loader.set_epoch(0)
        assert [sample for batch in loader for sample in ids_of(batch)] == first


def test_an_order_depends_on_the_seed_alone(tars):
    def order(seed: int, **options: Any) -> list[int]:
        with DistributedDataLoader(tars, batch_size=16, seed=seed, with_ids=True, **options) as loader:
            return [sample for batch in loader for sample in ids_of(batch)]

    assert order(3) == order(3, threads=3, memory_limit="1GiB")
    assert order(3) != order(4)


@pytest.mark.parametrize(
    ("before", "after", "stop_after"),
    [(1, 4, 1), (1, 4, 7), (3, 2, 1), (3, 2, 7), (2, 2, 0), (2, 2, 7), (4, 1, 7), (4, 1, 100)],
)
def test_resume_on_another_number_of_ranks_repeats_and_skips_nothing(tars, before, after, stop_after):
    delivered, state = [], None
    for loader in ranks(tars, before, batch_size=5, last_batch="partial", with_ids=True):
        for step, batch in enumerate(loader):
            if step == stop_after:
                break
            delivered += ids_of(batch)
            taken = loader.state_dict()
        if stop_after == 0:
            continue
        assert state in (None, taken)
        state = json.loads(json.dumps(taken))
        loader.close()
    for loader in ranks(tars, after, batch_size=8, last_batch="partial", with_ids=True, threads=2):
        if state is not None:
            loader.load_state_dict(state)
        if state is None or state["epoch"] == 0:
            delivered += [sample for batch in loader for sample in ids_of(batch)]
        loader.close()
    assert sorted(delivered) == list(range(sum(SIZES)))


def test_a_state_from_an_epochs_end_continues_with_the_next_epoch(tars):
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        for _ in loader:
            at_last_batch = loader.state_dict()
        after = loader.state_dict()
        expected = ids_of(next(iter(loader)))
    assert at_last_batch == after
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as resumed:
        resumed.load_state_dict(at_last_batch)
        assert resumed.epoch == 1
        assert ids_of(next(iter(resumed))) == expected


def test_steps_left_are_counted_from_the_last_batch(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial", with_ids=True) as loader:
        batches = iter(loader)
        seen = [sample for _ in range(4) for sample in ids_of(next(batches))]
        assert loader.steps_left == len(loader) - 4
        seen += [sample for batch in batches for sample in ids_of(batch)]
        assert sorted(seen) == list(range(sum(SIZES)))


def test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch(tars):
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        for step, _ in enumerate(loader):
            if step == len(loader) - 1:
                break
        assert sum(1 for _ in loader) == len(loader)
        assert loader.epoch == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 5}, "seed: 0 in the state, 5 here"),
        ({"shuffle": False}, "shuffle: True in the state, False here"),
        ({"lanes": 64}, "lanes: 16 in the state, 64 here"),
        ({"window": 7}, "window"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(tars, changed, named):
    with DistributedDataLoader(tars, batch_size=16) as loader:
        state = loader.state_dict()
    with DistributedDataLoader(tars, batch_size=16, **changed) as other, pytest.raises(StateMismatchError, match=named):
        other.load_state_dict(state)


def test_a_state_of_another_data_set_is_refused(tars, tmp_path):
    write_tars(tmp_path, [50, 50])
    with DistributedDataLoader(tars, batch_size=16) as loader:
        state = loader.state_dict()
    with DistributedDataLoader(str(tmp_path), batch_size=16) as other:
        with pytest.raises(StateMismatchError, match="data set"):
            other.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="version"):
            other.load_state_dict({"epoch": 1})


def test_auto_lanes_and_window_are_taken_over_from_a_state(tars):
    with DistributedDataLoader(tars, batch_size=4, world_size=32, rank=0) as large:
        state = large.state_dict()
    with DistributedDataLoader(tars, batch_size=4) as small:
        assert small.order.lanes == 16
        small.load_state_dict(state)
        assert small.order == large.order


def test_columns_choose_what_is_read(tars):
    with DistributedDataLoader(tars, batch_size=16, columns=["txt"]) as loader:
        assert set(next(iter(loader))) == {"__key__", "txt"}
    with pytest.raises(ConfigError, match=r"\['jpg'\] is not among \['bin', 'txt'\]"):
        DistributedDataLoader(tars, batch_size=16, columns=["jpg"])
    with pytest.raises(ConfigError, match="nothing"):
        DistributedDataLoader(tars, batch_size=16, columns=[])


def test_a_decoder_for_a_field_that_is_not_there_is_refused_with_those_that_are(tars):
    with pytest.raises(ConfigError, match=r"\['tyt'\].*'bin', 'txt'"):
        DistributedDataLoader(tars, batch_size=16, decode={"tyt": int})


@pytest.mark.parametrize("transform", [None, dict])
@pytest.mark.parametrize("batch_size", [1, 2])  # with 1 the rank has samples of steps that are gathered with the last
def test_a_rank_without_samples_of_the_last_batch_gets_empty_tensors_of_the_right_type(tmp_path, batch_size, transform):
    write_tars(tmp_path, [9])
    options = {"decode": {"txt": int, "bin": lambda data: np.frombuffer(data, np.uint8)}, "transform": transform}
    loaders = ranks(str(tmp_path), 4, batch_size=batch_size, last_batch="partial", with_ids=True, **options)
    first, *_, last = [list(loader)[-1] for loader in loaders]
    assert len(first["__id__"]) == 1
    assert (last["txt"].dtype, last["txt"].shape) == (torch.int64, (0,))
    assert (last["bin"].dtype, last["bin"].shape) == (torch.uint8, (0, 40))
    assert last["__id__"].shape == (0,)
    assert last["__key__"] == []


def test_a_decoder_of_a_text_column_is_given_its_text(tmp_path):
    pq.write_table(pa.table({"caption": ["a cat", "a dog", "ein Bär"]}), tmp_path / "t.parquet")
    with DistributedDataLoader(str(tmp_path), batch_size=3, decode={"caption": len}) as loader:
        assert sorted(next(iter(loader))["caption"].tolist()) == [5, 5, 7]
    with DistributedDataLoader(str(tmp_path), batch_size=3, decode={"caption": str}) as loader:
        assert "ein Bär" in next(iter(loader))["caption"]


def test_hashes_of_64_bits_keep_their_sign(tmp_path):
    values = np.array([1, 2**63, 2**64 - 1], np.uint64)
    pq.write_table(pa.table({"hash": values}), tmp_path / "t.parquet")
    with DistributedDataLoader(str(tmp_path), batch_size=3, shuffle=False) as loader:
        assert next(iter(loader))["hash"].tolist() == values.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_at_once(tars):
    with pytest.raises(ConfigError, match="no CUDA device"):
        DistributedDataLoader(tars, batch_size=4, device="cuda")
    with pytest.raises(ConfigError, match="mps"):
        DistributedDataLoader(tars, batch_size=4, device="mps")


def test_decode_none_gives_the_bytes_of_the_shard(tars):
    with DistributedDataLoader(tars, batch_size=16, decode=None, with_ids=True) as loader:
        batch = next(iter(loader))
        assert batch["txt"] == [str(sample).encode() for sample in ids_of(batch)]


def test_a_transform_sees_samples_and_its_generator_depends_on_the_sample_alone(tars):
    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"number": int(sample["txt"]), "noise": rng.integers(0, 1 << 30)}

    def noises(world_size: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for loader in ranks(tars, world_size, batch_size=6, transform=transform, last_batch="partial", threads=2):
            for batch in loader:
                assert batch["number"].dtype == torch.int64
                found.update(zip(batch["number"].tolist(), batch["noise"].tolist(), strict=True))
            loader.close()
        return found

    alone = noises(1)
    assert len(set(alone.values())) > 300
    assert noises(3) == alone


def test_a_collate_gets_the_samples_and_gives_the_batch(tars):
    def collate(samples: list[dict[str, Any]]) -> tuple[int, ...]:
        return tuple(sorted(sample["__id__"] for sample in samples))

    with DistributedDataLoader(tars, batch_size=16, collate=collate, with_ids=True) as loader:
        assert all(isinstance(batch, tuple) and len(batch) == 16 for batch in loader)


def test_an_error_in_a_transform_names_the_sample_and_ends_the_pass(tars):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no such thing")

    with DistributedDataLoader(tars, batch_size=16, transform=transform) as loader:
        with pytest.raises(RuntimeError, match="no such thing") as caught:
            next(iter(loader))
        assert "shard-0" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("how", ["iterator kept", "state loaded"])
def test_after_an_error_training_goes_on_from_the_same_position(tars, how):
    broken = {"is": True}

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if broken["is"] and int(sample["txt"]) % 100 == 50:
            raise RuntimeError("broken")
        return sample

    with DistributedDataLoader(tars, batch_size=8, transform=transform, with_ids=True, last_batch="partial") as loader:
        seen = []
        batches = iter(loader)
        with pytest.raises(RuntimeError, match="broken"):
            seen.extend(sample for batch in batches for sample in ids_of(batch))
        assert not any(name.startswith("penstock") for name in penstock_threads())
        broken["is"] = False
        if how == "state loaded":
            loader.load_state_dict(loader.state_dict())
            batches = iter(loader)
        seen += [sample for batch in batches for sample in ids_of(batch)]
        assert sorted(seen) == list(range(sum(SIZES)))


def test_table_rows_come_as_tensors_and_python_values(tmp_path):
    rows = 1000
    numbers = np.arange(rows)
    table = pa.table(
        {
            **{f"f{i}": (numbers * i).astype(np.float32) for i in range(6)},
            **{f"c{i}": (numbers + i).astype(np.uint32) for i in range(6)},
            "id": numbers,
            "word": [f"w{n}" for n in numbers],
            "nested": [{"a": int(n)} for n in numbers],
            "maybe": pa.array([None if n % 3 == 0 else int(n) for n in numbers], pa.int32()),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=90)
    with DistributedDataLoader(str(tmp_path), batch_size=64, last_batch="partial") as loader:
        seen = []
        for batch in loader:
            ids = batch["id"]
            assert (batch["f3"] == (ids * 3).float()).all()
            assert batch["c5"].dtype == torch.int64
            assert (batch["c5"] == ids + 5).all()
            assert batch["word"] == [f"w{n}" for n in ids.tolist()]
            assert batch["nested"] == [{"a": n} for n in ids.tolist()]
            assert (batch["maybe__null"] == (ids % 3 == 0)).all()
            assert (batch["maybe"][~batch["maybe__null"]] == ids[ids % 3 != 0]).all()
            seen += ids.tolist()
        assert sorted(seen) == list(range(rows))


def test_tokens_come_as_int64_sequences(tmp_path):
    tokens = np.arange(40_000, dtype=np.uint16)
    for number, part in enumerate(np.split(tokens, [13_000, 13_500])):
        part.tofile(tmp_path / f"t{number}.bin")
    with DistributedDataLoader(str(tmp_path), batch_size=4, format=TokensFormat(seq_len=128)) as loader:
        for batch in loader:
            assert batch["tokens"].shape == (4, 128)
            assert batch["tokens"].dtype == torch.int64
            assert (batch["tokens"].diff(dim=1) == 1).all()


def test_images_are_decoded_into_their_slot_the_same_on_any_number_of_ranks(tmp_path):
    cv2 = pytest.importorskip("cv2")
    (tmp_path / "d").mkdir()
    import io
    import tarfile

    with tarfile.open(tmp_path / "d" / "a.tar", "w") as tar:
        for number in range(60):
            pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3)).astype(np.uint8)
            fields = {"jpg": cv2.imencode(".jpg", pixels)[1].tobytes(), "cls": str(number).encode()}
            for extension, data in fields.items():
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    decode = {"jpg": ImageDecoder(size=24, crop="random", flip=0.5)}

    def images(world_size: int) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for loader in ranks(str(tmp_path / "d"), world_size, batch_size=5, decode=decode, last_batch="partial"):
            for batch in loader:
                assert batch["jpg"].shape[1:] == (3, 24, 24)
                assert batch["jpg"].is_contiguous(memory_format=torch.channels_last)
                found.update({int(c): image.clone() for c, image in zip(batch["cls"], batch["jpg"], strict=True)})
            loader.close()
        return found

    alone, together = images(1), images(3)
    assert len(alone) == 60
    assert all(torch.equal(alone[number], together[number]) for number in alone)


def test_a_damaged_image_is_named_with_its_shard_and_key(tmp_path):
    write_tars(tmp_path, [20])
    decode = {"bin": ImageDecoder(size=8)}
    named = r"number \d+ of shard-00000.tar, key '\d{8}'\).*'bin'"
    loader = DistributedDataLoader(str(tmp_path), batch_size=4, decode=decode)
    with loader, pytest.raises(DecodeError, match=named):
        next(iter(loader))


def test_close_in_mid_epoch_leaves_no_thread(tars):
    loader = DistributedDataLoader(tars, batch_size=4)
    batches = iter(loader)
    next(batches)
    assert penstock_threads()
    loader.close()
    assert penstock_threads() == []
    with pytest.raises(LoaderClosedError):
        next(batches)
    loader.close()


def test_a_forgotten_loader_takes_its_threads_along(tars):
    loader = DistributedDataLoader(tars, batch_size=4)
    next(iter(loader))
    del loader
    gc.collect()
    assert penstock_threads() == []


@pytest.mark.slow
def test_closing_from_another_thread_wakes_the_waiting_one(tars):
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1)
        return sample

    loader = DistributedDataLoader(tars, batch_size=64, transform=slow, threads=1)
    threading.Timer(0.5, loader.close).start()
    started = time.monotonic()
    with pytest.raises(LoaderClosedError):
        for _ in loader:
            pass
    assert time.monotonic() - started < 30  # an epoch takes five minutes
    loader.close()
    assert penstock_threads() == []


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, ConfigError, "give one of them"),
        ({"batch_size": 4, "global_batch_size": 4}, ConfigError, "give one of them"),
        ({"batch_size": 0}, ConfigError, "batch_size=0"),
        ({"batch_size": -3}, ConfigError, "batch_size=-3"),
        ({"batch_size": 2.5}, ConfigError, "batch_size=2.5"),
        ({"batch_size": 1000}, PartitionError, "above the data set's 312"),
        ({"batch_size": 1, "rank": 0, "world_size": 500}, PartitionError, "world_size=500"),
        ({"global_batch_size": 64, "rank": 0, "world_size": 6}, PartitionError, "use 66, or give batch_size= per rank"),
        ({"batch_size": 4, "rank": 3, "world_size": 3}, ConfigError, "from 0 to world_size - 1"),
        ({"batch_size": 4, "rank": 3}, ConfigError, "give both"),
        ({"batch_size": 4, "lanes": 12}, ConfigError, "power of two"),
        ({"batch_size": 4, "window": 0}, ConfigError, "window=0"),
        ({"batch_size": 4, "threads": 0}, ConfigError, "threads=0"),
        ({"batch_size": 4, "memory_limit": "lots"}, ConfigError, "memory_limit='lots'"),
        ({"batch_size": 4, "memory_limit": -1}, ConfigError, "memory_limit=-1"),
        ({"batch_size": 4, "last_batch": "skip"}, ConfigError, "'drop', 'pad' or 'partial'"),
        ({"batch_size": 4, "decode": "jpg"}, ConfigError, "decode="),
        ({"batch_size": 4, "transform": 3}, ConfigError, "transform=3"),
        ({"batch_size": 4, "cache_limit": "1GB"}, ConfigError, "cache_dir"),
        ({"batch_size": 4, "seed": -1}, ConfigError, "seed=-1"),
    ],
)
def test_bad_arguments_are_refused_at_once(tars, options, kind, message):
    with pytest.raises(kind, match=message):
        DistributedDataLoader(tars, **options)
    assert penstock_threads() == []


@pytest.mark.slow
def test_a_world_larger_than_the_data_set_works_when_batches_may_be_padded(tmp_path):
    write_tars(tmp_path, [3])
    loaders = ranks(str(tmp_path), 8, batch_size=1, last_batch="pad", with_ids=True)
    valid = [next(iter(loader))["__valid__"].item() for loader in loaders]
    assert valid == [True] * 3 + [False] * 5


def test_a_shard_cut_short_after_indexing_is_named_with_its_offset(tmp_path):
    write_tars(tmp_path, [30, 30])
    loader = DistributedDataLoader(str(tmp_path), batch_size=4)
    path = tmp_path / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(Exception, match=r"shard-00001\.tar") as caught:
        list(loader)
    assert type(caught.value).__module__.startswith("penstock.")
    loader.close()
    assert penstock_threads() == []


def test_bytes_that_change_without_a_change_of_size_or_time_are_found_by_the_format(tmp_path):
    write_tars(tmp_path, [30])
    path = tmp_path / "shard-00000.tar"
    stat = path.stat()
    loader = DistributedDataLoader(str(tmp_path), batch_size=4)
    with path.open("r+b") as file:
        file.seek(4 * 512)  # the header of the third member
        file.write(b"x" * 512)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(FormatError, match=r"shard-00000\.tar at byte"):
        list(loader)
    loader.close()


def test_bad_chunks_are_replaced_alike_on_any_number_of_ranks_up_to_the_limit(tmp_path):
    write_tars(tmp_path, [30] * 6)
    with DistributedDataLoader(str(tmp_path), batch_size=4) as loader:
        manifest = loader.manifest
    for number in (1, 4):
        path = tmp_path / f"shard-{number:05d}.tar"
        stat = path.stat()
        with path.open("r+b") as file:
            file.seek(4 * 512)
            file.write(b"x" * 512)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def deliver(world_size: int, **options: Any) -> list[list[int]]:
        steps = []
        for loader in ranks(manifest, world_size, global_batch_size=12, with_ids=True, **options):
            with loader:
                steps.append([ids_of(batch) for batch in loader])
                assert {bad.shard for bad in loader.bad_chunks} <= {"shard-00001.tar", "shard-00004.tar"}
        return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]

    with pytest.warns(BadChunkWarning, match="shard-0000[14].tar"):
        alone, together = deliver(1, max_bad_chunks=2), deliver(3, max_bad_chunks=2)
    assert alone == together
    assert set(itertools.chain(*alone)) == {*range(30), *range(60, 120), *range(150, 180)}
    with pytest.warns(BadChunkWarning), pytest.raises(DatasetError, match="more than max_bad_chunks=1"):
        deliver(1, max_bad_chunks=1)
    with pytest.raises(FormatError):
        deliver(1)


def test_metrics_count_what_was_done_and_where_the_time_went(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial") as loader:
        for _ in loader:
            time.sleep(0.02)
        metrics = loader.metrics()
        assert metrics.samples == sum(SIZES)
        assert metrics.batches == len(loader)
        assert metrics.fetched_bytes > 0
        assert metrics.consumer_busy_s >= 0.02 * (len(loader) - 1)
        assert metrics.peak_bytes > 0
        json.dumps(metrics.to_dict())


def test_set_shares_changes_who_gets_a_sample_and_no_global_batch(tars):
    equal = [[ids_of(batch) for batch in loader] for loader in ranks(tars, 2, batch_size=16, with_ids=True)]
    uneven = []
    for loader in ranks(tars, 2, batch_size=16, with_ids=True):
        batches = iter(loader)
        taken = [ids_of(next(batches))]
        loader.set_shares([3, 1])
        uneven.append(taken + [ids_of(batch) for batch in batches])
        loader.close()
    for step, (first, second, one, two) in enumerate(zip(*equal, *uneven, strict=True)):
        assert sorted(first + second) == sorted(one + two)
        assert (len(one), len(two)) == ((16, 16) if step == 0 else (24, 8))


def test_the_environment_of_torchrun_gives_rank_and_world_size(tars, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        assert "rank=1, world_size=2" in repr(loader)


def test_a_path_object_and_a_single_shard_are_sources_too(tars):
    with DistributedDataLoader(Path(tars) / "shard-00002.tar", batch_size=16, last_batch="partial") as loader:
        assert sum(len(batch["txt"]) for batch in loader) == SIZES[2]
