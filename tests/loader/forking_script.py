"""A script that forks while it iterates: ``forking_script.py SOURCE AUDIT_DIR PROCESSES``."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from row_functions import rest_a_moment

from penstock import DistributedDataLoader
from penstock.loader import ForkedLoaderError


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def answer(use: Callable[[], Any]) -> str:
    try:
        use()
    except ForkedLoaderError as exc:
        return f"refused: {exc}"
    return "done"


def be_the_child(loader: DistributedDataLoader[Any], batches: Any) -> None:
    signal.alarm(60)  # a child that hangs dies, and the parent tells
    state = loader.state_dict()
    uses: dict[str, Callable[[], Any]] = {
        "next": lambda: next(batches),
        "iter": lambda: next(iter(loader)),
        "peek": loader.peek,
        "dataset": lambda: loader.dataset[0],
        "metrics": loader.metrics,
        "activity": loader.activity,
        "set_epoch": lambda: loader.set_epoch(5),
        "set_shares": lambda: loader.set_shares(None),
        "load_state_dict": lambda: loader.load_state_dict(state),
        "close": loader.close,
    }
    say(**{name: answer(use) for name, use in uses.items()})


def main() -> None:
    source, audit_dir, processes = sys.argv[1:]
    loader = DistributedDataLoader(
        source, batch_size=16, processes=int(processes), transform=rest_a_moment, audit_dir=audit_dir, last_batch="pad"
    )
    batches = iter(loader)
    next(batches)
    # What Python says of it from 3.12 on is what is tested.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    if os.fork() == 0:
        be_the_child(loader, batches)
        sys.exit(0)  # runs what is registered for the interpreter's exit
    _, status = os.wait()
    say(child=os.waitstatus_to_exitcode(status))
    say(batches=sum(1 for _ in batches))
    loader.close()


if __name__ == "__main__":
    main()
