"""Place of a run's checkpoints: a folder that all ranks share, or an object store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...storage.store import ByteRange

Needs = Callable[[Path], Mapping[str, Sequence[ByteRange]]]
"""Given a checkpoint's folder that has its metadata, which bytes of which files this rank will read."""

Alone = Callable[[], AbstractContextManager[None]]
"""Announces work that each rank does by itself, for as long as it takes."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Training as it was after ``step``: the copied state, ``extra`` as JSON, and the metric if it was measured."""

    step: int
    state: dict[str, Any]
    extra_text: str
    metric: float | None


class Place(Protocol):
    """Holds the checkpoints of one run at a time. Making one is a collective, and so are its methods but ``close``.

    What fails on one rank raises a CheckpointError on all.
    """

    @property
    def name(self) -> str:
        """The folder or URL, without credentials; for messages."""
        ...

    def name_of(self, step: int) -> str:
        """The path or URL of one checkpoint."""
        ...

    def take_notes(self) -> list[str]:
        """Return, once, what people should know of how the place was found."""
        ...

    def check_room(self, checkpoint_bytes: int, *, kept: int) -> None:
        """Raise a CheckpointRoomError if the checkpoints that are to be kept cannot be held."""
        ...

    def list_steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        ...

    def verify(self, step: int, needs: Needs, alone: Alone) -> tuple[Path, str]:
        """The folder where this rank reads a checkpoint, and what is damaged of it, the same on every rank; or ''.

        The folder may hold only the part to read, and lives until ``release``.
        """
        ...

    def delete_after(self, step: int, *, spare: Collection[int]) -> list[int]:
        """Delete the checkpoints of later steps but for those in ``spare``, and return their steps."""
        ...

    def release(self) -> None:
        """Give up what ``verify`` brought here; not a collective."""
        ...

    def write(self, saved: Snapshot, *, damaged: set[int], note: Callable[[str], None]) -> None:
        """Write a checkpoint whole or not at all, then delete what need not stay.

        ``damaged`` are the steps that retention leaves alone; ``note`` gets a sentence for what is unusual and stops
        nothing.
        """
        ...

    def close(self) -> None:
        """Let other runs have the place; closing twice is allowed."""
        ...
