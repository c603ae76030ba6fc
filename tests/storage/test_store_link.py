"""Connections to a process group's store break when its host is silent, and not when TCP gives up."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from penstock.storage.store_link import SILENT_S, clone_store, is_cut_off, is_here, limit_silence, place_of


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def limit_of(store: dist.Store) -> int:
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    descriptor = int(repr(inner).partition("client=TCPClient(SocketImpl(fd=")[2].partition(",")[0])
    with socket.socket(fileno=os.dup(descriptor)) as link:
        return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_tcp_store_and_its_clones_have_the_limit_whatever_is_before_them() -> None:
    store = open_store()
    assert limit_of(store) == 0, "torch sets one now: look whether this is still needed"
    behind = dist.PrefixStore("a", dist.PrefixStore("b", store))
    clone = clone_store(behind)
    assert [limit_of(each) for each in (store, clone)] == [1000 * SILENT_S] * 2
    limit_silence(clone, 5.0)
    assert limit_of(clone) == 5000
    clone.set("key", "value")
    assert behind.get("key") == b"value"


def test_stores_of_other_kinds_are_left_alone() -> None:
    store = dist.HashStore()
    limit_silence(store)
    clone = clone_store(store)
    clone.set("key", "value")
    assert store.get("key") == b"value"
    assert place_of(store) == ""
    assert is_here(store)


def test_a_store_is_placed() -> None:
    class There:
        host, port = "192.0.2.7", 29400  # an address that no machine has

    class Unknown:
        host, port = "no-such-host.invalid", 29400

    store = open_store()
    assert place_of(dist.PrefixStore("a", store)) == f"127.0.0.1:{store.port}"
    assert is_here(store)
    assert place_of(There()) == "192.0.2.7:29400"
    assert not is_here(There())
    assert is_here(Unknown())


def test_a_host_that_is_silent_is_told_from_a_process_that_ended() -> None:
    assert is_cut_off(dist.DistNetworkError("Connection timed out"))
    assert is_cut_off(dist.DistNetworkError("failed to connect: No route to host"))
    assert not is_cut_off(dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."))
