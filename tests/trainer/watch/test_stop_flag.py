"""Signals become one decision of all ranks, and are given back."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from launch_ranks import run_ranks

from penstock.trainer.ranks.world import World
from penstock.trainer.watch.stop_flag import StopFlag, read_restarts


def _stop_at_a_signal(world: World, agree_now: bool) -> int:
    with StopFlag(world) as flag:
        for step in range(20):
            if world.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if flag.agree_now() if agree_now else flag.agree():
                assert (flag.reason == "SIGTERM") == (world.rank == 1)
                break
    return step


@pytest.mark.parametrize(("agree_now", "stops_at"), [(False, 6), (True, 5)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(agree_now: bool, stops_at: int) -> None:
    assert run_ranks(_stop_at_a_signal, 3, agree_now) == [stops_at] * 3


def test_signals_are_given_back_and_a_second_interrupt_interrupts() -> None:
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    flag = StopFlag(world)
    assert not flag.agree()
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.agree()
    assert flag.agree_now()
    assert flag.reason == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.close()
    flag.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_restarts_are_read_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS"):
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)
    assert (read_restarts().count, read_restarts().limit) == (0, 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "5")
    assert (read_restarts().run_id, read_restarts().count, read_restarts().limit) == ("night", 2, 5)
