"""The log that ranks tell each other by, in a process group's store and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from penstock.loader import DatasetError
from penstock.loader.ranks.channel import Channel, MemoryChannel, StoreChannel


@pytest.fixture(params=["tcp", "hash", "memory"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """Two ranks' ends of one channel."""
    if request.param == "memory":
        memory = MemoryChannel()
        yield memory, memory
        return
    tcp = request.param == "tcp"
    store: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if tcp else dist.HashStore()
    yield StoreChannel(store, "penstock/test"), StoreChannel(store, "penstock/test")


def test_every_message_is_read_once_in_one_order_by_all(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    sent = [bytes([number]) * (1 + 1000 * number) for number in range(5)]
    for number, message in enumerate(sent):
        (one if number % 2 else two).post("topic", message)
    one.post("another", b"\0")
    assert one.read("topic", 0) == two.read("topic", 0) == sent
    assert two.read("topic", 3) == sent[3:]
    assert two.read("topic", 5) == []


def test_a_message_that_is_on_its_way_holds_back_those_behind_it() -> None:
    store = dist.HashStore()
    channel = StoreChannel(store, "penstock/test")
    channel.post("topic", b"first")
    store.add("penstock/test/topic/count", 1)  # a rank that has a number, and has not sent yet
    channel.post("topic", b"third")
    assert channel.read("topic", 0) == [b"first"]
    store.set("penstock/test/topic/1", b"second")
    assert channel.read("topic", 1) == [b"second", b"third"]


def test_a_store_that_fails_is_an_error_that_says_who_hosts_it() -> None:
    class Gone:
        def add(self, *_: Any) -> int:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(DatasetError, match="rank 0, or torchrun's agent"):
        StoreChannel(Gone(), "penstock/test").read("topic", 0)
