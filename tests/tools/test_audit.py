"""The account of what was delivered: over attempts, world sizes, kills and damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
from made_manifest import make_manifest

from penstock import audit
from penstock.loader import ConfigError, DatasetError
from penstock.loader.pipeline import delivery_log
from penstock.loader.pipeline.delivery_log import DeliveryLog

MANIFEST = make_manifest([[50, 50]])
SAMPLES = 100


def order_of(epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(SAMPLES)


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets which launch, and which restart of it, the logs that follow are of; clocks never stand still."""
    clock = iter(range(10**18, 2 * 10**18, 10**6))
    monkeypatch.setattr(delivery_log.time, "time_ns", lambda: next(clock))
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def set_launch(port: int, restart: int = 0) -> None:
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))

    return set_launch


def log_attempt(
    folder: Path,
    world_size: int,
    *stretches: tuple[int, int, int],
    batch: int = 10,
    ranks: Collection[int] | None = None,
    short: Collection[int] = (),
) -> None:
    """Log global batches of ``stretches`` (epoch, start, stop); ``short`` ranks are killed before their last batch."""
    logs = [DeliveryLog(folder, manifest=MANIFEST, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch, start, stop in stretches:
        for low in range(start, stop, batch):
            high = min(low + batch, SAMPLES)
            for rank, share in enumerate(np.array_split(order_of(epoch)[low:high], world_size)):
                last = low + batch >= stop and (epoch, start, stop) == stretches[-1]
                if (ranks is None or rank in ranks) and not (last and rank in short):
                    logs[rank].record(epoch, low, high, share.astype(np.int64))
    for log in logs:
        log.close()


def test_what_was_skipped_is_neither_missing_nor_delivered_and_a_later_attempt_replaces_it(
    tmp_path: Path, launch: Callable[..., None]
) -> None:
    def attempt(first: tuple[int, int, int], skipped: tuple[int, int, int], then: tuple[int, int, int]) -> None:
        logs = [DeliveryLog(tmp_path, manifest=MANIFEST, rank=rank, world_size=2) for rank in range(2)]
        for epoch, start, stop in (first, then):
            for low in range(start, stop, 10):
                for log, share in zip(logs, np.array_split(order_of(epoch)[low : low + 10], 2), strict=True):
                    log.record(epoch, low, low + 10, share.astype(np.int64))
            if (epoch, start, stop) == first:
                for log in logs:
                    log.record_skip(*skipped)
        for log in logs:
            log.close()

    attempt((0, 0, 40), (0, 40, 60), (0, 60, 80))
    assert [account.skipped for account in audit(tmp_path).epochs] == [20]
    assert accounts(tmp_path) == [(0, 80, 60, 0, 0, 0)]
    launch(1)
    attempt((0, 30, 50), (0, 50, 90), (0, 90, 100))  # resumed before the skip, and skipping elsewhere
    assert [account.skipped for account in audit(tmp_path).epochs] == [40]
    assert accounts(tmp_path) == [(0, 100, 60, 0, 0, 30)]
    launch(2)
    attempt((0, 60, 80), (0, 80, 90), (0, 90, 100))  # resumed inside of what was skipped
    assert [account.skipped for account in audit(tmp_path).epochs] == [20]
    assert audit(tmp_path).is_exact


def accounts(folder: Path) -> list[tuple[int, ...]]:
    return [(a.epoch, a.reached, a.delivered, a.missing, a.duplicated, a.replayed) for a in audit(folder).epochs]


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    for look in ("listdir", "scandir"):
        monkeypatch.setattr(os, look, refuse)
    with pytest.raises(DatasetError, match=r"cannot be read .Permission denied.; check its permissions"):
        audit(tmp_path)


def test_an_unbroken_run_is_exact(tmp_path: Path) -> None:
    log_attempt(tmp_path, 3, (0, 0, 100), (1, 0, 100), (2, 0, 30))
    report = audit(tmp_path)
    assert report.is_exact
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, 0), (1, 100, 100, 0, 0, 0), (2, 30, 30, 0, 0, 0)]
    assert report.attempts == [(3, 0, 0)]


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_attempts_of_other_world_sizes_go_on_from_their_checkpoints(
    tmp_path: Path, launch: Callable[..., None], under_torchrun: bool
) -> None:
    for restart, (world_size, *stretches) in enumerate(
        [(3, (0, 0, 70)), (2, (0, 40, 100), (1, 0, 20)), (2, (1, 10, 60)), (4, (1, 60, 100))]
    ):
        if under_torchrun:
            launch(29500, restart)
        log_attempt(tmp_path, world_size, *stretches, short=(0,) if restart == 0 else ())
    report = audit(tmp_path)
    assert report.is_exact
    assert report.attempts == [(3, 0, 0), (2, 0, 40), (2, 1, 10), (4, 1, 60)]
    replayed = sum(len(share) for share in np.array_split(np.arange(10), 3)[1:]) + 20
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, replayed), (1, 100, 100, 0, 0, 10)]


