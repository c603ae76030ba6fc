"""Checkpoints below a URL of an object store, written and read by any number of nodes that share no disk."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ....storage.checks import where
from ....storage.errors import NotFoundError, StorageError
from ....storage.resolve import open_store
from ...errors import CheckpointError, CheckpointUploadError
from ...ranks.control_group import ControlGroup
from ...ranks.world import World
from ..config import CheckpointConfig
from ..folder import EXTRA_NAME, Manifest
from ..place import Alone, Needs, Snapshot
from ..retention import Retention
from ..writer import save_shards
from .download import fetch
from .layout import (
    PROBES,
    Stored,
    StoredFile,
    find_missing,
    list_stored,
    prune_stored,
    read_stored,
    remove_leftovers,
    remove_replaced,
    remove_stored,
    write_stored,
)
from .lock import StoreLock
from .staging import Staging
from .upload import Upload, open_upload_writer

logger = logging.getLogger(__name__)


class Bucket:
    """A `Place`: steps are manifests, each naming parts of files that were there before it.

    Mutable state: the lock, which is rank 0's, where something was fetched to, whether a save left something behind.

    Raises:
        CheckpointError: the store cannot be read, written or deleted from, is of another run, or not the same one on
            every rank.
    """

    def __init__(self, config: CheckpointConfig, retention: Retention, world: World, control: ControlGroup) -> None:
        self._retention = retention
        self._world = world
        self._control = control
        self._lock: StoreLock | None = None
        self._staging: Staging | None = None
        self._is_untidy = False
        self._notes: list[str] = []

        @_in_words(CheckpointError)
        def open_it() -> None:
            self._store = open_store(config.folder)

        control.gather("checkpoints cannot be kept", open_it)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._store.url

    def name_of(self, step: int) -> str:
        return where(self._store.url, f"step-{step}")

    def take_notes(self) -> list[str]:
        return [self._notes.pop(0) for _ in range(len(self._notes))]

    def check_room(self, checkpoint_bytes: int, *, kept: int) -> None:
        """Do nothing: a store does not show its free space."""

    def list_steps(self) -> list[int]:
        @_in_words(CheckpointError)
        def list_all() -> list[int]:
            return list_stored(self._store)

        return self._control.decide("no checkpoints can be listed", list_all)

    def verify(self, step: int, needs: Needs, alone: Alone) -> tuple[Path, str]:
        """Fetch what this rank will read into a folder of its own, part by part against the manifest's checksums."""
        self.release()
        name = self.name_of(step)

        @_in_words(CheckpointError)
        def look() -> Stored | str:
            try:
                stored = read_stored(self._store, step)
            except CheckpointError as exc:
                return str(exc)
            return "; ".join(find_missing(self._store, stored)[:3]) or stored

        @_in_words(CheckpointError)
        def bring() -> list[str]:
            assert isinstance(found, Stored)
            self._staging = Staging()
            folder = self._staging.folder
            try:
                with alone():
                    return fetch(self._store, found, needs, folder)
            except CheckpointError as exc:  # people know it by the name of the store
                raise type(exc)(str(exc).replace(str(folder), name)) from exc

        found = self._control.decide(f"{name} cannot be verified", look)
        if isinstance(found, str):
            return Path(), found
        shares = self._control.gather(f"{name} cannot be loaded", bring)
        assert self._staging is not None, "all ranks have one, or an error"
        return self._staging.folder, "; ".join(dict.fromkeys(damage for share in shares for damage in share[:3]))

    def delete_after(self, step: int, *, spare: Collection[int]) -> list[int]:
        @_in_words(CheckpointError)
        def delete() -> list[int]:
            self._confirm()
            gone = [later for later in list_stored(self._store) if later > step and later not in spare]
            for later in gone:
                remove_stored(self._store, later)
            return gone

        return self._control.decide(f"checkpoints cannot be deleted from {self.name}", delete)

    def release(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def write(self, saved: Snapshot, *, damaged: set[int], note: Callable[[str], None]) -> None:
        """Send all parts, then the manifest; a save that fails before that deletes what it sent."""
        what = f"step {saved.step} could not be saved to {self.name}"
        save_id = self._control.decide(what, self._begin_save)
        upload = Upload(self._store, saved.step, save_id)
        is_publishing = False
        try:
            self._control.decide(what, lambda: self._add_extra(upload, saved.extra_text))
            writer = open_upload_writer(upload, f"step-{saved.step}")
            save_shards(what, saved.state, writer, self._control)
            shares = self._control.gather(what, lambda: upload.files)
            files = {name: file for share in shares for name, file in share.items()}
            is_publishing = True
            self._control.decide(what, lambda: self._publish(saved, save_id, files))
        except Exception:
            self._is_untidy = True
            if not is_publishing:  # else the manifest may exist, although no answer came
                upload.remove()
            raise
        finally:
            upload.close()
        left = self._control.decide(what, lambda: self._tidy(saved.step, save_id, damaged))
        if left:
            note(left)

    def close(self) -> None:
        self.release()
        if self._lock is not None:
            self._lock.close()
        self._store.close()

    def _open(self) -> None:
        """Lock, tidy and probe: every rank reads what rank 0 writes, and writes; rank 0 deletes that."""

        @_in_words(CheckpointError)
        def prepare() -> tuple[str, list[str]]:
            self._lock = StoreLock(self._store)
            if self._lock.note:
                self._notes.append(self._lock.note)
            leftovers = remove_leftovers(self._store)
            token = secrets.token_hex(8)
            self._store.put(f"{PROBES}{token}", token.encode())
            return token, leftovers

        @_in_words(CheckpointError)
        def probe() -> bool:
            try:
                self._store.get(f"{PROBES}{token}")
            except NotFoundError:
                return False
            self._store.put(f"{PROBES}{token}-{self._world.rank}", b"")
            return True

        @_in_words(CheckpointError)
        def remove_probes() -> None:
            self._store.delete([f"{PROBES}{token}", *(f"{PROBES}{token}-{r}" for r in range(self._world.world_size))])

        token, leftovers = self._control.decide("checkpoints cannot be kept", prepare)
        seen = self._control.gather("checkpoints cannot be kept", probe)
        self._control.decide("checkpoints cannot be deleted", remove_probes)
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(False)} does not see what rank 0 writes to {self.name}; give a store that is the "
                "same one for all ranks"
            )
        if leftovers and self._world.rank == 0:
            logger.info("removed what unfinished saves left in %s: %s", self.name, ", ".join(leftovers))

    def _begin_save(self) -> str:
        self._confirm()
        return secrets.token_hex(4)

    def _add_extra(self, upload: Upload, text: str) -> None:
        with _in_words(CheckpointUploadError):
            upload.add_file(EXTRA_NAME, text.encode())

    def _confirm(self) -> None:
        assert self._lock is not None, "it is rank 0's"
        with _in_words(CheckpointUploadError):
            self._lock.confirm()

    def _publish(self, saved: Snapshot, save_id: str, files: dict[str, StoredFile]) -> None:
        manifest = Manifest(
            step=saved.step,
            world_size=self._world.world_size,
            metric=saved.metric,
            torch_version=str(torch.__version__),
            files={name: file.seal for name, file in files.items()},
            measure=self._retention.measure,
        )
        self._confirm()
        with _in_words(CheckpointUploadError):
            write_stored(self._store, manifest, save_id, files)

    def _tidy(self, step: int, save_id: str, damaged: set[int]) -> str | None:
        """Delete what need not stay; the checkpoint is written, so that what fails here is but noted."""
        try:
            self._confirm()
            remove_replaced(self._store, step, save_id)
            prune_stored(self._store, self._retention, damaged=damaged)
            if self._is_untidy:
                remove_leftovers(self._store)
                self._is_untidy = False
        except (StorageError, CheckpointUploadError) as exc:
            self._is_untidy = True
            return f"old checkpoints could not be deleted from {self.name}: {exc}; the next save tries again"
        return None


@contextmanager
def _in_words(kind: type[CheckpointError]) -> Iterator[None]:
    """Translate a store's errors into errors of checkpoints."""
    try:
        yield
    except StorageError as exc:
        raise kind(str(exc)) from exc
