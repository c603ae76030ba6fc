"""Who is slowest, who is silent, what bounds a run, and what is advised."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.trainer.report.status.rank_status import RankStatus
from penstock.trainer.report.status.survey import Survey, survey

NOW_S = 1000.0


def rank(number: int, world_size: int = 4, **values: Any) -> RankStatus:
    """A rank that made 100 steps of 0.1 s in the last ten seconds, computing nearly all the time."""
    seconds = {
        "fetch": 0.1,
        "forward": 3.0,
        "backward": 6.0,
        "reduce": 0.2,
        "optimizer": 0.5,
        **values.pop("seconds", {}),
    }
    start = {
        "host": f"node{number // 2}",
        "pid": 1,
        "device": "cpu",
        "time": NOW_S - 0.5,
        "every_s": 1.0,
        "began_s": 1.0,
    }
    rates = {"state": "training", "window_s": 10.0, "steps": 100, "phase": "backward", "seconds": seconds}
    return RankStatus(rank=number, world_size=world_size, **{**start, **rates, **values})


def judge(*changed: RankStatus, world_size: int = 4) -> Survey:
    by_rank = {one.rank: one for one in changed}
    return survey([by_rank.get(n, rank(n, world_size)) for n in range(world_size)], NOW_S)


def test_even_ranks_that_compute_are_bound_by_their_devices() -> None:
    found = judge()
    assert (found.bound, found.slowest, found.skew_s, found.step_s) == ("devices", None, None, 0.1)
    assert (found.stale, found.missing) == ({}, [])
    assert set(found.waits.values()) == {0.0}


@pytest.mark.parametrize(("phase", "bound"), [("forward", "rank"), ("fetch", "data"), ("optimizer", "rank")])
def test_the_slowest_rank_is_named_with_the_phase_that_makes_it_so(phase: str, bound: str) -> None:
    slow = rank(2, seconds={phase: {"fetch": 0.1, "forward": 3.0, "optimizer": 0.5}[phase] + 4.0, "backward": 2.0})
    found = judge(slow)
    assert (found.slowest, found.skew_phase, found.bound) == (2, phase, bound)
    assert found.skew_s == pytest.approx(0.04)
    assert found.waits == pytest.approx({0: 0.4, 1: 0.4, 2: 0.0, 3: 0.4})
    assert f"Rank 2 on node1 is slowest: 40 ms of 100 ms a step more than the others, in {phase}." in found.advice


def test_of_two_ranks_the_slower_one_is_named() -> None:
    found = judge(rank(1, 2, seconds={"forward": 5.0, "backward": 4.0}), world_size=2)
    assert (found.slowest, found.skew_s) == (1, pytest.approx(0.02))


def test_waiting_for_data_quotes_the_loaders_own_advice() -> None:
    ranks = [
        rank(n, seconds={"fetch": 5.0 + n / 10, "forward": 1.0, "backward": 3.0}, advice=f"advice {n}")
        for n in range(4)
    ]
    found = judge(*ranks)
    assert (found.bound, found.slowest) == ("data", None)
    assert found.advice == "Training waits for data 52% of the time. advice 3"
    silent = judge(*(rank(n, seconds={"fetch": 5.0, "forward": 1.0, "backward": 3.0}) for n in range(4)))
    assert "reports no metrics" in silent.advice


@pytest.mark.parametrize(
    ("seconds", "bound", "words"),
    [
        ({"checkpoint": 4.0, "backward": 2.0}, "checkpoint", "40% of the time goes into checkpoint: raise checkpoint"),
        ({"evaluate": 2.0, "evaluation fetch": 1.0}, "evaluate", "30% of the time goes into evaluate"),
        ({"reduce": 3.0, "backward": 2.0}, "other ranks", "waits 30% of the time in reduce, for the network"),
    ],
)
def test_what_takes_the_time_beside_computing_is_named(seconds: dict[str, float], bound: str, words: str) -> None:
    found = judge(*(rank(n, seconds=seconds) for n in range(4)))
    assert found.bound == bound
    assert words in found.advice


def test_idle_devices_that_do_not_wait_for_data_are_the_hosts_fault() -> None:
    found = judge(*(rank(n, gpu={"utilisation": 0.3}) for n in range(4)))
    assert found.bound == "host"
    assert "busy 30% of the time" in found.advice
    assert judge(*(rank(n, gpu={"utilisation": 0.97}) for n in range(4))).bound == "devices"


def test_a_rank_that_stays_in_fetch_is_blamed_and_those_that_wait_for_it_are_not() -> None:
    late = rank(
        1, steps=0, phase="fetch", phase_s=61.0, doing="chunk at byte 0 of train-3.tar", advice="Move it nearer."
    )
    others = [rank(n, steps=0, phase="reduce", phase_s=62.0) for n in (0, 2, 3)]
    found = judge(late, *others)
    assert found.bound == "data"
    told = "Rank 1 on node0 has been in fetch for 61 s, waiting for chunk at byte 0 of train-3.tar. Move it nearer."
    assert found.advice == told
    assert judge(*others, rank(1, steps=0, phase="reduce", phase_s=60.0)).bound == "other ranks"


def test_silent_and_missing_ranks_are_told_and_judge_nobody() -> None:
    ranks = [rank(0), rank(1, time=NOW_S - 30.0, seconds={"forward": 9.0}), rank(3, state="ended", time=NOW_S - 500.0)]
    found = survey(ranks, NOW_S)
    assert (found.stale, found.missing, found.slowest, found.bound) == ({1: 30.0}, [2], None, "rank")
    assert found.advice.startswith("Rank 1 has been silent for 30 s")
    many = survey([rank(n, 20, time=NOW_S - 9.0) for n in range(10)], NOW_S)
    assert many.advice.startswith("Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more have been silent for 9 s")
    assert survey(ranks, NOW_S, silent_s={0: 0.0, 1: 0.2, 3: 0.0}).stale == {}  # another host's clock goes wrong
    slowly = rank(0, time=NOW_S - 30.0, every_s=16.0)  # thousands of ranks write rarely
    assert survey([slowly], NOW_S).stale == {}
    assert survey([], NOW_S).world_size == 0