def test_a_checkpoint_older_than_the_attempt_before_it_makes_both_replayed(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 50))
    log_attempt(tmp_path, 2, (0, 50, 70))
    log_attempt(tmp_path, 2, (0, 20, 100))
    assert audit(tmp_path).is_exact
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, 50)]


def test_a_state_loaded_back_in_one_process_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 60), (0, 30, 100))
    report = audit(tmp_path)
    assert report.is_exact
    assert report.attempts == [(2, 0, 0), (2, 0, 30)]
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, 30)]


def test_a_rank_whose_deliveries_are_missing_is_found(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 100), ranks={0})
    report = audit(tmp_path)
    assert not report.is_exact
    assert accounts(tmp_path) == [(0, 100, 50, 50, 0, 0)]


def test_a_resume_that_skips_is_found(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 40))
    log_attempt(tmp_path, 2, (0, 50, 100))
    assert accounts(tmp_path) == [(0, 100, 90, 10, 0, 0)]
    assert not audit(tmp_path).is_exact


def test_a_sample_delivered_twice_is_found(tmp_path: Path) -> None:
    log = DeliveryLog(tmp_path, manifest=MANIFEST, rank=0, world_size=1)
    log.record(0, 0, 4, np.array([5, 6, 7, 8]))
    log.record(0, 4, 8, np.array([9, 5, 10, 11]))
    log.close()
    report = audit(tmp_path)
    assert not report.is_exact
    assert accounts(tmp_path) == [(0, 8, 8, 1, 1, 0)]


def test_a_rank_killed_before_its_first_batch_belongs_to_its_own_attempt(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 10), short=(1,))  # rank 1 logs nothing
    # In the next attempt rank 1 starts before rank 0.
    logs = [DeliveryLog(tmp_path, manifest=MANIFEST, rank=rank, world_size=2) for rank in (1, 0)]
    for low in range(0, 100, 10):
        one, other = np.array_split(order_of(0)[low : low + 10], 2)
        logs[1].record(0, low, low + 10, one)
        logs[0].record(0, low, low + 10, other)
    for log in logs:
        log.close()
    assert audit(tmp_path).is_exact
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, 5)]


def test_a_log_cut_anywhere_by_a_kill_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    log_attempt(tmp_path, 1, (0, 0, 40))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    record = (len(whole) - head) // 4
    log_attempt(tmp_path, 1, (0, 20, 100))  # its checkpoint was written when two records were
    for cut in range(head + 2 * record, len(whole), 13):
        path.write_bytes(whole[:cut])
        assert audit(tmp_path).is_exact
    for cut in range(head):  # killed while it wrote its first line
        path.write_bytes(whole[:cut])
        assert accounts(tmp_path) == [(0, 100, 80, 20, 0, 0)]


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 1), (1, -1), (2, -5), (2, 11), (3, 101), (4, -1), (5, -1), (5, 100)],
    ids=["magic", "epoch", "start", "start>stop", "stop", "count", "id<0", "id"],
)
def test_a_damaged_record_is_named_with_its_place(tmp_path: Path, word: int, value: int) -> None:
    log_attempt(tmp_path, 1, (0, 0, 10))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    head = data.index(b"\n") + 1
    data[head + 8 * word : head + 8 * word + 8] = np.int64(value).tobytes()
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=rf"{path.name}: damaged at byte {head}"):
        audit(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{}", b"not json", b'{"rank": "0"}', b"\xff"])
def test_a_file_that_is_no_log_is_named(tmp_path: Path, header: bytes) -> None:
    log_attempt(tmp_path, 1, (0, 0, 10))
    (tmp_path / "0-rank0-1.deliveries").write_bytes(header + b"\n")
    with pytest.raises(DatasetError, match=r"0-rank0-1\.deliveries: not a readable delivery log"):
        audit(tmp_path)


def test_a_folder_without_deliveries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no delivery logs"):
        audit(tmp_path)
    DeliveryLog(tmp_path, manifest=MANIFEST, rank=0, world_size=1).close()
    with pytest.raises(DatasetError, match="no delivery logs"):
        audit(tmp_path)


def test_logs_of_two_data_sets_are_refused(tmp_path: Path) -> None:
    log_attempt(tmp_path, 1, (0, 0, 10))
    log = DeliveryLog(tmp_path, manifest=make_manifest([[1]]), rank=0, world_size=1)
    log.record(0, 0, 1, np.array([0]))
    log.close()
    with pytest.raises(DatasetError, match="logs of 2 data sets"):
        audit(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"audit_dir=.*file"):
        DeliveryLog(tmp_path / "file", manifest=MANIFEST, rank=0, world_size=1)


def test_a_full_disk_is_told_with_the_logs_name() -> None:
    log = DeliveryLog.__new__(DeliveryLog)
    log._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the log closes it
    with pytest.raises(DatasetError, match=r"/dev/full: a delivery cannot be logged"):
        log.record(0, 0, 1, np.array([0]))
    log.close()


def test_a_header_says_who_wrote_the_log(tmp_path: Path) -> None:
    log = DeliveryLog(tmp_path, manifest=MANIFEST, rank=3, world_size=5)
    log.close()
    (path,) = tmp_path.iterdir()
    header = json.loads(path.read_bytes())
    assert (header["rank"], header["world_size"], header["num_samples"]) == (3, 5, SAMPLES)
    assert header["fingerprint"] == MANIFEST.fingerprint


def test_an_epoch_that_is_absent_between_others_is_missing(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 100), (2, 0, 40))
    assert accounts(tmp_path) == [(0, 100, 100, 0, 0, 0), (1, 100, 0, 100, 0, 0), (2, 40, 40, 0, 0, 0)]


