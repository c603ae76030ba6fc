"""Checkpoints that can be trusted: sharded, written behind training, atomic, checksummed, and resumed from the newest
that verifies, on any number of ranks and at any zero stage.

The shards are what torch.distributed.checkpoint writes, so its tools read them too. Its metadata is a pickle: checksums
detect damage, not malice, so load only checkpoints from sources that you trust.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from ..errors import CheckpointError, CheckpointRoomError, TrainerConfigError
from ..ranks.control_group import ControlGroup
from ..ranks.world import World
from .config import CheckpointConfig
from .folder import (
    EXTRA_NAME,
    find_damage,
    list_steps,
    probe_folder,
    read_manifest,
    remove_leftovers,
    step_folder,
)
from .lock import FolderLock
from .room import check_room
from .state import estimate_bytes, export_safetensors, gather_state, restore_rank_state, restore_state
from .writer import CheckpointWriter, Snapshot

__all__ = ["CheckpointConfig", "Checkpointer", "export_safetensors"]

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores training; making, saving, loading and closing are collectives of all ranks.

    All mutable state: the lock on the folder (rank 0's), the staging buffers, the one save that may be under way with
    its thread and error, the steps known to be damaged, and the notes. A save first copies the state, after which
    training may continue; then a thread writes it: each rank its shards, rank 0 the manifest with the checksum of every
    file, then the rename that makes it valid.

    Raises:
        CheckpointError: the folder is read-only, full, of another run, or not the same one on every rank.
    """

    def __init__(self, config: CheckpointConfig, world: World) -> None:
        self.config = config
        self.folder = Path(config.folder).absolute()
        self.passed_over: dict[int, str] = {}
        self.changed_settings: list[str] = []
        if config.keep_best and config.best is None:
            raise TrainerConfigError(
                f"checkpoint.keep_best={config.keep_best} does not know which end of the metric is good; say "
                "checkpoint.best='max' or 'min'"
            )
        self._world = world
        self._control = ControlGroup(world)
        self._writer = CheckpointWriter(config, world, self._control)
        on_device = world.device.type != "cpu"
        self._stager = DefaultStager(StagingOptions(on_device, False, False, on_device))
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._current_step: int | None = None
        self._closed = False
        self.entered: Callable[[str], None] = lambda phase: None
        self._lock: FolderLock | None = None
        self._notes: list[str] = []
        try:
            self._open_folder()
        except CheckpointError:
            self._closed = True
            self._release()
            raise

    def check_room(self, model: nn.Module) -> None:
        """Raise a CheckpointRoomError, on every rank, if the disk cannot hold the checkpoints that are to be kept."""
        one_bytes, kept = estimate_bytes(model), self.config.keep_last + self.config.keep_best
        self._control.decide("no room", lambda: check_room(self.folder, one_bytes, kept=kept))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        *,
        blocking: bool = False,
        metric: float | None = None,
        rank_state: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Save training as it is after ``step``; return when the state is copied, or with ``blocking`` when written.

        ``extra`` is JSON, the same on every rank and for any world (loader, schedule, scaler); rank 0's is kept.
        ``rank_state`` holds tensors of this rank alone, which are restored only in a world of the same size. A save
        that is under way is waited for first. Saving the step that was saved or loaded last does nothing, unless there
        is a metric to add; returns whether there was something to save, and nothing has failed so far.

        On a full disk the oldest checkpoints go, and the save is tried again. If that does not help, a save that is not
        ``blocking`` leaves a note, so that training can go on.

        Raises:
            CheckpointError: the state cannot be written, or the save before this one failed.
        """
        self._settle()
        if step == self._current_step and metric is None:
            return False
        if step < 0:
            raise CheckpointError(f"step={step} cannot be saved; count steps from 0")
        try:
            extra_text = json.dumps(extra)
        except (TypeError, ValueError) as exc:
            raise CheckpointError(
                f"extra cannot be written as JSON: {exc}; keep tensors in model or rank_state"
            ) from exc
        state = gather_state(model, optimizer, rank=self._world.rank, rank_state=rank_state)
        staged = self._stager.stage(state)
        assert isinstance(staged, dict), "the stager was told to copy at once"
        self._thread = threading.Thread(
            target=self._write, args=(step, staged, extra_text, metric), name="penstock-checkpoint", daemon=True
        )
        self._thread.start()
        if blocking:
            self.wait()
        return blocking or self.config.background or self._settle()

    def load_newest(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest checkpoint that verifies and return its step and extra; None if there are no checkpoints.

        Damaged ones are passed over, with a warning that names the file; ``passed_over`` keeps what was wrong by step.
        The optimizer's settings stay as they are now; ``changed_settings`` says what the checkpoint had otherwise.

        Raises:
            CheckpointMismatchError: that checkpoint is of another model or optimizer.
            CheckpointError: there are checkpoints and none verifies.
        """
        self.wait()
        steps = self._control.decide("no checkpoints can be listed", lambda: list_steps(self.folder))
        for step in steps:
            damage = self._verify(step)
            if damage:
                self.passed_over[step] = damage
                if self._world.rank == 0:
                    logger.warning(
                        "checkpoint %s is damaged and passed over: %s", step_folder(self.folder, step), damage
                    )
                continue
            extra = self._restore(step, model, optimizer)
            self._current_step = step
            return step, extra
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} verifies; newest: step {steps[0]}, "
                f"{self.passed_over[steps[0]]}. Give another folder to start from scratch"
            )
        return None

    def load_rank_state(self) -> dict[str, Tensor]:
        """Return this rank's ``rank_state`` of the checkpoint loaded last; empty if another world size saved it.

        This is not a collective.
        """
        if self._current_step is None:
            return {}
        folder = step_folder(self.folder, self._current_step)
        same_world = read_manifest(folder).world_size == self._world.world_size
        return restore_rank_state(folder, self._world.rank) if same_world else {}

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed; the folder has no trace of it, and training may continue.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _settle(self) -> bool:
        """Wait like ``wait``, but only note it if the disk was full; returns whether all is well."""
        try:
            self.wait()
        except CheckpointRoomError as exc:
            self._notes.append(f"{exc}; training goes on, and the next save tries again")
            return False
        return True

    def close(self) -> None:
        """Finish the save that is under way and release thread, buffers and group; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._release()

    def take_notes(self) -> list[str]:
        """Return, once, what people should know and what stops nothing."""
        return [self._notes.pop(0) for _ in range(len(self._notes))]

    def _release(self) -> None:
        self._stager.close()
        self._control.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_folder(self) -> None:
        """Probe, lock and tidy the folder, and check that all ranks see the same one, by a token that rank 0 writes."""
        token = self.folder / ".probe-ranks.tmp"

        def prepare() -> list[str]:
            probe_folder(self.folder)
            self._lock = FolderLock(self.folder)
            if self._lock.note:
                self._notes.append(self._lock.note)
            leftovers = remove_leftovers(self.folder)
            token.touch()
            return leftovers

        leftovers = self._control.decide("checkpoints cannot be kept", prepare)
        seen = self._control.gather("the folder cannot be looked at", token.exists)
        self._control.decide("the probe cannot be removed", lambda: token.unlink(missing_ok=True))
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(False)} does not see what rank 0 writes to {self.folder}; "
                "give a folder on a file system that all nodes share"
            )
        if leftovers and self._world.rank == 0:
            logger.info("removed what unfinished saves left in %s: %s", self.folder, ", ".join(leftovers))

    def _write(self, step: int, staged: dict[str, Any], extra_text: str, metric: float | None) -> None:
        try:
            saved = Snapshot(step=step, state=staged, extra_text=extra_text, metric=metric)
            self._writer.write(saved, damaged=set(self.passed_over) - {step}, note=self._notes.append)
            self._current_step = step
            self.passed_over.pop(step, None)
        except CheckpointError as exc:
            self._failure = exc
        except Exception as exc:  # noqa: BLE001 - the thread's owner raises it, from wait()
            failure = CheckpointError(f"step {step} could not be saved to {self.folder}: {exc}")
            failure.__cause__ = exc
            self._failure = failure

    def _verify(self, step: int) -> str:
        """Check the files of a checkpoint, a share on each rank, and return what is wrong, the same on every rank."""
        folder = step_folder(self.folder, step)

        @self._reading
        def check() -> list[str]:
            try:
                manifest = read_manifest(folder)
            except CheckpointError as exc:
                return [str(exc)]
            return find_damage(folder, manifest, share=self._world.rank, shares=self._world.world_size)

        shares = self._control.gather(f"{folder} cannot be verified", check)
        return "; ".join(dict.fromkeys(damage for share in shares for damage in share))

    def _restore(self, step: int, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        folder = step_folder(self.folder, step)
        what = f"{folder} cannot be loaded"
        restore = self._reading(lambda: restore_state(folder, model, optimizer))
        self.changed_settings = self._control.gather(what, restore)[0]
        return self._control.decide(what, lambda: json.loads((folder / EXTRA_NAME).read_bytes()))

    def _reading(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work, announced as one that this rank does alone."""

        def announced() -> T:
            self.entered("read checkpoint")
            try:
                return work()
            finally:
                self.entered("resume")

        return announced
