"""Timeline of work by thread: spans kept while somebody records, written as a Chrome trace."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..files import AnyPath, write_output

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A thread of another process."""

    native_id: int
    name: str


_Span = tuple[threading.Thread | _Foreign, str, float, float]  # whose, what, and from when until when by perf_counter
MOST_SPANS = 200_000  # about 20 MB of memory, and 30 MB as JSON


class Timeline:
    """Spans of named work; any thread adds some. After ``most_spans`` more are counted and dropped.

    The format is that of chrome://tracing and Perfetto: "Trace Event Format", complete events ("X").
    """

    def __init__(self, most_spans: int = MOST_SPANS) -> None:
        self._spans: list[_Span] = []
        self._most = most_spans
        self._dropped = 0
        # Spans are timed by perf_counter, which has another zero in each process.
        self._zero_s = time.time() - time.perf_counter()
        self._began_s = time.perf_counter()

    def add(self, name: str, start_s: float, stop_s: float) -> None:
        """Add what this thread did from ``start_s`` to ``stop_s``, by ``time.perf_counter()``.

        What had begun before the recording is cut there.
        """
        if len(self._spans) >= self._most:
            self._dropped += 1
        elif stop_s >= self._began_s:
            self._spans.append((threading.current_thread(), name, max(start_s, self._began_s), stop_s))

    def spans(self) -> list[tuple[int, str, str, float, float]]:
        """List the spans as plain values: a thread's number and name, what, and from when until when."""
        return [(thread.native_id or 0, thread.name, what, start, stop) for thread, what, start, stop in self._spans]

    def absorb(self, spans: Iterable[tuple[int, str, str, float, float]]) -> None:
        """Add spans of another process of this machine, whose clock is the same."""
        threads: dict[int, _Foreign] = {}
        for number, name, what, start_s, stop_s in spans:
            if len(self._spans) >= self._most:
                self._dropped += 1
            elif stop_s >= self._began_s:
                thread = threads.setdefault(number, _Foreign(number, name))
                self._spans.append((thread, what, max(start_s, self._began_s), stop_s))

    def events(self, process: str) -> list[Event]:
        """The spans as events of a process of this name; times are microseconds since 1970."""
        pid, spans = os.getpid(), list(self._spans)
        threads = {thread.native_id or 0: thread.name for thread, *_ in spans}
        named: list[Event] = [_name("process_name", pid, 0, process)]
        named += [_name("thread_name", pid, thread, name) for thread, name in sorted(threads.items())]
        if self._dropped:
            named.append(_name("process_labels", pid, 0, f"{self._dropped} more spans were dropped"))
        return named + [
            {
                "ph": "X",
                "name": name,
                "cat": "penstock",
                "pid": pid,
                "tid": thread,
                # Both ends are rounded alike, to what a float of microseconds holds here, a quarter of one: spans
                # that overlapped by less than that would be dropped by trace viewers.
                "ts": self._us(start_s),
                "dur": self._us(stop_s) - self._us(start_s),
            }
            for thread, name, start_s, stop_s in _disentangle(spans)
        ]

    def _us(self, at_s: float) -> float:
        return (self._zero_s + at_s) * 1e6


def _disentangle(spans: Iterable[_Span]) -> Iterator[tuple[int, str, float, float]]:
    """(native thread, name, start, stop): a thread's spans lie beside or inside one another, as the format wants them.

    They come in the order in which they ended. A thread that had to wait before it could say so seems to end late.
    """
    last: dict[int, tuple[float, float]] = {}
    for owner, name, start_s, stop_s in spans:
        thread = owner.native_id or 0
        before_s, until_s = last.get(thread, (0.0, 0.0))
        if before_s < start_s < until_s:
            start_s = min(until_s, stop_s)
        last[thread] = (start_s, stop_s)
        yield thread, name, start_s, stop_s


def write_chrome_trace(path: AnyPath, events: Iterable[Event]) -> int:
    """Write events as one Chrome trace that begins at time 0; returns how many spans it has.

    Raises:
        OSError: the file cannot be written.
    """
    found = list(events)
    zero_us = min((event["ts"] for event in found if "ts" in event), default=0.0)
    moved = [{**event, "ts": event["ts"] - zero_us} if "ts" in event else event for event in found]
    text = json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"}, separators=(",", ":"))
    write_output(path, text.encode())
    return sum("ts" in event for event in found)


def _name(kind: str, pid: int, thread: int, name: str) -> Event:
    return {
        "ph": "M",
        "name": kind,
        "pid": pid,
        "tid": thread,
        "args": {"labels" if "labels" in kind else "name": name},
    }
