"""The network between hosts that are namespaces of this machine: a process that passes their frames on, or does not.

python -m devtools.faults.hosts.wire NAMESPACE,...

``hosts.py`` starts it and writes the weather to it.

Each namespace gets an Ethernet device whose other end this process holds. What it does to frames is the weather, one
JSON object a line on its standard input; at the end of the input the devices are gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.benchmarks.child_arguments import take_arguments

DEVICE = "net0"
NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 65536
_MAX_FRAMES = 100_000  # that are under way; more are lost, as in a router


class Weather:
    """Treatment of frames between two ends: pairs of (from, to) that are cut, a delay, and a share lost."""

    def __init__(self, cut: Any = (), delay_s: float = 0.0, loss: float = 0.0) -> None:
        self._cut = {(int(source), int(target)) for source, target in cut}
        self.delay_s = delay_s
        self._loss = loss
        self._draw = random.Random(0)

    def passes(self, source: int, target: int) -> bool:
        """Return whether a frame arrives."""
        return (source, target) not in self._cut and self._draw.random() >= self._loss


def open_end(namespace: str) -> int:
    """Make the device of a namespace; returns the descriptor of its other end."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        _enter(libc, there)
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TAP_WITHOUT_HEADER))
        finally:
            _enter(libc, own)
    finally:
        os.close(own)
        os.close(there)
    return end


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def pass_frames(ends: list[int], commands: int) -> None:
    """Pass frames between all ends until ``commands`` ends."""
    weather = Weather()
    under_way: list[tuple[float, int, int, bytes]] = []  # due at, number, to, frame
    numbers = itertools.count()
    place = {end: index for index, end in enumerate(ends)}
    text = b""
    while True:
        due_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([commands, *ends], [], [], due_s)
        if commands in ready:
            read = os.read(commands, 65536)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                weather = Weather(**json.loads(line))
        for end in ready:
            if end == commands:
                continue
            with suppress(BlockingIOError):
                frame = os.read(end, _FRAME_BYTES)
                source = place[end]
                for target in range(len(ends)):
                    if target != source and weather.passes(source, target) and len(under_way) < _MAX_FRAMES:
                        heapq.heappush(under_way, (time.monotonic() + weather.delay_s, next(numbers), target, frame))
        now_s = time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(under_way)
            with suppress(OSError):  # the device is down, or its queue is full
                os.write(ends[target], frame)


def encode_weather(weather: Mapping[str, Any]) -> bytes:
    """The line that tells a wire its weather."""
    return json.dumps(weather).encode() + b"\n"


def main() -> int:
    namespaces = take_arguments("NAMESPACE,...", "python -m devtools faults")[0]
    ends = [open_end(name) for name in namespaces.split(",")]
    print("ready", flush=True)
    pass_frames(ends, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
