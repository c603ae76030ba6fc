"""The audit's logs of loaders of several kinds: of a whole epoch, and of one that is resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from choices import Places, is_even, one, packed, pair
from data import fail_at_seven
from streams_ranks import ThreadRanks

from penstock import Mixture, Source, Subset

WORLDS = (1, 2)
BATCHES_BEFORE = 3  # of the epoch that is resumed
MOST_BATCHES = 40  # of an epoch; some mixtures are endless

_VARIES = {"process", "started_ns", "launch"}
_RECORDS = {
    0x70656E73746F636B: "batch",
    0x70656E736B697070: "skip",
    0x70656E64726F7070: "drop",
    0x70656E7362736978: "size",
    0x70656E73746B6472: "filtered",
    0x70656E73746B656E: "end",
    0x70656E7374626164: "bad",
    0x70656E7374727066: "replaced",
    0x70656E736C6F6164: "load",
}


def drop_thirds(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if sample["n"] % 3 == 0 else sample


def rows(places: Places) -> str:
    return places.of("rows")


def one_keeps(places: Places) -> Mixture:
    return Mixture({"rows": Source(places.of("rows"), keep=is_even), "more": Source(places.of("more"), weight=2)})


PACKING = packed()(None)  # type: ignore[arg-type]
TRIES = {"transform": fail_at_seven, "max_errors": 9}
KINDS: dict[str, tuple[Callable[[Places], Any], Mapping[str, Any]]] = {
    "plain": (rows, {}),
    "in order": (rows, {"shuffle": False}),
    "padded": (rows, {"last_batch": "pad", "batch_size": 7}),
    "partial": (rows, {"last_batch": "partial", "batch_size": 7}),
    "subset": (rows, {"subset": Subset.share(0.2, 0.9)}),
    "cost": (rows, {"cost": "tokens"}),
    "tokens a batch": (rows, {"batch_tokens": 120}),
    "filtered": (rows, {"keep": is_even}),
    "filtered subset": (rows, {"keep": is_even, "subset": Subset.share(0.2, 0.9)}),
    "dropped by a transform": (rows, {"transform": drop_thirds, "may_drop": True}),
    "packed": (rows, {"packing": PACKING}),
    "skipped": (rows, {"on_error": "skip", **TRIES}),
    "replaced": (rows, {"on_error": "replace", **TRIES}),
    "mixture": (pair(), {}),
    "mixture to the end of all": (pair(stop="all_exhausted"), {"last_batch": "partial"}),
    "endless mixture": (pair(stop="never"), {}),
    "mixture of one": (one(), {}),
    "mixture that keeps": (one_keeps, {}),
    "mixture of one that keeps": (one(keep=lambda _: is_even), {}),
    "packed mixture": (pair(), {"packing": PACKING}),
}


def record(data: Path, folder: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    """The logs of two runs of all ranks, by run and rank: an epoch and the begin of the next, and the rest of that."""
    make, options = KINDS[kind]
    places = Places(data, folder / "unused")
    size = {} if "batch_tokens" in options else {"batch_size": 3}
    found = []
    state = None
    for run in ("first", "resumed"):
        place = folder / run
        given = {"audit_dir": place, "memory_limit": "256MiB", **size, **options}
        results = ThreadRanks(world_size, make(places), **given).run(partial(use, state=state))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        state = results[0]
        logs = [decode(path) for path in place.glob("*.deliveries")]
        found += sorted(logs, key=lambda log: log["header"]["rank"])
    return found


def use(loader: Any, *, state: Mapping[str, Any] | None) -> Any:
    """Go through an epoch, and begin the next; or end that from a state. Returns the state then."""
    if state is not None:
        loader.load_state_dict(state)
    for count in (MOST_BATCHES, BATCHES_BEFORE) if state is None else (MOST_BATCHES,):
        for _ in itertools.islice(loader, count):
            pass
    return loader.state_dict()


def decode(path: Path) -> dict[str, Any]:
    """A log's header, but for what differs from run to run, and its records: kind, epoch, start, stop, samples."""
    head, _, body = path.read_bytes().partition(b"\n")
    words = np.frombuffer(body, "<i8")
    records = []
    at = 0
    while at < len(words):
        magic, epoch, start, stop, count = words[at : at + 5].tolist()
        records.append([_RECORDS[magic], epoch, start, stop, words[at + 5 : at + 5 + count].tolist()])
        at += 5 + count
    header = {name: value for name, value in json.loads(head).items() if name not in _VARIES}
    return {"header": header, "records": records}
