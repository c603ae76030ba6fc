"""Signals become a flag, and are given back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.trainer import TrainerConfigError
from penstock.trainer.watch.stop_flag import StopFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_its_name_is_the_reason(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with StopFlag() as flag:
            assert flag.reason is None
            os.kill(os.getpid(), number)
            assert flag.reason == number.name
    finally:
        signal.signal(number, before)


def test_handlers_are_restored_and_a_second_interrupt_interrupts() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    flag = StopFlag()
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.reason == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.close()
    flag.close()
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None], ids=["nohup", "own"])
def test_a_hangup_that_is_ignored_or_handled_is_left_alone(handler: Any) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopFlag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert flag.reason is None
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_flag_in_another_thread_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(TrainerConfigError, match="main thread only"):
        pool.submit(StopFlag).result()
