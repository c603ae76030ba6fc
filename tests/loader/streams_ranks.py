"""ThreadRanks as threads of one process, which tell each other what they find through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import TCPStore

from penstock import DistributedDataLoader
from penstock.loader.ranks import channel as channels
from penstock.loader.ranks.channel import Channel, ChannelAddress, MemoryChannel


class ThreadRanks:
    """``world_size`` loaders of one data set, made and used by one thread each."""

    def __init__(self, world_size: int, source: Any, **options: Any) -> None:
        self.world_size = world_size
        self._make = lambda rank: DistributedDataLoader(source, rank=rank, world_size=world_size, **options)

    def run(self, work: Callable[[DistributedDataLoader[Any]], Any]) -> list[Any]:
        """What ``work`` returns for each rank's loader, or what it raises."""
        results: list[Any] = [None] * self.world_size
        channel = MemoryChannel()
        opened, located = channels.open_channel, channels.locate_channel
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of those with processes of their own

        def shared(identity: str, world_size: int) -> Channel:
            return channel

        def locate(identity: str, world_size: int) -> ChannelAddress:
            return ChannelAddress(host="127.0.0.1", port=store.port, prefix="ranks")

        def run_rank(rank: int) -> None:
            try:
                with self._make(rank) as loader:
                    results[rank] = work(loader)
            except Exception as exc:  # noqa: BLE001 - judged by the test
                results[rank] = exc

        channels.open_channel, channels.locate_channel = shared, locate
        try:
            threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.world_size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(200)
            assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        finally:
            channels.open_channel, channels.locate_channel = opened, located
        return results
