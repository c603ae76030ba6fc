"""What is signed for ranges that are received without obstore, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from scripted_server import DATA, PROXIES, S3, Server, answer, part, serving

from penstock.storage import (
    ByteRange,
    open_client,
)
from penstock.storage.clients.direct import DirectReads, times_of
from penstock.storage.options import configure


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def open_signed(server: Server, sign: Callable[[str], str]) -> DirectReads:
    return DirectReads(sign, server.url, configure("s3", S3)[1])


def read(reads: DirectReads, start: int, stop: int) -> bytes:
    times = times_of(configure("s3", S3)[1])
    found = reads.get("x", {"range": (start, stop)}, times)
    assert found is not None
    with closing(found):
        return bytes(found.bytes())


def test_a_signature_is_used_again_until_its_credentials_are_refused_then_signed_anew_once() -> None:
    signed: list[str] = []
    good = {"1", "2"}

    def check(head: str) -> bytes:
        number = head.partition("?sig=")[2].partition(" ")[0]
        return part(head) if number in good else answer("403 Forbidden", b"<Code>ExpiredToken</Code>")

    with serving(check) as server:

        def sign(path: str) -> str:
            signed.append(path)
            return f"{server.url}/{path}?sig={len(signed)}"

        with closing(open_signed(server, sign)) as reads:
            assert [read(reads, 4, 9) for _ in range(3)] == [DATA[4:9]] * 3
            assert len(signed) == 1
            good.discard("1")
            assert read(reads, 4, 9) == DATA[4:9]
            assert len(signed) == 2
            good.clear()
            with pytest.raises(OSError, match="403 <Code>ExpiredToken"):
                read(reads, 4, 9)
    assert (len(signed), len(server.heads)) == (3, 7)


def test_a_signature_is_renewed_before_its_credentials_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.clients.direct._SIGNATURE_S", 0.0)
    signed: list[str] = []
    with serving(part) as server:

        def sign(path: str) -> str:
            signed.append(path)
            return f"{server.url}/{path}?sig={len(signed)}"

        with closing(open_signed(server, sign)) as reads:
            for _ in range(3):
                read(reads, 0, 5)
    assert len(signed) == 3


def test_what_is_signed_for_another_host_is_left_to_obstore() -> None:
    with serving(part) as server, closing(open_signed(server, lambda path: f"https://elsewhere/{path}?sig=1")) as reads:
        assert reads.get("x", {"range": (0, 5)}, times_of(configure("s3", S3)[1])) is None
    assert server.heads == []


def test_tokens_and_who_pays_are_in_what_is_signed() -> None:
    with serving(part) as server:
        options = {**S3, "endpoint": server.url, "token": "the-session-token", "request_payer": "true"}
        with closing(open_client("s3://bucket/folder", options)) as store:
            assert store.get("x", ByteRange(0, 5)) == DATA[:5]
    target = server.heads[0].split()[1]
    assert target.startswith("/bucket/folder/x?")
    assert "X-Amz-Security-Token=the-session-token" in target
    assert "x-amz-request-payer=requester" in target
