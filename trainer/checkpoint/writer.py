"""Write a checkpoint to a shared disk: each rank writes its shards, rank 0 seals and publishes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ...storage.errors import StorageError
from ..errors import CheckpointError, CheckpointRoomError, CheckpointUploadError
from ..ranks.control_group import ControlGroup
from ..ranks.world import World
from .folder import (
    EXTRA_NAME,
    METADATA_NAME,
    FileSeal,
    Manifest,
    describe_left,
    hide_folder,
    prune_folder,
    publish_folder,
    remove_leftovers,
    seal_file,
    step_folder,
    write_manifest,
    write_text_durably,
)
from .free_space import delete_oldest, describe_full_disk, is_full_disk, naming_a_full_disk
from .place import Snapshot
from .retention import Retention
from .traffic import open_writer


class CheckpointWriter:
    """Writes snapshots into a folder and deletes what need not stay; writing is a collective of all ranks."""

    def __init__(self, folder: Path, retention: Retention, world: World, control: ControlGroup) -> None:
        self._retention = retention
        self._folder = folder
        self._world = world
        self._control = control
        self._noted: list[str] = []  # what could not be deleted, as it was noted last

    def write(self, saved: Snapshot, *, damaged: set[int], note: Callable[[str], None]) -> None:
        """Write a checkpoint; while the disk is full, delete what retention would delete next, and try again.

        ``damaged`` are the steps that retention leaves alone; ``note`` gets a sentence for each deletion before its
        time, and for what cannot be deleted.

        Raises:
            CheckpointError: on every rank; the folder has no trace of it.
        """

        def make_room() -> int | None:
            return delete_oldest(self._folder, self._retention, spare={saved.step, *damaged})

        while True:
            try:
                self._write_once(saved)
            except CheckpointRoomError:
                gone = self._control.decide(f"no room can be made in {self._folder}", make_room)
                if gone is None:
                    raise
                note(
                    f"the disk is full: the checkpoint of step {gone} was deleted from {self._folder} to make room for "
                    f"step {saved.step}"
                )
            else:
                break
        left = self._control.decide(f"nothing can be deleted from {self._folder}", lambda: self._tidy(damaged))
        if left and left != self._noted:
            note(describe_left(self._folder, left))
        self._noted = left

    def _tidy(self, damaged: set[int]) -> list[str]:
        """Delete what need not stay. The checkpoint is already written, so failures here are only noted."""
        try:
            failures = prune_folder(self._folder, self._retention, damaged=damaged)
            return failures + remove_leftovers(self._folder)[1]
        except OSError as exc:  # the folder cannot be listed, or what a killed save replaced not be brought back
            return [str(exc)]

    def _write_once(self, saved: Snapshot) -> None:
        final = step_folder(self._folder, saved.step)
        partial = final.with_name(f"{final.name}.tmp")

        @naming_a_full_disk()
        def prepare() -> None:
            if partial.exists():
                shutil.rmtree(hide_folder(partial), ignore_errors=True)
            partial.mkdir()
            write_text_durably(partial / EXTRA_NAME, saved.extra_text)

        @naming_a_full_disk()
        def publish() -> None:
            rank0_files = {name: seal_file(partial / name) for name in (EXTRA_NAME, METADATA_NAME)}
            files = {name: seal for share in seals for name, seal in share.items()} | rank0_files
            write_manifest(
                partial,
                Manifest(
                    step=saved.step,
                    world_size=self._world.world_size,
                    metric=saved.metric,
                    torch_version=str(torch.__version__),
                    files=files,
                    measure=self._retention.measure,
                ),
            )
            publish_folder(partial, final)

        def seal_shards() -> dict[str, FileSeal]:
            return {path.name: seal_file(path) for path in partial.glob(f"__{self._world.rank}_*")}

        what = f"step {saved.step} could not be saved to {self._folder}"
        try:
            self._control.decide(what, prepare)
            save_shards(what, saved.state, open_writer(partial), self._control)
            seals = self._control.gather(what, seal_shards)
            self._control.decide(what, publish)
        except Exception:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def save_shards(what: str, state: dict[str, Any], writer: FileSystemWriter, control: ControlGroup) -> None:
    """Write each rank's shards and rank 0's metadata; a collective.

    Raises:
        CheckpointError: on every rank, beginning with ``what`` and naming the ranks that failed; of a kind of its own
            for a full disk and for a store that does not take it.
    """
    try:
        save(state, storage_writer=writer, process_group=control.group)
    except CheckpointException as exc:  # a BaseException, which holds the errors by rank
        for rank, (error, _) in exc.failures.items():
            if is_full_disk(error):
                raise CheckpointRoomError(f"{what}: rank {rank}: {describe_full_disk(error)}") from exc
            if isinstance(error, StorageError):
                raise CheckpointUploadError(f"{what}: rank {rank}: {error}") from exc
        causes = "; ".join(f"rank {rank}: {type(one[0]).__name__}: {one[0]}" for rank, one in exc.failures.items())
        raise CheckpointError(f"{what}: {causes}") from exc
