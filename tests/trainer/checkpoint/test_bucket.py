"""Checkpoints in an object store, on one in memory: all that holds of a folder, what is fetched, failures, the lock."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file
from started_threads import started_threads
from test_checkpoint import alone, assert_same, build, fill, step_once, whole_state  # noqa: F401 - a fixture
from test_rewind import batches_to_rows, going_back, records, train
from together_cases import make_trainer

from penstock.storage import (
    AccessDeniedError,
    Fault,
    MemoryStore,
    NotFoundError,
    StorageError,
    StoreUnavailableError,
)
from penstock.trainer import (
    CheckpointConfig,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointUploadError,
    World,
    export_safetensors,
)
from penstock.trainer.__main__ import main
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote import lock as store_lock
from penstock.trainer.checkpoint.remote import upload
from penstock.trainer.checkpoint.remote.layout import list_stored, read_stored
from penstock.trainer.checkpoint.remote.lock import LOCK_KEY, StoreLock
from penstock.trainer.checkpoint.remote.staging import Staging


@pytest.fixture
def bucket() -> Iterator[MemoryStore]:
    store = MemoryStore(f"mem://{uuid4().hex}/run").create()
    yield store
    store.drop()


@pytest.fixture(autouse=True)
def staging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where checkpoints are fetched to: empty again after every test, and no threads are left."""
    folder = tmp_path_factory.mktemp("s")  # short: sockets of processes that tests start lie below it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("penstock-checkpoint-*"))
    assert not [thread for thread in started_threads() if thread.name.startswith("penstock")]


