"""Requests of the ranks of a node: places that all share, against an equal part of them for each rank.

Ranks read ranges from a server that answers late; a round plays both in turn. Ranks need the same, or one of them eight
times as much as each other, or the server refuses what is beyond half of the places.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.benchmarks.child_arguments import take_mode
from penstock.benchmarks.machine import describe_machine
from penstock.storage import ByteRange, RetryConfig, open_store

from .arguments import OptionalPath, parse_config

PLACES, _THREADS, _BYTES = 64, 64, 1 << 15


@dataclass(frozen=True, kw_only=True)
class Config:
    """Numbers of ranks and rounds, and where the results go."""

    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 6
    requests: int = 1200
    """Of each rank, where all need the same."""
    delay_s: float = 0.05
    out: OptionalPath = None
    """Write the results here as JSON, too."""


class Late:
    """A store of one object that answers ranges late, and refuses those beyond ``most`` at once."""

    def __init__(self, delay_s: float, most: int) -> None:
        self._delay_s, self._most, self._running, self.refused, self.port = delay_s, most, 0, 0, 0
        self._listening = threading.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            self._running += 1
            is_refused = self._running > self._most
            await asyncio.sleep(self._delay_s / 10 if is_refused else self._delay_s)
            self._running -= 1
            self.refused += is_refused
            found = re.search(r"bytes=(\d+)-(\d+)", head)
            start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, _BYTES)
            lines = "HTTP/1.1 503 Slow Down\r\nContent-Length: 0" if is_refused else (
                f'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\nContent-Length: {stop - start}\r\n'
                f"Content-Range: bytes {start}-{stop - 1}/{_BYTES}"
            )  # fmt: skip
            writer.write(lines.encode() + b"\r\n\r\n" + (b"" if is_refused else bytes(stop - start)))

    async def serve(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._answer(reader, writer)
            except (OSError, EOFError):
                writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._listening.set()
            await server.serve_forever()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread; gives the URL."""
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()
        self._listening.wait(30)
        yield f"http://127.0.0.1:{self.port}"


def read(url: str, requests: int, max_running: int) -> None:
    """Read as a rank does, from when a line comes in, and print the seconds."""
    store = open_store(url, retry=RetryConfig(max_running=max_running))
    with ThreadPoolExecutor(_THREADS) as pool:
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        for data in pool.map(lambda _: store.get("x", ByteRange(0, _BYTES)), range(requests)):
            assert len(data) == _BYTES
        print(time.perf_counter() - started, flush=True)


def measure(loads: list[int], delay_s: float, most: int, *, is_shared: bool) -> dict[str, float]:
    """Seconds until the last rank has what it needs, and how often the server refused."""
    late = Late(delay_s, most)
    with late.running() as url, tempfile.TemporaryDirectory() as folder:
        places = {"XDG_RUNTIME_DIR": folder, "PENSTOCK_NODE_REQUESTS": str(PLACES if is_shared else 0)}
        most_of_rank = PLACES if is_shared else PLACES // len(loads)
        command = [sys.executable, "-m", "devtools.node_requests", "--rank", url]
        ranks = [
            subprocess.Popen(
                [*command, str(requests), str(most_of_rank)],
                env={**os.environ, **places},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for requests in loads
        ]
        for rank in ranks:  # all begin when the last one is ready
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        seconds = [float(rank.communicate()[0]) for rank in ranks]
    return {"seconds": max(seconds), "refused": late.refused}


def main(config: Config) -> None:
    rows = []
    for ranks in config.ranks:
        n, unlimited = config.requests, 1 << 30
        for name, loads, most in (
            ("all need the same", [n] * ranks, unlimited),
            ("one needs 8 times as much", [2 * n] + [n // 4] * (ranks - 1), unlimited),
            ("all need the same, 503 beyond 32", [n // 2] * ranks, PLACES // 2),
        ):
            rounds = [
                {kind: measure(loads, config.delay_s, most, is_shared=kind == "shared") for kind in ("shared", "parts")}
                for _ in range(config.rounds)
            ]
            ratios = [one["parts"]["seconds"] / one["shared"]["seconds"] for one in rounds]
            row: dict[str, Any] = {"ranks": ranks, "case": name, "parts_of_shared_seconds": ratios, "rounds": rounds}
            rows.append(row)
            refused = {kind: sum(one[kind]["refused"] for one in rounds) for kind in ("shared", "parts")}
            print(
                f"{ranks} ranks, {name}: {statistics.median(ratios):.2f} of the seconds; refused {refused}", flush=True
            )
    if config.out is not None:
        command = shlex.join(["python", "-m", "devtools", "node_requests", *sys.argv[1:]])
        config.out.write_text(json.dumps({"command": command, "machine": describe_machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    found = take_mode("--rank", (str, int, int), "python -m devtools node_requests")
    if found is not None:
        read(*found)
    else:
        main(parse_config(Config, __doc__))
