"""Contract of shard writers: take a stream of items, and return the bytes of one shard after another.

A stream is measured in units: samples, rows, or tokens. An item is one or more units, and a shard ends between two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...loader.dataset.manifest import Manifest

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes of a shard. ``stop``: the units in it and all before it; ``state``: what another writer needs to continue.

    ``hint`` is what the index of its format needs.
    """

    data: bytes
    stop: int
    state: Mapping[str, Any] = field(default_factory=dict)
    hint: Any = None


class ShardWriter(Protocol):
    """One format's writer. ``suffix`` ends the shards' names; ``takes_batches``: record batches may be items."""

    suffix: str
    takes_batches: bool
    added: int

    def add(self, item: Any) -> list[Shard]:
        """Take an item; returns the shards that it filled. Raises DatasetError where it cannot be written."""
        ...

    def finish(self) -> list[Shard]:
        """Finish with the remaining items as a last shard."""
        ...

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        """Go on after ``units`` units, from the ``state`` of their last shard."""
        ...

    def units(self, item: Any) -> int:
        """Number of units in an item."""
        ...

    def rest(self, item: Any, units: int) -> Any:
        """An item without its first units."""
        ...

    def samples(self) -> int:
        """Number of samples that readers must find in all shards."""
        ...

    def companions(self, manifest: Manifest) -> Mapping[str, bytes]:
        """Objects that readers of the format want beside the shards."""
        ...

    def notes(self) -> Sequence[str]:
        """Notes for the user about the written data."""
        ...


class SampleWriter:
    """The part of a writer whose units are samples."""

    takes_batches = False

    def __init__(self) -> None:
        self.added = 0

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        self.added = units

    def units(self, item: Any) -> int:
        return 1

    def rest(self, item: Any, units: int) -> Any:
        return item

    def samples(self) -> int:
        return self.added

    def companions(self, manifest: Manifest) -> Mapping[str, bytes]:
        return {}

    def notes(self) -> Sequence[str]:
        return ()
