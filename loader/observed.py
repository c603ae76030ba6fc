"""What others may ask a loader while it runs, from any thread: its numbers, what it waits for, and a timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from typing import Any

from ..storage.files import check_output
from ..storage.telling.timeline import Timeline, write_chrome_trace
from .errors import ConfigError
from .metrics import LoaderMetrics
from .parts import Parts
from .run.resources import Resources
from .run.run import Passes

_RECORDING = threading.Lock()


class Observed:
    """A loader's methods for onlookers; all are cheap, and safe while another thread iterates."""

    _parts: Parts
    _passes: Passes
    _resources: Resources

    def metrics(self) -> LoaderMetrics:
        """What was done so far, where the time went, how full the queues are, and which stage limits the throughput.

        Also after ``close``. ``new.since(old)`` tells of the time between two of them. Of a mixture,
        ``MixtureMetrics``: also how far the run is in each source.
        """
        metrics = self._passes.counters.metrics(self._resources.levels(), self._resources.count_store())
        return metrics if self._parts.mixture is None else self._parts.mixture.add_progress(metrics)

    def activity(self) -> dict[str, Any]:
        """What the next batch is waiting for, for people to read; empty if a batch is ready or none was asked for.

        For example ``{"waiting_for": "chunk at byte 0 of train-3.tar", "since_s": 4.2}``. Cheap, and safe to call from
        any thread while another one iterates: a watchdog asks it why training has stopped.
        """
        return self._resources.activity()

    @contextmanager
    def trace(self, path: str | PathLike[str]) -> Iterator[None]:
        """Record what each of the loader's threads does inside the block, and write it to ``path`` as a Chrome trace.

        Open the file in https://ui.perfetto.dev. Record some seconds: after 200,000 spans no more are kept. A block
        that raises leaves a trace, too.

        Raises:
            ConfigError: the file cannot be written, or a trace is being recorded already.
        """
        timeline = Timeline()
        try:  # what cannot be written is told before the work, not after it
            check_output(path)
        except OSError as exc:
            raise _unwritable(path, exc) from exc
        self.record_timeline(timeline)
        try:
            yield
        except BaseException:
            self.record_timeline(None)
            with suppress(OSError):
                self._write_trace(path, timeline)
            raise
        self.record_timeline(None)
        try:
            self._write_trace(path, timeline)
        except OSError as exc:
            raise _unwritable(path, exc) from exc

    def _write_trace(self, path: str | PathLike[str], timeline: Timeline) -> None:
        write_chrome_trace(path, timeline.events(f"penstock rank {self._passes.share.rank}"))

    def record_timeline(self, timeline: Timeline | None) -> None:
        """Add the spans of all stages to ``timeline`` from now on; None ends that.

        Raises:
            ConfigError: another timeline is being recorded.
        """
        counters = self._passes.counters
        with _RECORDING:
            if timeline is not None and counters.timeline is not None:
                raise ConfigError("a trace of this loader is being recorded already; end that one first")
            counters.timeline = timeline


def _unwritable(path: str | PathLike[str], error: OSError) -> ConfigError:
    return ConfigError(f"trace({fspath(path)!r}) cannot be written ({error.strerror or error}); give a file that can")