def test_an_epoch_left_for_the_next_one_is_missing_what_it_did_not_deliver(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 50), (1, 0, 100))
    assert accounts(tmp_path) == [(0, 100, 50, 50, 0, 0), (1, 100, 100, 0, 0, 0)]


def test_what_does_not_fill_a_batch_is_not_missing(tmp_path: Path) -> None:
    log_attempt(tmp_path, 2, (0, 0, 90), (1, 0, 30), batch=30)
    assert audit(tmp_path).is_exact


@pytest.mark.parametrize("skew", [-(10**10), 10**10], ids=["behind", "ahead"])
def test_nodes_whose_clocks_differ_are_one_attempt_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None], skew: int
) -> None:
    now = delivery_log.time.time_ns
    for restart, (start, stop) in enumerate([(0, 60), (40, 100)]):
        launch(1, restart)
        logs = []
        for rank in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(delivery_log.time, "time_ns", lambda rank=rank: now() + rank * skew)
                logs.append(DeliveryLog(tmp_path, manifest=MANIFEST, rank=rank, world_size=2))
        for low in range(start, stop, 10):
            for log, share in zip(logs, np.array_split(order_of(0)[low : low + 10], 2), strict=True):
                log.record(0, low, low + 10, share.astype(np.int64))
        for log in logs:
            log.close()
    report = audit(tmp_path)
    assert report.attempts == [(2, 0, 0), (2, 0, 40)]
    assert report.is_exact
    assert report.epochs[0].replayed == 20


def test_attempts_in_an_order_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]
) -> None:
    launch(1)
    log_attempt(tmp_path, 1, (0, 0, 50))
    launch(2)
    monkeypatch.setattr(delivery_log.time, "time_ns", iter(range(10**9, 2 * 10**9)).__next__)  # a host that is behind
    log_attempt(tmp_path, 1, (0, 30, 100))
    with pytest.raises(DatasetError, match="clocks of hosts differ"):
        audit(tmp_path)


def test_a_run_that_began_elsewhere_and_was_begun_anew_is_in_order(tmp_path: Path, launch: Callable[..., None]) -> None:
    launch(1)
    log_attempt(tmp_path, 1, (0, 60, 80))
    launch(2)
    log_attempt(tmp_path, 1, (0, 0, 50))
    assert [attempt[2] for attempt in audit(tmp_path).attempts] == [60, 0]


def test_what_fills_no_batch_is_told_by_the_batches_of_the_attempt_that_ended_the_epoch(
    tmp_path: Path, launch: Callable[..., None]
) -> None:
    launch(1)
    log_attempt(tmp_path, 1, (0, 0, 60), batch=30)
    launch(2)
    log_attempt(tmp_path, 1, (0, 60, 80), (1, 0, 100), batch=10)
    report = audit(tmp_path)
    assert [epoch.missing for epoch in report.epochs] == [20, 0]  # two batches of 10, though 20 fill none of 30


def test_a_size_that_another_attempt_set_counts_no_more(tmp_path: Path, launch: Callable[..., None]) -> None:
    launch(1)
    log = DeliveryLog(tmp_path, manifest=MANIFEST, rank=0, world_size=1)
    log.record_batch_size(0, 0, 10)
    log.record(0, 0, 10, order_of(0)[:10].astype(np.int64))
    log.close()
    launch(2)
    log_attempt(tmp_path, 1, (0, 10, 70), (1, 0, 60), (2, 0, 60), batch=60)
    assert [epoch.missing for epoch in audit(tmp_path).epochs] == [0, 0, 0]
