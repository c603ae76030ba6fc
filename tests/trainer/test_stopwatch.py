"""The device's share of a phase is read when it is there, and nothing waits for it."""

from __future__ import annotations

import pytest
import torch

from penstock.trainer.stopwatch import DeviceClock, Stopwatch


class Device:
    """A device that works one second for each event, as far as it is told to have come."""

    def __init__(self) -> None:
        self.recorded = 0
        self.done = 0

    def make_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0

    def record(self) -> None:
        self._device.recorded += 1
        self.at = self._device.recorded

    def query(self) -> bool:
        return self.at <= self._device.done

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "a wait for the device"
        return 1000.0 * (end.at - self.at)


def test_phases_on_the_device_are_counted_once_it_is_through_with_them() -> None:
    device = Device()
    watch = Stopwatch(clock=DeviceClock(device.make_event))
    for name in ("fetch", "forward", "backward", "forward"):
        with watch.phase(name):
            pass
    host = dict(watch.seconds)
    assert watch.read() == host
    device.done = 3  # through with the first forward
    assert watch.read() == {**host, "forward": 1.0}
    device.done = device.recorded
    assert watch.read() == {**host, "forward": 2.0, "backward": 1.0}
    assert watch.seconds == host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_is_timed_where_the_host_is_not() -> None:
    watch = Stopwatch(clock=DeviceClock())
    matrix = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        with watch.phase("forward"):
            matrix @ matrix
    torch.cuda.synchronize()
    assert watch.read()["forward"] > 0
