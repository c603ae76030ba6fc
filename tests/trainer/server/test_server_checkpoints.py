"""Checkpoints of a server are whole or absent, load into any number of shards, and tell which bucket is damaged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from server_cluster import Cluster, adding, few_buckets

from penstock.storage.memory_store import MemoryStore
from penstock.trainer.errors import ServerRefusedError
from penstock.trainer.server import checkpoints
from penstock.trainer.server.checkpoints import complete, find_newest, new_save, read_buckets, read_saved, write_shard
from penstock.trainer.server.placement import Placement
from penstock.trainer.server.shard import Shard

IDS = np.array([4, 17, 90], np.int64)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets():
        yield


def trained(steps: int) -> Cluster:
    cluster = Cluster(adding(), shards=2)
    (client,) = cluster.start(1)
    for _ in range(steps):
        client.push({"w": torch.ones(3, 4), "b": torch.ones(2)}, {"t": (IDS, torch.ones(3, 2))})
        client.advance()
    return cluster


def save(cluster: Cluster, store: MemoryStore, step: int, *, keep: int = 3) -> None:
    name = new_save()
    files = [
        write_shard(store, step, name, shard, ((number, one.snapshot(number)) for number in one.buckets))
        for shard, one in cluster.shards.items()
    ]
    complete(store, step, name, files, {"epoch": step}, keep=keep)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("part_bytes", [1, 700, 1 << 20])
def test_a_checkpoint_loads_into_any_number_of_shards(
    shards: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PART_BYTES", part_bytes)
    cluster, store = trained(3), MemoryStore()
    save(cluster, store, 3)
    saved = find_newest(store, pytest.fail)
    assert saved is not None
    assert (saved.step, saved.run) == (3, {"epoch": 3})
    placement = Placement({f"shard-{index}": 1 for index in range(shards)})
    found = {}
    for name in placement.weights:
        shard = Shard(name, cluster.config)
        for place, data in read_buckets(store, saved, placement.buckets_of(name)):
            shard.adopt(data, place=place)
        assert set(shard.buckets) == placement.buckets_of(name)
        found.update({number: shard.snapshot(number) for number in shard.buckets})
    assert found == {number: one.snapshot(number) for one in cluster.shards.values() for number in one.buckets}


def test_without_its_manifest_a_save_is_none_and_the_next_one_deletes_it() -> None:
    cluster, store = trained(1), MemoryStore()
    save(cluster, store, 1)
    shard = cluster.shards["shard-0"]
    write_shard(store, 2, new_save(), "shard-0", [(number, shard.snapshot(number)) for number in shard.buckets])
    saved = find_newest(store, pytest.fail)
    assert saved is not None
    assert saved.step == 1
    save(cluster, store, 3)
    assert not [info.key for info in store.list("data/step-2")]


def test_the_newest_are_kept() -> None:
    cluster, store = trained(1), MemoryStore()
    for step in (1, 2, 3, 4):
        save(cluster, store, step, keep=2)
    assert sorted({info.key.split("/")[1] for info in store.list("manifests/")}) == ["step-3.json", "step-4.json"]


def test_a_flipped_byte_is_found_named_and_the_checkpoint_before_it_used() -> None:
    cluster, store = trained(2), MemoryStore()
    save(cluster, store, 1)
    save(cluster, store, 2)
    key = next(info.key for info in store.list("data/step-2") if "shard-1.buckets" in info.key)
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, data)
    notes: list[str] = []
    saved = find_newest(store, notes.append)
    assert saved is not None
    assert saved.step == 1
    assert len(notes) == 1
    assert "step 2 is not used" in notes[0]
    assert key in notes[0]
    damaged = read_saved(store, 2)
    shard = Shard("fresh", cluster.config)

    def load() -> None:
        for place, one in read_buckets(store, damaged, damaged.buckets):
            shard.adopt(one, place=place)

    with pytest.raises(ServerRefusedError, match=r"bucket \d+ in .*shard-1.buckets.*damaged"):
        load()


def test_a_missing_part_is_named() -> None:
    cluster, store = trained(1), MemoryStore()
    save(cluster, store, 1)
    store.delete([next(info.key for info in store.list("data/") if "shard-0.buckets" in info.key)])
    notes: list[str] = []
    assert find_newest(store, notes.append) is None
    assert "shard-0.buckets" in notes[0]
