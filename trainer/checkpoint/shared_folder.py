"""Checkpoints in a folder on a file system that all ranks share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import CheckpointError
from ..ranks.control_group import ControlGroup
from ..ranks.world import World
from .config import CheckpointConfig
from .folder import (
    describe_left,
    find_damage,
    hide_folder,
    list_steps,
    probe_folder,
    read_manifest,
    remove_leftovers,
    step_folder,
)
from .free_space import check_room
from .lock import FolderLock
from .place import Alone, Needs, Snapshot
from .retention import Retention
from .writer import CheckpointWriter

logger = logging.getLogger(__name__)


class SharedFolder:
    """A `Place`: steps are folders, written under another name and renamed. Mutable state: the lock, which is rank 0's.

    Raises:
        CheckpointError: the folder is read-only, full, of another run, or not the same one on every rank.
    """

    def __init__(self, config: CheckpointConfig, retention: Retention, world: World, control: ControlGroup) -> None:
        self.folder = Path(config.folder).absolute()
        self._world = world
        self._control = control
        self._writer = CheckpointWriter(self.folder, retention, world, control)
        self._lock: FolderLock | None = None
        self._notes: list[str] = []
        try:
            self._open()
        except CheckpointError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return str(self.folder)

    def name_of(self, step: int) -> str:
        return str(step_folder(self.folder, step))

    def take_notes(self) -> list[str]:
        return [self._notes.pop(0) for _ in range(len(self._notes))]

    def check_room(self, checkpoint_bytes: int, *, kept: int) -> None:
        self._control.decide("no room", lambda: check_room(self.folder, checkpoint_bytes, kept=kept))

    def list_steps(self) -> list[int]:
        return self._control.decide("no checkpoints can be listed", lambda: list_steps(self.folder))

    def verify(self, step: int, needs: Needs, alone: Alone) -> tuple[Path, str]:
        """Check all files, a share on each rank; what is read lies where it is."""
        folder = step_folder(self.folder, step)

        def check() -> list[str]:
            with alone():
                try:
                    manifest = read_manifest(folder)
                except CheckpointError as exc:
                    return [str(exc)]
                return find_damage(folder, manifest, share=self._world.rank, shares=self._world.world_size)

        shares = self._control.gather(f"{folder} cannot be verified", check)
        return folder, "; ".join(dict.fromkeys(damage for share in shares for damage in share))

    def delete_after(self, step: int, *, spare: Collection[int]) -> list[int]:
        def delete() -> tuple[list[int], list[str]]:
            gone = [later for later in list_steps(self.folder) if later > step and later not in spare]
            for later in gone:
                hide_folder(step_folder(self.folder, later))
            return gone, remove_leftovers(self.folder)[1]

        gone, failures = self._control.decide(f"checkpoints cannot be deleted from {self.folder}", delete)
        self._note_left(failures)
        return gone

    def release(self) -> None:
        """Do nothing: nothing was brought here."""

    def write(self, saved: Snapshot, *, damaged: set[int], note: Callable[[str], None]) -> None:
        self._writer.write(saved, damaged=damaged, note=note)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _note_left(self, failures: list[str]) -> None:
        if failures:
            self._notes.append(describe_left(self.folder, failures))

    def _open(self) -> None:
        """Probe, lock and tidy the folder, and check that all ranks see the same one, by a token that rank 0 writes."""
        token = self.folder / ".probe-ranks.tmp"

        def prepare() -> tuple[list[str], list[str]]:
            probe_folder(self.folder)
            self._lock = FolderLock(self.folder)
            if self._lock.note:
                self._notes.append(self._lock.note)
            leftovers = remove_leftovers(self.folder, with_probes=True)
            token.touch()
            return leftovers

        leftovers, failures = self._control.decide("checkpoints cannot be kept", prepare)
        self._note_left(failures)
        seen = self._control.gather("the folder cannot be looked at", token.exists)
        self._control.decide("the probe cannot be removed", lambda: token.unlink(missing_ok=True))
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(False)} does not see what rank 0 writes to {self.folder}; give a folder on a file "
                "system that all nodes share, or an object store"
            )
        if leftovers and self._world.rank == 0:
            logger.info("removed what unfinished saves left in %s: %s", self.folder, ", ".join(leftovers))