def make_config(bucket: MemoryStore, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(folder=bucket.url, **options)


def keys_in(bucket: MemoryStore) -> list[str]:
    return [info.key for info in bucket.list()]


def named_keys(bucket: MemoryStore) -> list[str]:
    """What the manifests name, and themselves: all that should be there when no run is."""
    keys = []
    for step in list_stored(bucket):
        stored = read_stored(bucket, step)
        keys += [f"manifests/step-{step}.json"]
        keys += [part.key for name in stored.parts for part in stored.parts_of(name)]
    return sorted(keys)


def save_steps(bucket: MemoryStore, world: World, *steps: int, **config: Any) -> None:
    """Save steps whose weights are all the step's number."""
    net, optimizer = build()
    with Checkpointer(make_config(bucket, **config), world) as checkpoints:
        for step in steps:
            fill(net, float(step))
            checkpoints.save(step, net, optimizer, {"step": step}, blocking=True)


# --- as in a folder ---


@pytest.mark.parametrize("part_bytes", [300, 32 << 20])
def test_what_was_saved_comes_back_whatever_the_size_of_parts(
    alone: World,  # noqa: F811
    bucket: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", part_bytes)
    net, optimizer = build()
    step_once(net, optimizer, 1)
    wanted = whole_state(net, optimizer)
    owed = {"owed": torch.arange(5.0)}
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.check_room(net)
        assert checkpoints.load_newest(net, optimizer) is None
        checkpoints.save(1, net, optimizer, {"loader": [1, 2]}, rank_state=owed)
        step_once(net, optimizer, 2)  # after the copy
    other_net, other_optimizer = build()
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(other_net, other_optimizer) == (1, {"loader": [1, 2]})
        assert_same(checkpoints.load_rank_state(), owed)
    assert_same(whole_state(other_net, other_optimizer), wanted)
    assert keys_in(bucket) == named_keys(bucket)
    assert all(info.size <= part_bytes for info in bucket.list("data/"))


@pytest.mark.slow
def test_a_run_trains_resumes_keeps_and_exports_as_with_a_folder(
    world: World, bucket: MemoryStore, tmp_path: Path
) -> None:
    found = []
    for name, folder in (("local", "checkpoints"), ("remote", bucket.url)):
        options = {"every_steps": 2, "keep_last": 2, "folder": folder}
        for steps in (5, 9):
            with make_trainer(
                world, str(tmp_path / name), steps=steps, checkpoint=options, export="weights.safetensors"
            ) as trainer:
                assert trainer.progress.step == (0 if steps == 5 else 5)
                trainer.train()
        found.append(load_file(tmp_path / name / "weights.safetensors"))
    assert_same(found[1], found[0])
    assert list_stored(bucket) == [9, 8]
    assert keys_in(bucket) == named_keys(bucket)
    assert sorted(path.name for path in (tmp_path / "remote").iterdir()) == [
        "metrics.jsonl",
        "ranks",
        "weights.safetensors",
    ]


@pytest.mark.slow
def test_training_goes_back_after_a_loss_spike_as_in_a_folder(
    world: World, bucket: MemoryStore, tmp_path: Path
) -> None:
    """The spike is found after step 14; the checkpoint of step 12 is too near to it, and goes."""
    found = []
    for name, folder in (("local", "checkpoints"), ("remote", bucket.url)):
        run = train(world, tmp_path / name, steps=20, bad=batches_to_rows(14), **going_back(folder))
        (record,) = records(tmp_path / name, "rewind")
        assert (record["step"], record["to_step"]) == (15, 8)
        assert any("the checkpoint of step 12 is deleted" in note for note in notes_in(tmp_path / name))
        found.append((run.steps, run.state, run.average))
    assert found[1] == found[0]
    assert list_stored(bucket) == [20, 16, 12, 8, 4]
    assert keys_in(bucket) == named_keys(bucket)


def test_the_command_line_takes_a_url(bucket: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["digits", "--dry-run", "--trainer.checkpoint.every_steps=2", f"--trainer.output_dir={tmp_path}"]
    assert main([*flags, f"--trainer.checkpoint.folder={bucket.url}"]) == 0
    assert f'folder = "{bucket.url}"' in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--trainer.output_dir=s3://bucket/run"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "give a path there, and the URL as checkpoint.folder" in said


def test_the_last_and_the_best_are_kept_and_a_step_saved_again_replaces_it(
    alone: World,  # noqa: F811
    bucket: MemoryStore,
) -> None:
    net, optimizer = build()
    config = make_config(bucket, keep_last=2, keep_best=1, best="max")
    with Checkpointer(config, alone) as checkpoints:
        for step, metric in [(1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, float("nan"))]:
            checkpoints.save(step, net, optimizer, {}, metric=metric)
        checkpoints.save(5, net, optimizer, {"again": True}, metric=0.2)
    assert list_stored(bucket) == [5, 4, 2]
    assert read_stored(bucket, 5).manifest.metric == 0.2
    assert keys_in(bucket) == named_keys(bucket)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_the_store(
    alone: World,  # noqa: F811
    bucket: MemoryStore,
) -> None:
    save_steps(bucket, alone, 1)
    wider, its_optimizer = build(width=7)
    with (
        Checkpointer(make_config(bucket), alone) as checkpoints,
        pytest.raises(CheckpointMismatchError, match=rf"{bucket.url}/step-1 is of another model: 0\.bias has"),
    ):
        checkpoints.load_newest(wider, its_optimizer)


# --- damage ---


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
    alone: World,  # noqa: F811
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
        assert f"{bucket.url}/step-2 is damaged and passed over" in caplog.text
        checkpoints.save(2, net, optimizer, {"step": "again"}, blocking=True)
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        assert checkpoints.load_newest(net, optimizer) == (2, {"step": "again"})
    assert keys_in(bucket) == named_keys(bucket)


@pytest.mark.slow
def test_a_store_that_cannot_be_read_is_not_taken_for_damage(
    alone: World,  # noqa: F811
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
    alone: World,  # noqa: F811
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


# --- what is fetched ---


def test_only_the_parts_that_are_needed_are_fetched(
    alone: World,  # noqa: F811
    bucket: MemoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", 500)
    net, optimizer = build()
    step_once(net, optimizer, 1)
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.save(1, net, optimizer, {}, blocking=True)
    wanted = {key.removeprefix("model."): value for key, value in whole_state(net, optimizer).items() if "model" in key}
    parts = [info.key for info in bucket.list("data/") if ".distcp" in info.key]
    began = len(bucket.calls)
    export_safetensors(f"{bucket.url}/step-1", tmp_path / "weights.safetensors")
    assert_same(load_file(tmp_path / "weights.safetensors"), wanted)
    fetched = {call.key.removeprefix("run/") for call in bucket.calls[began:] if ".distcp" in call.key}
    assert 5 < len(fetched) < 0.6 * len(parts), "the optimizer's state stays where it is"
    with pytest.raises(CheckpointError, match=r"step-7\.json is missing"):
        export_safetensors(f"{bucket.url}/step-7", tmp_path / "none.safetensors")
    bucket.delete([sorted(fetched)[0]])
    with pytest.raises(CheckpointError, match=f"{bucket.url}/step-1 is damaged: {sorted(fetched)[0]} is missing"):
        export_safetensors(f"{bucket.url}/step-1", tmp_path / "none.safetensors")


def test_what_a_killed_process_fetched_is_deleted_by_the_next(
    alone: World,  # noqa: F811
    bucket: MemoryStore,
    staging: Path,
) -> None:
    save_steps(bucket, alone, 1)
    dead, of_others = staging / "penstock-checkpoint-dead", staging / "unrelated"
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"left")
    of_others.mkdir()
    net, optimizer = build()
    with Checkpointer(make_config(bucket), alone) as checkpoints:
        checkpoints.load_newest(net, optimizer)
        assert len(list(staging.glob("penstock-checkpoint-*"))) == 1
        assert not dead.exists()
        checkpoints.save(2, net, optimizer, {}, blocking=True)
        assert not list(staging.glob("penstock-checkpoint-*")), "it is given up at the next save"
    assert of_others.exists()


# --- failures ---


def notes_in(folder: Path) -> list[str]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["note"] for record in records if record["kind"] == "note"]


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
    assert [note for note in notes if "step 2 could not be saved" in note and "training goes on" in note], notes
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


@pytest.mark.slow
def test_what_a_failed_save_or_deletion_leaves_is_deleted_by_the_next_save(
    alone: World,  # noqa: F811
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
    alone: World,  # noqa: F811
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
    alone: World,  # noqa: F811
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


# --- two runs ---


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
    alone: World,  # noqa: F811
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
