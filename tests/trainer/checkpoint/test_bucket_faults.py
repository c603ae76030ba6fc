"""Checkpoints in an object store that refuses, is damaged or breaks off, and what is left of them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_ranks
from saved_nets import build
from small_trainers import make_trainer
from stored_checkpoints import keys_in, make_config, named_keys, notes_in, save_steps

from penstock.storage import (
    AccessDeniedError,
    Fault,
    MemoryStore,
    StorageError,
)
from penstock.storage.threads.interruptible import Thread
from penstock.trainer import (
    CheckpointConfig,
    CheckpointError,
    CheckpointUploadError,
    World,
)
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote.layout import list_stored
from penstock.trainer.checkpoint.remote.lock import LOCK_KEY
from penstock.trainer.checkpoint.remote.staging import Staging

pytestmark = pytest.mark.usefixtures("staging")


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("__0_0.distcp", "flipped"),
        ("__0_0.distcp", "cut"),
        ("__0_0.distcp", "missing"),
        (".metadata", "flipped"),
        ("extra.json", "flipped"),
        ("manifests/step-2.json", "flipped"),
        ("manifests/step-2.json", "cut"),
    ],
)
def test_damage_of_any_object_is_detected_and_passed_over(
    alone: World,
    bucket: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    victim: str,
    how: str,
) -> None:
    save_steps(bucket, alone, 1, 2)
    (key,) = [key for key in keys_in(bucket) if victim in key and "step-2" in key]
    content = bytearray(bucket.get(key))
    if how == "flipped":
        content[len(content) // 2] ^= 0x04
    if how == "missing":
        bucket.delete([key])
    else:
        bucket.put(key, content[: len(content) // 2] if how == "cut" else content)
    net, optimizer = build()
    with caplog.at_level(logging.WARNING), Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) == (1, {"step": 1})
        assert {float(tensor.detach().flatten()[0]) for tensor in net.parameters()} == {1.0}
        assert list(checkpoints.passed_over) == [2]
        assert key in checkpoints.passed_over[2]
        assert f"{bucket.url}/step-2 is damaged and skipped" in caplog.text
        checkpoints.save(2, net, optimizer, {"step": "again"}, blocking=True)
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) == (2, {"step": "again"})
    assert keys_in(bucket) == named_keys(bucket)


@pytest.mark.slow
def test_a_store_that_cannot_be_read_is_not_taken_for_damage(
    alone: World,
    bucket: MemoryStore,
) -> None:
    save_steps(bucket, alone, 1, 2)
    net, optimizer = build()
    for verb in ("get", "list"):
        with Checkpointer(make_config(bucket), alone) as checkpoints:
            bucket.inject(Fault(error=AccessDeniedError), times=3, verb=verb)
            with pytest.raises(CheckpointError, match=r"injected fault"):
                checkpoints.load_newest(net, optimizer)
            assert not checkpoints.passed_over
            assert checkpoints.load_newest(net, optimizer) == (2, {"step": 2})


def test_a_part_that_arrives_damaged_once_is_fetched_again(
    alone: World,
    bucket: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_steps(bucket, alone, 1)
    seen: set[str] = set()
    get = MemoryStore.get

    def get_badly(store: MemoryStore, key: str, *rest: Any, **options: Any) -> memoryview:
        data = get(store, key, *rest, **options)
        if key.startswith("data/") and key not in seen:
            seen.add(key)
            return memoryview(bytes(len(data)))
        return data

    monkeypatch.setattr(MemoryStore, "get", get_badly)
    net, optimizer = build()
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) == (1, {"step": 1})
        assert not checkpoints.passed_over


def fail_puts(monkeypatch: pytest.MonkeyPatch, of_step: int, error: type[StorageError]) -> None:
    """Every put of that step's data fails, as if the store were full."""
    put = MemoryStore.put

    def put_or_fail(store: MemoryStore, key: str, data: Any) -> Any:
        if f"step-{of_step}." in key and ".distcp" in key:
            raise error(f"injected fault at {key}")
        return put(store, key, data)

    monkeypatch.setattr(MemoryStore, "put", put_or_fail)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_the_store_refuses_is_noted_and_training_goes_on(
    world: World, bucket: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    fail_puts(monkeypatch, 2, AccessDeniedError)
    options = {"every_steps": 1, "folder": bucket.url, "background": background}
    with make_trainer(world, str(tmp_path), steps=4, checkpoint=options) as trainer:
        assert trainer.train().steps == 4
    notes = notes_in(tmp_path)
    assert [note for note in notes if "step 2 could not be saved" in note and "training continues" in note], notes
    assert list_stored(bucket) == [4, 3, 1]
    assert keys_in(bucket) == named_keys(bucket)


def test_the_last_save_of_a_run_raises_where_the_store_refuses_it(
    world: World, bucket: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_puts(monkeypatch, 3, StorageError)
    with (
        make_trainer(world, str(tmp_path), steps=3, checkpoint={"every_steps": 1, "folder": bucket.url}) as trainer,
        pytest.raises(CheckpointUploadError, match=rf"step 3 could not be saved to {bucket.url}: .*injected fault"),
    ):
        trainer.train()
    assert list_stored(bucket) == [2, 1]
    assert keys_in(bucket) == named_keys(bucket)


def test_a_save_that_gets_no_thread_to_send_with_is_an_error_and_does_not_wait(
    alone: World, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Thread.start

    def start_none_to_send(thread: Thread) -> None:
        if thread.name == "penstock-upload":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", start_none_to_send)
    with pytest.raises(CheckpointError, match="can't start new thread"):
        save_steps(bucket, alone, 1)


@pytest.mark.slow
def test_what_a_failed_save_or_deletion_leaves_is_deleted_by_the_next_save(
    alone: World,
    bucket: MemoryStore,
) -> None:
    net, optimizer = build()
    with Checkpointer(make_config(bucket, keep_last=1), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
        bucket.inject(Fault(error=AccessDeniedError), times=3, verb="delete")
        checkpoints.save(2, net, optimizer, {}, blocking=True)
        (note,) = checkpoints.take_notes()
        assert "old checkpoints could not be deleted" in note
        assert "the next save tries again" in note
        checkpoints.save(3, net, optimizer, {}, blocking=True)
        assert not checkpoints.take_notes()
        assert [key for key in keys_in(bucket) if key != LOCK_KEY] == named_keys(bucket)
    assert list_stored(bucket) == [3]


def test_leftovers_are_deleted_at_the_start_and_foreign_objects_stay(
    alone: World,
    bucket: MemoryStore,
) -> None:
    save_steps(bucket, alone, 1, 2)
    kept = keys_in(bucket)
    bucket.put("manifests/step-2.json", b"{torn")
    left = ["data/step-1.0123abcd/__0_0.distcp.00000", "data/step-9.0123abcd/__0_0.distcp.00003", "probe/0123-4"]
    foreign = ["data/readme.txt", "manifests/readme.txt", "notes/step-1.txt"]
    for key in (*left, *foreign):
        bucket.put(key, b"x")
    Checkpointer(make_config(bucket), alone).close()
    assert keys_in(bucket) == sorted([*kept, *foreign]), "what an unreadable manifest may name stays"


@pytest.mark.slow
def test_a_store_that_will_not_do_is_refused_at_the_start(
    alone: World,
    bucket: MemoryStore,
) -> None:
    for verb, cause in (("put", "cannot be kept"), ("delete", "cannot be deleted"), ("put_if", "cannot be kept")):
        bucket.inject(Fault(error=AccessDeniedError), times=3, verb=verb)
        with pytest.raises(CheckpointError, match=rf"checkpoints {cause}: injected fault"):
            Checkpointer(make_config(bucket), alone)
        bucket.delete([LOCK_KEY])
    with pytest.raises(CheckpointError, match="unheardof:// can't be opened"):
        Checkpointer(CheckpointConfig(folder="unheardof://bucket/run"), alone)


def _open_in_memory(world: World, url: str) -> str:
    try:
        Checkpointer(CheckpointConfig(folder=url), world).close()
    except CheckpointError as exc:
        return str(exc)
    return "opened"


def test_a_store_that_is_another_one_on_each_rank_is_refused() -> None:
    for message in run_ranks(_open_in_memory, 2, "memory://bucket/run"):
        assert message.startswith("rank 1 does not see what rank 0 writes to memory://")


@pytest.mark.parametrize("call", ["mkdtemp", "open"])
def test_a_folder_that_another_rank_tidied_away_before_it_was_locked_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    owner, tidied = (tempfile if call == "mkdtemp" else os), []
    make = getattr(owner, call)

    def make_and_lose(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        if not tidied:
            tidied.append(made)
            Path(made if call == "mkdtemp" else arguments[0]).rmdir()
        return made

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, make_and_lose)
        staging = Staging()
    assert tidied
    assert staging.folder.is_dir()
    staging.close()
    assert not staging.folder.exists()
