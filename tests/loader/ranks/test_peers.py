"""A loader that fails on one rank stops all of them in seconds, each with the first cause, and without a trainer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from started_threads import started_threads
from tar_dataset import write_tars
from torchrun import run_ranks

from penstock import DistributedDataLoader
from penstock.loader import ConfigError, LoaderClosedError, RankStoppedError
from penstock.loader.ranks.incidents import KNOWN_WITHIN_S
from penstock.storage import NotFoundError
from penstock.storage.threads.interruptible import Thread

SCRIPT = Path(__file__).parents[1] / "stopping_rank.py"
CLOSED_SCRIPT = SCRIPT.with_name("closed_rank.py")
SOON_S = 20.0  # on a busy machine; without being told, rank 0 trains for 30 s and rank 2 waits for ten minutes
WAIT_S = 30.0


@pytest.mark.slow
def test_an_error_on_one_rank_reaches_those_that_train_wait_or_are_blocked(tmp_path: Path) -> None:
    samples = write_tars(tmp_path / "data", [100, 100, 100])
    run = run_ranks(3, SCRIPT, tmp_path / "data", tmp_path)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    cause = told[1]["apart"]["message"]
    assert "no such class" in cause
    for rank in (0, 2):
        apart = told[rank]["apart"]
        assert apart["error"] == "RankStoppedError"
        assert apart["message"].startswith("rank 1 stopped: ")
        assert cause in apart["message"]
        assert "shard-0" in apart["message"]
        assert apart["seconds"] < SOON_S
    assert [one["threads"] for one in told] == [[], [], []]
    assert told[1]["start"]["error"] == "ConfigError"
    for rank in (0, 2):  # one was at its first batch, the other before it
        assert told[rank]["start"]["error"] == "RankStoppedError"
        assert told[rank]["start"]["message"].startswith("rank 1 stopped: ConfigError: audit_dir=")
        assert told[rank]["start"]["seconds"] < SOON_S
    assert [one["called"]["error"] for one in told] == ["RankStoppedError"] * 3
    for one in told:
        assert "set_batch_size(2) at position" in one["called"]["message"]
        assert "rank 1 called set_batch_size(4)" in one["called"]["message"].replace(
            "and rank 1 set_", "rank 1 called set_"
        )
    assert [one["again"] for one in told] == [{"batches": samples // 3}] * 3
    # Blocked in a collective, a rank cannot be stopped by us: its log has named the cause before it ends.
    assert run.stderr.count("rank 1 stopped: ") >= 4
    assert run.returncode != 0


@pytest.fixture(scope="module")
def closed_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What two ranks tell whose loaders fail and are closed, and their logs."""
    folder = tmp_path_factory.mktemp("closed")
    write_tars(folder / "data", [50, 50])
    run = run_ranks(2, CLOSED_SCRIPT, folder / "data", folder)
    assert run.returncode == 0, run.stderr
    told = [json.loads((folder / f"closed-{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(told):
        one["last"] = json.loads((folder / f"last-{rank}.json").read_text())
    return told, run.stderr


@pytest.mark.slow
def test_a_rank_whose_process_ends_after_its_error_stops_every_loader_of_the_others(
    closed_ranks: tuple[list[dict[str, Any]], str],
) -> None:
    own = "ValueError: no such class"
    (failed, other), _ = closed_ranks
    assert failed["last"] == own
    assert other["last"].startswith(f"RankStoppedError: rank 0 stopped: {own}")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keep", "may_drop"])
def test_no_rank_goes_beyond_the_batch_before_what_decides_fails_and_one_behind_stops_sooner(
    closed_ranks: tuple[list[dict[str, Any]], str], way: str
) -> None:
    ranks = [told["streams"] for told in closed_ranks[0]]
    for pace in ("meeting", "slower"):
        stopped = [told[f"{way} {pace}"] for told in ranks]
        counts = [len(one["batches"]) for one in stopped]
        for one, told in zip(stopped, ranks, strict=True):
            assert one["batches"] == told["good"][: len(one["batches"])]
            assert "no such class" in one["error"]
            assert "sample 70" in one["error"]
        first = next(rank for rank in range(2) if stopped[rank]["error"].startswith("ValueError: no such class"))
        behind = stopped[1 - first]["error"]
        assert behind.startswith(("DatasetError: rank", "RankStoppedError: rank"))
        assert 0 < max(counts) < len(ranks[0]["good"])
        assert counts[0] == counts[1] if pace == "meeting" else counts[1] <= counts[0]


@pytest.mark.slow
def test_an_error_stops_its_own_loader_on_other_ranks_and_no_loader_beside_or_after_it(
    closed_ranks: tuple[list[dict[str, Any]], str],
) -> None:
    (failed, other), log = closed_ranks
    own, told = "ValueError: no such class", "RankStoppedError: rank 0 stopped: "
    after = {"after closed": 5, "after forgotten": 5, "beside": 5}
    assert failed["first"] == {"closed": own, "forgotten": own, **after}
    assert other["first"] == after
    assert log.count("(that loader is closed on this rank)") == 2
    assert failed["order"] == {"val": own, "train": 2}
    assert other["order"]["train"] == 2
    assert other["order"]["val"].startswith(told + own)
    assert failed["again"]["made"].startswith("ConfigError: audit_dir=")
    assert other["again"]["made"].startswith(told + "ConfigError: audit_dir=")
    assert failed["again"]["again"] == own
    assert other["again"]["again"].startswith(told + own)  # though it was made after the other had failed
    assert failed["again"]["last"] == other["again"]["last"] == 5


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process as rank 0 of a group of two, whose other rank the test plays through the store that it gets."""
    monkeypatch.setattr("penstock.loader.ranks.peers.LOOK_S", 0.02)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield dist.distributed_c10d._get_default_store()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tars(tmp_path / "data", [50, 50])
    return tmp_path / "data"


def watching() -> list[threading.Thread]:
    return [thread for thread in started_threads() if thread.name == "penstock-peers"]


def open_loader(source: Path, **options: Any) -> DistributedDataLoader[Any]:
    return DistributedDataLoader(source, batch_size=1, cache_dir=source.parent / "cache", **options)


def tell(store: Any, incident: int, message: str, loader: DistributedDataLoader[Any] | None = None) -> None:
    """What rank 1 tells, of one loader or of all."""
    cause = {"rank": 1, "kind": "ChecksumError", "message": message, "shard": "a.tar", "offset": 7}
    names = [] if loader is None else loader._resources.names[:1]
    store.set(f"penstock/stop/{incident}/cause", json.dumps({**cause, "loader": names}))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such class")


@pytest.mark.slow
def test_an_error_that_another_rank_told_is_raised_once_and_names_rank_shard_and_reason(group, data):
    cause = r"rank 1 stopped: ChecksumError: a\.tar at byte 7: wrong bytes"
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        tell(group, 1, "wrong bytes")
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(RankStoppedError, match=cause) as caught:
            next(iterator)
        assert caught.value.rank == 1
        consumed = loader.state_dict()["consumed"]
        assert next(iterator)["txt"]
        assert loader.state_dict()["consumed"] == consumed + 2
        tell(group, 2, "again")
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(RankStoppedError, match="again"):
            next(iterator)
    assert watching() == []


@pytest.mark.slow
def test_a_rank_that_falls_silent_stops_those_that_wait_for_their_batch_and_names_its_host(group, data, monkeypatch):
    monkeypatch.setattr("penstock.loader.ranks.peers.SIGN_S", 0.25)
    monkeypatch.setattr("penstock.loader.ranks.peers.SILENT_S", 2.0)
    group.set("penstock/alive/1", "7 node-1")
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        wait_until(lambda: loader._resources.pipeline._out._interruption is not None)  # so whoever waits is woken
        with pytest.raises(
            RankStoppedError, match=r"rank 1 stopped: Silence: .* no sign of life for .* node-1, is down"
        ):
            next(iterator)
    assert group.get("penstock/alive/0") == b"left"
    assert watching() == []


def test_a_store_whose_host_falls_silent_stops_who_waits_for_a_batch(group, data, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("Connection timed out\nframe #0")

    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        monkeypatch.setattr("penstock.loader.ranks.peers.Signs.exchange", fail)
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(
            RankStoppedError, match=r"has not been heard of for over 120 s: .*\(Connection timed out\)$"
        ):
            next(iterator)
    assert watching() == []


def test_an_error_of_another_rank_is_raised_by_one_of_a_process_loaders(group, data):
    with open_loader(data) as loader, open_loader(data) as other:
        iterators = [iter(loader), iter(other)]
        for iterator in iterators:
            next(iterator)
        tell(group, 1, "wrong bytes")
        wait_until(lambda: other._resources.pipeline._out._interruption is not None)
        with pytest.raises(RankStoppedError):
            next(iterators[0])
        assert next(iterators[1])["txt"]


@pytest.mark.slow
def test_of_two_loaders_that_one_which_failed_elsewhere_is_stopped_alone(group: Any, data: Path, caplog: Any) -> None:
    with open_loader(data) as loader, open_loader(data) as other:
        iterators = [iter(loader), iter(other)]
        for iterator in iterators:
            next(iterator)
        tell(group, 1, "wrong bytes", other)
        wait_until(lambda: other._resources.pipeline._out._interruption is not None)
        assert loader._resources.pipeline._out._interruption is None
        assert sum(1 for _ in iterators[0]) == 49
        with pytest.raises(RankStoppedError, match="wrong bytes"):
            next(iterators[1])
        tell(group, 2, "again", other)
        wait_until(lambda: bool(loader._resources.peers.pending))
    with open_loader(data) as following:
        tell(group, 3, "too late", other)
        wait_until(lambda: "too late" in caplog.text)
        assert "(that loader is closed on this rank)" in caplog.text
        assert sum(1 for _ in following) == 50


def test_an_own_error_is_told_with_its_sample_and_shard(group, data):
    with open_loader(data, transform=fail) as loader:
        with pytest.raises(ValueError, match="no such class"):
            next(iter(loader))
        told = json.loads(group.get("penstock/stop/1/cause"))
        assert (told["rank"], told["kind"]) == (0, "ValueError")
        assert "no such class; in transform= of sample" in told["message"]
        assert "shard-0" in told["message"]
    assert watching() == []


def test_an_error_after_another_ranks_names_that_as_the_first_cause(group, data):
    group.add("penstock/stop/1/claims", 1)
    tell(group, 1, "wrong bytes")
    with open_loader(data, transform=fail) as loader:
        with pytest.raises((ValueError, RankStoppedError)) as caught:
            next(iter(loader))
        assert "rank 1 stopped: ChecksumError" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_an_error_that_kept_a_loader_from_being_made_is_told(group, data):
    group.add("penstock/stop/1/known", 1)  # by rank 1
    (data.parent / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="audit_dir"):
        open_loader(data, audit_dir=data.parent / "file")
    told = json.loads(group.get("penstock/stop/1/cause"))
    assert (told["rank"], told["kind"]) == (0, "ConfigError")
    with open_loader(data) as loader:  # whoever catches it goes on
        assert sum(1 for _ in loader) == 50
    with pytest.raises(NotFoundError):
        DistributedDataLoader(data.parent / "nothing", batch_size=1, rank=0, world_size=1)
    assert not group.check(["penstock/stop/2/cause"])


def test_where_loaders_fail_alike_each_rank_raises_its_own_error_at_once(group, data):
    group.add("penstock/stop/1/claims", 1)
    tell(group, 1, "wrong bytes")
    before = time.monotonic()
    with pytest.raises(ConfigError, match="batch_size=0") as caught:
        DistributedDataLoader(data, batch_size=0)
    assert time.monotonic() - before < KNOWN_WITHIN_S
    assert "rank 1 stopped: ChecksumError" in " ".join(caught.value.__notes__)


def test_an_error_of_another_rank_is_known_before_the_first_batch(group, data, caplog):
    with open_loader(data) as loader:
        tell(group, 1, "no such file")
        wait_until(lambda: "no such file" in caplog.text)  # as a rank needs it that is blocked before its first batch
        with pytest.raises(RankStoppedError, match="no such file"):
            next(iter(loader))


def call_elsewhere(store: Any, loader: DistributedDataLoader[Any], number: int, text: str, position: int) -> None:
    """What rank 1 called as its call ``number``."""
    call = {"rank": 1, "text": text, "epoch": 0, "position": position, "moves": 1}
    store.set(f"{loader._resources.calls._prefix}/{number}", json.dumps(call))


def test_a_batch_size_that_ranks_set_differently_is_an_error_that_names_them(group, data):
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        call_elsewhere(group, loader, 0, "set_batch_size(2)", 2)
        call_elsewhere(group, loader, 1, "set_batch_size(3)", 2)
        loader.set_batch_size(2)
        next(iterator)
        loader.set_batch_size(4)
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(RankStoppedError, match="rank 1 called set_batch_size") as caught:
            next(iterator)
        assert (
            "rank 1 called set_batch_size(3) at position 2 of epoch 0, and rank 0 set_batch_size(4) at position 6"
            in (str(caught.value))
        )


def test_a_call_that_a_rank_left_out_is_an_error_there_once_it_is_past_it(group, data):
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        call_elsewhere(group, loader, 0, "set_shares([1.0, 2.0])", 2)
        wait_until(lambda: loader._resources.calls.lacks_one)
        next(iterator)  # it may still come before this
        with pytest.raises(
            ConfigError, match=r"rank 1 called set_shares.* and rank 0, which is at 4 of epoch 0, did not"
        ):
            next(iterator)


def test_a_rank_that_went_back_is_not_past_a_call_of_the_others(group, data):
    with open_loader(data) as loader:
        iterator = iter(loader)
        for _ in range(9):
            next(iterator)
        call_elsewhere(group, loader, 0, "set_batch_size(2)", 2)
        wait_until(lambda: loader._resources.calls.lacks_one)
        iterator = iter(loader)  # which rank 1 did not, or not yet
        for _ in range(9):
            next(iterator)


def test_closing_a_loader_is_no_error_of_its_rank(group, data):
    loader = open_loader(data)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(iterator)
    assert not group.check(["penstock/stop/1/cause"])


def test_a_rank_with_data_of_its_own_hears_of_nobody(group, data):
    tell(group, 1, "wrong bytes")
    with open_loader(data, rank=0, world_size=1) as loader:
        assert sum(1 for _ in loader) == 100
        assert watching() == []


def test_a_group_that_is_destroyed_ends_the_watch_and_not_the_pass(data):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        assert len(watching()) == 1
        dist.destroy_process_group()
        wait_until(lambda: watching() == [])
        assert sum(1 for _ in iterator) == 49


def test_ctrl_c_before_the_watch_begins_does_not_leave_the_rank_unwatched(
    group: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Thread.start

    def interrupted(self: Thread) -> None:
        if self.name != "penstock-peers":
            return start(self)
        monkeypatch.setattr(Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(open_loader(data)))
    assert watching() == []
    with open_loader(data) as loader:
        next(iter(loader))
        assert len(watching()) == 1
    assert watching() == []
