"""Faults of the network and of the server: what a proxy before the real one can do."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.storage import open_client

from .case import Case
from .data import put_data
from .faults import Answer, BlackHole, Corrupt, Delay, Drip, Fault, Reset, Silence, Truncate
from .proxy import Request
from .stage import Stage

WARM = 40  # requests before a fault, after which latencies are known
ENDLESS = 1 << 30
_NAME = "store.penstock.test"
FORBIDDEN = Answer(
    status=403,
    headers=(("Content-Type", "application/xml"),),
    body=b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
)
REVOKED = Answer(
    status=403,
    headers=(("Content-Type", "application/xml"),),
    body=b"<?xml version='1.0'?><Error><Code>InvalidAccessKeyId</Code><Message>The AWS Access Key Id you provided "
    b"does not exist in our records.</Message></Error>",
)
ABSENT = Answer(
    status=404,
    headers=(("Content-Type", "application/xml"),),
    body=b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message>"
    b"</Error>",
)


class Weather:
    """Spoils a share of the requests for shards, from request ``start`` to ``stop``. Asked under the proxy's lock.

    Mutable state: how many requests came, and how many answers were spoiled.
    """

    def __init__(
        self,
        *faults: Fault,
        share: float = 1.0,
        start: int = 0,
        stop: int = ENDLESS,
        times: int = ENDLESS,
        path: str = ".tar",
        seed: int = 0,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self._faults = faults
        self._share = share
        self._start, self._stop = start, stop
        self._times = times
        self._path = path
        self._draw = random.Random(seed)
        self._began = began
        self.seen = self.spoiled = 0

    def __call__(self, request: Request) -> Fault | None:
        if request.method != "GET" or self._path not in request.path:
            return None
        self.seen += 1
        if not self._start <= self.seen - 1 < self._stop or self.spoiled >= self._times:
            return None
        if self._draw.random() >= self._share:
            return None
        if not self.spoiled:
            self._began()
        self.spoiled += 1
        return self._draw.choice(self._faults)


def choose(*faults: Fault, **how: Any) -> Callable[[Stage], Mapping[str, Any]]:
    """Let the proxy spoil requests of the whole run, from before its start on."""

    def prepare(stage: Stage) -> Mapping[str, Any]:
        stage.proxy.choose(Weather(*faults, seed=stage.seed, began=stage.mark, **how))
        return {}

    return prepare


def nothing(stage: Stage) -> None:
    """Do nothing: the fault is active already."""


def take_away(seconds: float) -> Callable[[Stage], None]:
    """The server refuses all connections for some seconds, after some batches."""

    def inject(stage: Stage) -> None:
        stage.run.wait_for(20)
        stage.mark()
        stage.proxy.pause()
        time.sleep(seconds)
        stage.proxy.resume()

    return inject


def take_away_for_good(stage: Stage) -> None:
    stage.run.wait_for(20)
    stage.mark()
    stage.proxy.pause()


def use_copy(stage: Stage) -> Mapping[str, Any]:
    """A copy of the data set of the case's own."""
    stage.url = f"{stage.url}-{stage.folder.name}"
    put_data(stage.url, stage.direct)
    return {}


def replace_objects(stage: Stage) -> None:
    """Put other bytes in the place of every shard, in mid-epoch; once there was an error, put back what was there."""
    stage.run.wait_for(20)
    client = open_client(stage.url, stage.direct)
    stage.mark()
    originals = {info.key: bytes(client.get(info.key)) for info in client.list() if info.key.endswith(".tar")}
    for key, data in originals.items():
        client.put(key, data[:5000] + bytes(200) + data[5200:])
    stage.run.join(120)
    put_data(stage.url, stage.direct)


def with_own_hosts(stage: Stage) -> Mapping[str, Any]:
    """The proxy under a name that is in a hosts file of the job's own, in a mount namespace of its own."""
    hosts = stage.folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {_NAME}\n")
    port = urlsplit(stage.proxy.url).port
    return {
        "prefix": ["unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"],
        "options": {**stage.options, "endpoint": f"http://{_NAME}:{port}"},
    }


def lose_address(stage: Stage) -> None:
    """The name is gone for some seconds, and so are the connections that were open."""
    stage.run.wait_for(20)
    stage.mark()
    hosts = stage.folder / "hosts"
    before = hosts.read_text()
    hosts.write_text("127.0.0.1 localhost\n")
    stage.proxy.pause()
    stage.proxy.resume()
    time.sleep(8)
    hosts.write_text(before)


def needs_namespace() -> str:
    return (
        "" if os.geteuid() == 0 and shutil.which("unshare") else "needs root and unshare, for a hosts file of its own"
    )


def unknown_host(stage: Stage) -> Mapping[str, Any]:
    return {"options": {**stage.options, "endpoint": "http://store.invalid:9000"}}


def refused_host(stage: Stage) -> Mapping[str, Any]:
    return {"options": {**stage.options, "endpoint": "http://127.0.0.1:9"}}


def wrong_key(stage: Stage) -> Mapping[str, Any]:
    return {"options": {**stage.options, "secret_key": "wrong"}}


