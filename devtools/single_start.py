"""One start in this process, as JSON: ``python -P single_start.py CASE URL OPTIONS``, for start.

A script, not a module of the package: it starts whatever penstock is on the path, older ones too.
"""

from __future__ import annotations

import argparse
import builtins
import json
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import torch  # noqa: F401 - every process of a run has it

SEQ_LEN = 2048
_BATCH = {"raw": 64, "tokens": 8, "rows": 4096}


class Imports:
    """Notes how long statements that import something took, by thread, the outermost alone, once ``watch`` is called.

    Mutable state: those noted, and how deep each thread is in imports.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[str, str, float, float]] = []  # what, by which thread, from when until when
        self._depth = threading.local()
        self._import = builtins.__import__

    def watch(self) -> None:
        """Note imports from now on."""
        builtins.__import__ = self._timed

    def _timed(self, name: str, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self._depth, "now", 0)
        self._depth.now = depth + 1
        known, started = len(sys.modules), time.perf_counter()
        try:
            return self._import(name, *args, **kwargs)
        finally:
            self._depth.now = depth
            if not depth and len(sys.modules) > known:
                text = f"import {name or '.'} ({len(sys.modules) - known} modules)"
                self.noted.append((text, threading.current_thread().name, started, time.perf_counter()))


def start_once(case: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the import of the loader to its first batch, the modules that are there then, and what took long.

    ``events`` are (what, by which thread, from, until) in seconds since the loader was imported.
    """
    imports = Imports()
    times, cpus = [time.perf_counter()], [time.process_time()]

    def note() -> None:
        times.append(time.perf_counter())
        cpus.append(time.process_time())

    import pyarrow.parquet  # noqa: F401

    note()
    from penstock import DistributedDataLoader, TokensFormat

    note()
    imports.watch()
    kind: dict[str, Any] = {"format": TokensFormat(seq_len=SEQ_LEN)} if case == "tokens" else {"decode": None}
    with DistributedDataLoader(url, batch_size=_BATCH[case], **kind, **options) as loader:
        note()
        from penstock.storage.observability.timeline import Timeline

        timeline = Timeline()
        loader.record_timeline(timeline)
        next(iter(loader))
        note()
        events = [*imports.noted, *((name, owner.name, start, stop) for owner, name, start, stop in timeline._spans)]
        ours, theirs = (
            sum((name.partition(".")[0] == "penstock") is own for name in sys.modules) for own in (True, False)
        )
    pyarrow_s, import_s, construction_s, first_batch_s = (stop - start for start, stop in pairwise(times))
    _, import_cpu_s, construction_cpu_s, first_batch_cpu_s = (stop - start for start, stop in pairwise(cpus))
    until = times[-1]
    return {
        "pyarrow_s": pyarrow_s,
        "import_s": import_s,
        "modules": ours,
        "foreign_modules": theirs,
        "construction_s": construction_s,
        "first_batch_s": first_batch_s,
        "total_s": import_s + construction_s + first_batch_s,
        "cpu_s": import_cpu_s + construction_cpu_s + first_batch_cpu_s,
        "after_imports_cpu_s": construction_cpu_s + first_batch_cpu_s,
        "after_imports_s": construction_s + first_batch_s,
        "events": [
            (name, owner, start - times[2], min(stop, until) - times[2])
            for name, owner, start, stop in sorted(events, key=lambda event: event[2])
            if start < until
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "single_start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", metavar="CASE", choices=list(_BATCH), help='"raw", "tokens" or "rows"')
    parser.add_argument("url", metavar="URL", help="of a data set")
    parser.add_argument("options", metavar="OPTIONS", type=json.loads, help="arguments of the loader, as JSON")
    print(json.dumps(start_once(**vars(parser.parse_args()))))
