"""A training script that is ended in the ways the tests name: ``endings_script.py MODE SOURCE [name=value ...]``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from row_functions import rest_a_moment

from penstock import DistributedDataLoader
from penstock.storage import MemoryStore


def fill_store(source: str) -> MemoryStore:
    store = MemoryStore("mem://slow/data")
    for path in Path(source).iterdir():
        store.put(path.name, path.read_bytes())
    return store


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def count_children() -> int:
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def pause() -> None:
    """Stop all processes of the group, so that the test may look at them, until it continues them."""
    os.killpg(0, signal.SIGSTOP)


def main() -> None:
    mode, source, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    latency_s = options.pop("latency_s", None)
    store = None
    if latency_s is not None:
        store = fill_store(source)
        source = store.url
    loader = DistributedDataLoader(source, **({"batch_size": 16, "transform": rest_a_moment} | options))
    if store is not None:
        store.slow_down(latency_s=latency_s)
    if mode == "close":
        waiting = threading.Thread(target=lambda: next(iter(loader), None), daemon=True)
        threading.excepthook = lambda args: None
        waiting.start()
        while count_children() < options.get("processes", 0):
            time.sleep(0.02)
        time.sleep(1.0)
        say(waiting=True)
        pause()
        started = time.monotonic()
        loader.close()
        say(took_s=time.monotonic() - started)
        waiting.join(5)
        return
    for epoch in range(1000):
        for step, batch in enumerate(loader):
            if step == 1 and epoch == 0:
                say(batch=len(batch["txt"]), process=os.getpid(), state=loader.state_dict())
                pause()
                if mode == "exit":
                    return
                if mode == "raise":
                    raise ArithmeticError("in the user's loop")


if __name__ == "__main__":
    main()