_PAUSED = "tries last 8 or 12 s, then twice that"
_SLOW: tuple[tuple[str, str, Fault], ...] = (
    ("drip", "bodies at 1 kB/s", Drip(bytes_per_s=1000, after_bytes=1000)),
    ("silence", "bodies that stop midway", Silence(after_bytes=1000)),
    ("black-hole", "no answer", BlackHole()),
)


def _slow_cases() -> list[Case]:
    """Each slow response at three times: before latencies are known, after, and without second requests."""
    cases = []
    for suffix, when, how, job in (
        ("", "10%", {"share": 0.1, "start": WARM}, {}),
        ("-at-first", "the first 3 requests", {"times": 3}, {}),
        ("-unhedged", "5%, no second requests left", {"share": 0.05}, {"spend_hedges": True}),
    ):
        for name, words, fault in _SLOW:
            cases.append(
                Case(
                    name=name + suffix,
                    group="network",
                    fault=f"{words}: {when}",
                    sees=_PAUSED if job else "",
                    prepare=choose(fault, **how),
                    inject=nothing,
                    job=job,
                    gap_s=60 if job else 30,  # two in a row, whose times are 8 or 12 s, and then twice that
                    timeout_s=600,
                )
            )
    return cases


def _storm(name: str, words: str, *faults: Fault, share: float) -> Case:
    return Case(
        name=name, group="network", fault=words, prepare=choose(*faults, share=share), inject=nothing,
        timeout_s=300,
    )  # fmt: skip


NETWORK_CASES: list[Case] = [
    Case(name="none", group="none", fault="none", inject=nothing),
    _storm("reset", "connection reset in mid-body: 20%", Reset(after_bytes=5000), share=0.2),
    _storm("truncated", "connection closed in mid-body: 20%", Truncate(after_bytes=5000), share=0.2),
    _storm("late", "answers 2 s late: 5%", Delay(seconds=2), share=0.05),
    _storm("wrong-bytes", "wrong bytes of the right length: 10%",
           Corrupt(after_bytes=3000), share=0.1),
    *[
        _storm(f"storm-{status}", f"status {status}: 30%", Answer(status=status), share=0.3)
        for status in (429, 500, 503)
    ],
    *_slow_cases(),
    Case(name="refused-3-s", group="network", fault="connections reset and refused for 3 s",
         inject=take_away(3)),
    Case(name="outage-20-s", group="network", fault="connections reset and refused for 20 s",
         sees="a warning", inject=take_away(20), gap_s=45),
    Case(name="gone-for-good", group="network", fault="connections reset and refused for ever",
         sees="names the host and how long it was tried", inject=take_away_for_good,
         errors=("StoreUnreachableError", "StoreUnavailableError"), error_s=150, gap_s=150, timeout_s=250),
    Case(name="refused-at-start", group="network", fault="nothing listens at the endpoint",
         sees="says: check the URL", prepare=refused_host, inject=nothing,
         errors=("StoreUnreachableError",), error_s=15),
    Case(name="dns-failure", group="network", fault="the host has no address",
         sees="says: check the URL", prepare=unknown_host, inject=nothing,
         errors=("StoreUnreachableError",), error_s=15),
    Case(name="dns-lost-8-s", group="network", fault="the host loses its address for 8 s",
         prepare=with_own_hosts, inject=lose_address, skip=needs_namespace),
    Case(name="wrong-key", group="network", fault="a wrong secret key from the start",
         prepare=wrong_key, inject=nothing, errors=("AccessDeniedError",), error_s=10),
    Case(name="forbidden-once", group="network", fault="one 403 in mid-epoch",
         prepare=choose(FORBIDDEN, start=WARM, times=1), inject=nothing),
    Case(name="forbidden", group="network", fault="403 for one shard, for good",
         sees="names the shard", prepare=choose(FORBIDDEN, path="000007.tar"), inject=nothing,
         errors=("AccessDeniedError",), names="000007.tar"),
    Case(name="credentials-revoked", group="network", fault="403 InvalidAccessKeyId for all",
         prepare=choose(REVOKED, start=WARM),
         inject=nothing, errors=("AccessDeniedError",)),
    Case(name="absent-once", group="network", fault="one 404 in mid-epoch",
         prepare=choose(ABSENT, start=WARM, times=1), inject=nothing),
    Case(name="absent", group="network", fault="404 for one shard, for good", sees="names the shard",
         prepare=choose(ABSENT, path="000007.tar"), inject=nothing, errors=("NotFoundError",), names="000007.tar"),
    Case(name="wrong-bytes-for-good", group="network", fault="wrong bytes for one shard, for good",
         sees="names the shard; `max_bad_chunks=` replaces its samples",
         prepare=choose(Corrupt(after_bytes=3000), path="000007.tar"), inject=nothing,
         errors=("ChecksumError",), names="000007.tar"),
    Case(name="replaced", group="network", fault="every shard replaced by another of its length",
         sees="names the shard", prepare=use_copy,
         inject=replace_objects, errors=("ObjectChangedError",)),
]  # fmt: skip
