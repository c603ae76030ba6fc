"""A loader's arguments, drawn at random, and what they make of the values of samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.loader import DistributedDataLoader, Keep, Mixture, Source

from .data import Known
from .functions import KeepInput, change_in_place, changed, drop_some, fail_for_some, join_in_place, keep_most
from .held import Value
from .place import Place

_KINDS = ("plain", "in place", "keeps", "fails", "drops", "collate", "drops and collates", "keep", "weights", "mixture")
_WHOLE = frozenset({"drops", "drops and collates", "keep"})  # drop samples, and so need all ranks
_SOME_COLUMNS = ["id", "f1", "i2", "wide", "blob", "lst"]


@dataclass(frozen=True)
class Settings:
    """One loader: ``source`` and the other arguments, and ``value``, what a field of a sample is in its batches."""

    kind: str
    known: Known
    arguments: dict[str, Any]
    stored: Value
    value: Value

    def open(self) -> DistributedDataLoader[Any]:
        arguments = dict(self.arguments)
        source = arguments.pop("source")
        if self.kind == "mixture":
            shard_format = arguments.pop("format", None)
            given = {} if shard_format is None else {"format": shard_format}
            source = Mixture({"one": Source(source, **given), "other": Source(source, weight=2.0, **given)})
        return DistributedDataLoader(source, **arguments)

    @property
    def kept_inputs(self) -> list[dict[str, Any]]:
        """Inputs that the transform kept."""
        transform = self.arguments.get("transform")
        return transform.kept if isinstance(transform, KeepInput) else []

    def __str__(self) -> str:
        hidden = ("source", "format", "weights", "storage_options")
        shown = {name: getattr(v, "__name__", v) for name, v in self.arguments.items() if name not in hidden}
        return f"{self.known.name}, {self.kind}: {shown}"


def draw_settings(place: Place, draw: random.Random, folder: Path) -> Settings:
    """``folder`` is for caches."""
    known = draw.choice(list(place.known.values()))
    kind = draw.choice(_KINDS)
    world = 1 if kind in _WHOLE else draw.choice([1, 1, 1, 2, 3, 4])
    rows = draw.choice([1, 3, 8, 16, 64, 200])
    is_decoded = known.name != "tar" or kind in ("fails", "drops", "drops and collates") or draw.random() < 0.5
    arguments: dict[str, Any] = {
        **place.arguments(known, draw),
        "with_ids": True,
        "rank": draw.randrange(world),
        "world_size": world,
        "global_batch_size": world * rows,
        "seed": draw.randrange(100),
        "memory_limit": draw.choice(["8MB", "14MB", "18MB", "30MB", "1GB"] if rows < 64 else ["18MB", "30MB", "1GB"]),
        "lanes": draw.choice([1, 2, 4, "auto"]),
        "window": draw.choice([1, 2, "auto"]),
        "piece": draw.choice([0, 0, "auto"]),
        "last_batch": "drop" if kind == "mixture" else draw.choice(["drop", "pad", "partial"]),
        "threads": draw.choice([1, 2, 4, "auto"]),
        "fetch_threads": draw.choice([1, 4, 16, "auto"]),
        "decode": "auto" if is_decoded else None,
        "raw": draw.choice(["bytes", "view", "view"]),
    }
    if kind not in ("mixture", "weights") and draw.random() < 0.15:
        arguments["shuffle"] = False
    if draw.random() < 0.25:
        arguments |= {"cache_dir": folder / "cache", "cache_limit": draw.choice(["4MB", "40MB"])}
    if kind in ("plain", "in place", "keeps") and known.name in ("parquet", "arrow") and draw.random() < 0.5:
        arguments["columns"] = _SOME_COLUMNS
    if kind in ("plain", "in place", "fails", "drops") and draw.random() < 0.1:
        arguments |= {"processes": 2, "raw": "bytes"}
    stored = known.value if is_decoded else known.stored
    more, value = _functions(kind, known, stored)
    return Settings(kind, known, arguments | more, stored, value)


def _functions(kind: str, known: Known, stored: Value) -> tuple[dict[str, Any], Value]:
    def once(name: str, sample_id: int) -> Any:
        return changed(stored(name, sample_id))

    def twice(name: str, sample_id: int) -> Any:
        return changed(once(name, sample_id))

    drops = {"transform": drop_some, "may_drop": True}
    made: dict[str, tuple[dict[str, Any], Value]] = {
        "in place": ({"transform": change_in_place}, once),
        "keeps": ({"transform": KeepInput()}, stored),
        "fails": ({"transform": fail_for_some, "on_error": "replace", "max_errors": 1_000_000}, once),
        "drops": (drops, once),
        "collate": ({"collate": join_in_place}, once),
        "drops and collates": ({**drops, "collate": join_in_place}, twice),
        "keep": ({"keep": keep_most if known.name != "tokens" else _keep_tokens()}, stored),
        "weights": ({"weights": 1 + np.arange(known.samples) % 3}, stored),
        "mixture": ({"transform": change_in_place}, once),
    }
    return made.get(kind, ({}, stored))


def _keep_tokens() -> Keep:
    odd: Callable[[Any], Any] = lambda columns: columns["tokens"][:, 0] % 3 != 0  # noqa: E731
    return Keep(["tokens"], odd)
