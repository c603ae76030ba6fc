"""The lock of a run on checkpoints in an object store."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from launch_ranks import run_ranks
from saved_nets import build
from small_trainers import make_trainer
from stored_checkpoints import keys_in, make_config, named_keys

from penstock.storage import (
    Fault,
    MemoryStore,
    NotFoundError,
    StoreUnavailableError,
)
from penstock.trainer import (
    CheckpointError,
    World,
)
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote import lock as store_lock
from penstock.trainer.checkpoint.remote.layout import list_stored
from penstock.trainer.checkpoint.remote.lock import LOCK_KEY, StoreLock

pytestmark = pytest.mark.usefixtures("staging")


class Clock:
    """A foreign host's view: nobody's pid can be looked up, and waiting takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.each_look: Any = lambda: None
        monkeypatch.setattr(store_lock.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(store_lock.time, "sleep", self.sleep)
        monkeypatch.setattr(store_lock, "_processes", lambda: f"another host {uuid4().hex}")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.each_look()


@pytest.mark.slow
def test_a_second_run_is_refused_by_the_name_of_the_first(
    world: World, bucket: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "_LIVING_OWNER_S", 0.5)
    options = {"every_steps": 2, "folder": bucket.url}
    with make_trainer(world, str(tmp_path), checkpoint=options) as first:
        with pytest.raises(CheckpointError, match=rf"{bucket.url} belongs to.*process {os.getpid()} \(this process\)"):
            make_trainer(world, str(tmp_path), checkpoint=options)
        first.train()
    make_trainer(world, str(tmp_path), checkpoint=options).close()


def test_a_run_on_another_host_is_refused_as_soon_as_its_lock_changes(
    bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StoreLock(bucket)
    clock = Clock(monkeypatch)
    clock.each_look = lambda: clock.now_s > 9 and first.confirm()
    try:
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
            StoreLock(bucket)
        assert clock.now_s < 11
    finally:
        first.close()


def test_a_lock_that_stands_still_is_taken_over_and_the_old_run_saves_no_more(
    alone: World,
    bucket: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, optimizer = build()
    with Checkpointer(make_config(bucket), alone) as suspended:
        suspended.save(1, net, optimizer, {"of": "the first"}, blocking=True)
        with monkeypatch.context() as patched:
            clock = Clock(patched)
            second = StoreLock(bucket)
        assert store_lock.LEASE_S <= clock.now_s < store_lock.LEASE_S + 1
        assert second.note is not None
        assert f"process {os.getpid()}" in second.note
        with pytest.raises(CheckpointError, match=r"taken over by another run .* process \d+"):
            suspended.save(2, net, optimizer, {"of": "the first"}, blocking=True)
        assert list_stored(bucket) == [1]
    assert LOCK_KEY in keys_in(bucket), "it is the second's"
    second.confirm()
    second.close()
    assert keys_in(bucket) == named_keys(bucket)


def test_the_lock_shows_that_its_holder_lives_and_survives_a_broken_connection(bucket: MemoryStore) -> None:
    lock = StoreLock(bucket, beat_s=0.01)
    seen: set[str | None] = set()
    deadline = time.monotonic() + 30
    bucket.inject(Fault(error=StoreUnavailableError), verb="put_if")
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(bucket.head(LOCK_KEY).etag)
        time.sleep(0.002)
    assert len(seen) == 3
    lock.confirm()
    bucket.delete([LOCK_KEY])  # by hand
    lock.confirm()
    lock.close()
    lock.close()
    with pytest.raises(NotFoundError):
        bucket.head(LOCK_KEY)


LEASE_S = 12.0


def wait_for_a_dead_run(world: World, url: str, stall_timeout_s: float) -> tuple[str, float]:
    """What the trainer says, and after how long; the ranks' stores are their own, which it finds after the lock."""
    store = MemoryStore(url).create()
    dead = {"token": "of another run", "host": "node-7", "pid": 7, "processes": "of another host", "ticks": 7}
    store.put(LOCK_KEY, json.dumps(dead).encode())
    store_lock.LEASE_S = LEASE_S
    began_s = time.monotonic()
    checkpoint = {"every_steps": 2, "folder": url}
    with tempfile.TemporaryDirectory() as folder, pytest.raises(CheckpointError) as caught:
        make_trainer(world, folder, checkpoint=checkpoint, stall_timeout_s=stall_timeout_s)
    return str(caught.value), time.monotonic() - began_s


@pytest.mark.slow
def test_waiting_for_the_lease_of_a_dead_run_is_no_stall() -> None:
    for said, seconds in run_ranks(wait_for_a_dead_run, 2, f"mem://{uuid4().hex}/run", LEASE_S / 2):
        assert "rank 1 does not see what rank 0 writes" in said
        assert seconds >= LEASE_S
