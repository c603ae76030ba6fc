"""Signals become a flag, and are given back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.trainer import TrainerConfigError
from penstock.trainer.watch.stop_flag import StopFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_its_name_is_the_reason(number: signal.Signals) -> None:
    with StopFlag() as flag:
        assert flag.reason is None
        os.kill(os.getpid(), number)
        assert flag.reason == number.name


def test_handlers_are_restored_and_a_second_interrupt_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    flag = StopFlag()
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.reason == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.close()
    flag.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_flag_in_another_thread_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(TrainerConfigError, match="main thread only"):
        pool.submit(StopFlag).result()
