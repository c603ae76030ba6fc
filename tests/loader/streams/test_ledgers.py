"""What ranks know of epochs and tell each other, while other threads go on or stop."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from penstock.loader.errors import LoaderClosedError
from penstock.loader.ranks import channel
from penstock.loader.ranks.channel import MemoryChannel, wait_for_ranks
from penstock.loader.ranks.ledger import Ledgers
from penstock.loader.streams.packing import _Packing


def test_epochs_are_forgotten_while_others_are_opened() -> None:
    ledgers, epochs = Ledgers(MemoryChannel, rank=0, world_size=2), 3000
    opened = threading.Event()

    def open_ahead() -> None:
        try:
            for epoch in range(epochs):
                ledgers.open("order", 1, epoch)
        finally:
            opened.set()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as if there were a busy core for each thread
    try:
        thread = threading.Thread(target=open_ahead)
        thread.start()
        while not opened.is_set():
            ledgers.forget(0)
        thread.join()
    finally:
        sys.setswitchinterval(usual)
    ledgers.forget(epochs - 1)
    assert [ledgers.find("order", epoch) is None for epoch in (0, epochs - 2, epochs - 1)] == [True, True, False]


def test_a_wait_looks_less_and_less_often_until_it_comes_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(channel.time, "sleep", pauses.append)
    wait_for_ranks(lambda: len(pauses) == 30, lambda: len(pauses) == 20, lambda: False)
    assert pauses[:20] == sorted(pauses[:20])
    assert pauses[19] == pauses[29] > 10 * pauses[20]


def test_packing_that_is_stopped_is_no_error_of_a_sample() -> None:
    stopped: Future[Any] = Future()
    stopped.set_exception(LoaderClosedError("the loader was closed while a batch was being decoded"))
    nothing: Any = None
    one = np.arange(1)
    with pytest.raises(LoaderClosedError):
        _Packing(nothing, one, np.array([0, 1]), nothing, [stopped]).result()


def test_a_long_wait_for_other_ranks_is_told_once_with_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "LONG_S", 0.0)
    looks: list[int] = []
    wait_for_ranks(lambda: len(looks) == 5, lambda: looks.append(1), lambda: False, "what rank 3 keeps of its lanes")
    told = [record.message for record in caplog.records if "what rank 3 keeps of its lanes" in record.message]
    assert len(told) == 1
