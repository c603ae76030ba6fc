"""A mixture of one source against its data set alone: the batches of both, where they are equal and where not.

They differ by the seed of the order, which a mixture draws from a source's name, and by the ends of epochs: those of a
mixture are laid end to end, and a batch may hold samples of two epochs of its source. ``SEED`` is what a mixture of
"rows" with the loader's seed of 0 orders it by, so that a data set alone has the same order with it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from audits import drop_thirds
from choices import encode, is_even

from penstock import DistributedDataLoader, Mixture, Packing, Source

SEED = 8665909427416697025
BATCHES = 30
WORLD_SIZE = 2

PACKING = Packing(seq_len=16, field="text", tokenizer=encode, buffer_size=8)
STREAMS = {"filtered", "filtered, partial", "dropped by a transform", "packed"}
KINDS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "in order": {"shuffle": False},
    "partial": {"last_batch": "partial"},
    "lanes and window": {"lanes": 4, "window": 2, "piece": 0},
    "whole epochs": {"batch_size": 5},
    "filtered": {"keep": is_even},
    "filtered, partial": {"keep": is_even, "last_batch": "partial"},
    "dropped by a transform": {"transform": drop_thirds, "may_drop": True},
    "packed": {"packing": PACKING},
}


def record(data: Path, kind: str) -> dict[str, Any]:
    """Digests of two epochs of both loaders, and how many batches from the first on are equal."""
    url = str(data / "rows")
    loaders: dict[str, tuple[Any, dict[str, Any]]] = {
        "mixture": (Mixture({"rows": Source(url)}), {}),
        "alone": (url, {}),
        "alone, seeded as in the mixture": (url, {"seed": SEED}),
    }
    worlds = (1,) if kind in STREAMS else (1, WORLD_SIZE)
    found: dict[str, Any] = {}
    for world_size in worlds:
        for rank in range(world_size):
            batches = {
                name: _batches(source, {**KINDS[kind], **options}, rank, world_size)
                for name, (source, options) in loaders.items()
            }
            mixed = batches.pop("mixture")
            found[f"rank {rank} of {world_size}"] = {
                "mixture": _digest(mixed),
                **{name: f"{_digest(own)}, equal for {_count_equal(mixed, own)}" for name, own in batches.items()},
            }
    return found


def _batches(source: Any, options: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
    """The fields of each batch of two epochs, but for the name of its source."""
    given = {"batch_size": 3, "memory_limit": "256MiB", **options}
    found = []
    with DistributedDataLoader(source, rank=rank, world_size=world_size, **given) as loader:
        for _ in range(2):
            for batch in itertools.islice(loader, BATCHES):
                values = {name: value for name, value in batch.items() if name != "__source__"}
                found.append(json.dumps(values, default=lambda value: value.tolist(), sort_keys=True))
            found.append("the epoch ends")
    return found


def _count_equal(some: Sequence[str], others: Sequence[str]) -> int:
    pairs = itertools.zip_longest(some, others)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _digest(batches: Sequence[str]) -> str:
    return f"{len(batches)} {hashlib.blake2b(json.dumps(batches).encode(), digest_size=12).hexdigest()}"
