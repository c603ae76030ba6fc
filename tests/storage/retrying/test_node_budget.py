"""All processes of a user on a node share how many requests to a host run, and how that number falls and rises."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.storage import RetryConfig, StorageError, open_store
from penstock.storage.own_folder import OwnFolder
from penstock.storage.retrying.limiter import KEPT, Limiter, limiter_of, open_budget
from penstock.storage.retrying.node_budget import COOLDOWN_S, FRESH_S, GROW_S, NodeBudget


def open_in(folder: Path, places: int = 8, *, clock: list[float] | None = None) -> NodeBudget:
    wall_clock = (lambda: clock[0]) if clock is not None else None
    return NodeBudget(OwnFolder(folder), "requests", places, **({"wall_clock": wall_clock} if wall_clock else {}))  # type: ignore[arg-type]


def limiter_in(folder: Path, places: int, max_running: int = 64) -> Limiter:
    return Limiter(max_running, open_budget=lambda: open_in(folder, places))


def test_processes_together_have_no_more_places_than_the_node(tmp_path: Path) -> None:
    mine, other = open_in(tmp_path / "own"), open_in(tmp_path / "own")
    assert [mine.take() for _ in range(5)] == [True] * 5
    assert [other.take() for _ in range(5)] == [True] * 3 + [False] * 2
    mine.give()
    assert other.take()
    assert not mine.take()


def test_shares_are_equal_among_the_processes_that_send_requests_now(tmp_path: Path) -> None:
    budgets = [open_in(tmp_path / "own", 64) for _ in range(5)]
    for budget in budgets:
        assert budget.take()
    assert [budget.share() for budget in budgets[3:]] == [64 // 5] * 2
    for budget in budgets[2:]:
        budget.give()
    assert budgets[0].share() == 32


def test_throttling_of_one_process_cuts_the_limits_of_the_node_and_of_its_other_processes(tmp_path: Path) -> None:
    now = [0.0]
    mine, other = (
        Limiter(8, open_budget=lambda: open_in(tmp_path / "own", 32), clock=lambda: now[0]) for _ in range(2)
    )
    mine.note_throttled()
    assert (mine.limit, other.limit) == (4, 8)
    now[0] += 1
    assert other.acquire(0)
    assert mine.acquire(0)
    assert (mine.limit, other.limit) == (4, 4)
    assert open_in(tmp_path / "own", 32).limit == 4  # only one of them sends requests, 8 at most
    other.note_success()
    assert other.limit == 4
    for _ in range(3):
        other.note_success()
    assert other.limit == 5


def test_a_round_of_successes_of_the_node_adds_a_place_but_not_faster_than_a_host_forgives(tmp_path: Path) -> None:
    clock = [1000.0]
    limiter = Limiter(64, open_budget=lambda: open_in(tmp_path / "own", 32, clock=clock))
    assert limiter.acquire(0)
    open_in(tmp_path / "own", 32, clock=clock).cut(8)

    def places_after(successes: int) -> int:
        for _ in range(successes):
            limiter.note_success()
        return open_in(tmp_path / "own", 32, clock=clock).limit

    limiter._budget.refresh()  # type: ignore[union-attr] - at once, not at the next poll
    assert places_after(40) == 8  # cut a moment ago: two processes of at most 8 requests had 16
    clock[0] += GROW_S
    assert [places_after(7), places_after(1), places_after(40)] == [8, 9, 9]


def test_a_storm_of_throttled_answers_cuts_once_and_never_below_one(tmp_path: Path) -> None:
    clock = [1000.0]
    budgets = [open_in(tmp_path / "own", 8, clock=clock) for _ in range(3)]
    limits = []
    for _ in range(5):
        for budget in budgets:
            budget.cut(8)
        limits.append(open_in(tmp_path / "own", 8, clock=clock).limit)
        clock[0] += COOLDOWN_S
    assert limits == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("damage", ["old", "clock", "torn", "foreign"])
def test_a_record_that_says_nothing_of_now_leaves_all_places(tmp_path: Path, damage: str) -> None:
    clock = [1000.0]
    open_in(tmp_path / "own", 8, clock=clock).cut(8)
    assert open_in(tmp_path / "own", 8, clock=clock).limit == 4
    file = tmp_path / "own" / "requests"
    if damage in {"old", "clock"}:
        clock[0] += FRESH_S if damage == "old" else -1e6
    else:
        data = file.read_bytes()
        file.write_bytes(data[:20] + data[:20] + data[40:] if damage == "torn" else b"hello" + data[5:])
    assert open_in(tmp_path / "own", 8, clock=clock).limit == 8


def test_a_process_with_many_waiting_threads_lets_others_have_their_share(tmp_path: Path) -> None:
    busy, late = limiter_in(tmp_path / "own", 8), limiter_in(tmp_path / "own", 8)
    done, stop, most = {"busy": 0, "late": 0}, threading.Event(), [0]
    earlier = 0  # requests of the one before the other had its first

    def send(name: str, limiter: Limiter) -> None:
        nonlocal earlier
        while not stop.is_set():
            assert limiter.acquire(60)
            most[0] = max(most[0], busy.running + late.running)
            stop.wait(0.002)
            if name == "late" and not done["late"]:
                earlier = done["busy"]
            done[name] += 1
            limiter.release()
            if done["late"] >= 300:
                stop.set()

    threads = [threading.Thread(target=send, args=("busy", busy)) for _ in range(16)]
    threads += [threading.Thread(target=send, args=("late", late)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done["busy"] - earlier < 8 * done["late"]
    assert most[0] <= 8
    assert (busy.running, late.running) == (0, 0)
    assert open_in(tmp_path / "own").take()


def test_a_stopped_process_that_holds_all_places_slows_the_others_down_but_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.retrying.limiter.PATIENCE_S", 0.05)
    stopped, other = limiter_in(tmp_path / "own", 2), limiter_in(tmp_path / "own", 2)
    assert stopped.acquire(0)
    assert stopped.acquire(0)
    assert not other.acquire(0)
    assert other.acquire(60)
    assert not other.acquire(0.2)  # one at a time
    other.release()
    stopped.release()
    stopped.release()
    assert other.acquire(0)


def test_places_are_kept_between_requests_only_while_others_of_the_process_run(tmp_path: Path) -> None:
    limiter, budget = limiter_in(tmp_path / "own", 8), open_in(tmp_path / "own", 8)
    for _ in range(8):
        assert limiter.acquire(0)
    for _ in range(7):
        limiter.release()
    assert [budget.take() for _ in range(8)].count(True) == 8 - 1 - KEPT
    limiter.release()
    assert [budget.take() for _ in range(8)].count(True) == 1 + KEPT


def test_a_wait_that_ends_without_a_place_leaves_nothing_behind(tmp_path: Path) -> None:
    holder, waiting = limiter_in(tmp_path / "own", 1), limiter_in(tmp_path / "own", 1)
    assert holder.acquire(0)
    assert not waiting.acquire(0.05)
    holder.release()
    budget = open_in(tmp_path / "own", 1)
    assert budget.share() == 1
    assert budget.take()
    assert not budget.is_owed()


def test_a_forked_child_has_none_of_its_parents_places(tmp_path: Path) -> None:
    script = (
        "import os, sys; from penstock.storage.retrying.limiter import limiter_of, open_budget\n"
        "parent = limiter_of('h', 8); assert parent.acquire(0); assert parent.acquire(0)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = not limiter_of('h', 8).acquire(0.05); os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert not open_budget('h', 2).take(); parent.release(); parent.release(); assert open_budget('h', 2).take()\n"
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PENSTOCK_NODE_REQUESTS": "2"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True, timeout=60)


def test_a_folder_that_others_could_write_is_not_used_and_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"penstock-{os.geteuid()}").symlink_to(victim)
    assert open_budget("host", 4) is None
    assert "it is a link" in caplog.text
    assert list(victim.iterdir()) == []
    assert limiter_of("host of nobody", 4).acquire(0)


def test_a_switch_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_REQUESTS", "many")
    with pytest.raises(StorageError, match=r"PENSTOCK_NODE_REQUESTS='many': .* 1 to 4096, or 0"):
        limiter_of("a host", 4)
    monkeypatch.setenv("PENSTOCK_NODE_REQUESTS", "0")
    assert open_budget("a host", 0) is None


def test_a_store_waits_for_a_place_and_says_so_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_NODE_REQUESTS", "1")
    url = f"mem://places-{uuid4().hex}"  # limiters live as long as the process
    store = open_store(url, retry=RetryConfig(deadline_s=0.2))
    store.put("x", b"data")
    budget = open_budget(url, 1)
    assert budget is not None
    assert budget.take()
    with pytest.raises(StorageError, match=r"no place for another request within 0\.2 s.*PENSTOCK_NODE_REQUESTS"):
        store.get("x")
    budget.give()
    assert bytes(store.get("x")) == b"data"
