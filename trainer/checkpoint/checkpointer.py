"""Checkpoints that can be trusted: sharded, written behind training, atomic and checksummed.

A run resumes from the newest that verifies, on any number of ranks and at any zero stage. The shards are those of
torch.distributed.checkpoint, so its tools read them too. Its metadata is a pickle: checksums detect damage, not malice,
so load only checkpoints from sources that you trust.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from ...storage.store import ByteRange
from ...storage.threads.interruptible import Thread
from ..errors import CheckpointError, CheckpointRoomError, CheckpointUploadError, TrainerConfigError
from ..parallel.pipeline.names import StageNames
from ..ranks.control_group import ControlGroup
from ..ranks.world import World
from .config import CheckpointConfig
from .folder import EXTRA_NAME, read_manifest
from .place import Place, Snapshot
from .remote.bucket import Bucket
from .retention import Retention
from .settings import Settings
from .shared_folder import SharedFolder
from .state import (
    Restored,
    estimate_bytes,
    find_needs,
    gather_state,
    restore_averages,
    restore_part,
    restore_rank_state,
    restore_state,
)

# Before 2.13 a stager forgot how to copy after its first use.
_STAGERS_STAY = torch.__version__ >= (2, 13)  # type: ignore[operator]

_CURE = (
    "Use mappings with text as keys, lists, text, numbers, True, False and None, in a loader's state_dict too, and "
    "turn them back where the state is loaded; keep tensors in model or rank_state"
)
logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores training; making, saving, loading and closing are collectives of all ranks.

    All mutable state: the place, the staging buffers, the one save that may be under way with its thread and error, the
    steps known to be damaged, what was loaded last, and the notes. A save first copies the state, after which training
    may continue; then a thread writes it: each rank its shards, rank 0 the manifest with the checksum of every file.
    The place, a shared folder or an object store, makes it valid all at once. ``metric`` is the name of what saves are
    measured by; ``stages`` are the names of a pipeline's rank.

    Raises:
        CheckpointError: the place cannot be written to, is of another run, or not the same one on every rank.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        world: World,
        metric: str | None = None,
        stages: StageNames | None = None,
    ) -> None:
        self.config = config
        self._retention = Retention.of(config, metric)
        self.passed_over: dict[int, str] = {}
        self.changed_settings: list[str] = []
        self.groups_then: tuple[tuple[int, ...], ...] = ()
        if config.keep_best and config.best is None:
            raise TrainerConfigError(
                f"checkpoint.keep_best={config.keep_best} does not know which end of the metric is good; say "
                "checkpoint.best='max' or 'min'"
            )
        self._world = world
        self._stages = stages
        self._control = ControlGroup(world)
        self._stager = self._make_stager()
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        self._current_step: int | None = None
        self._closed = False
        self.entered: Callable[[str], None] = lambda phase: None
        self._loaded_folder: Path | None = None
        self._notes: list[str] = []
        try:
            self._place: Place = (Bucket if config.is_remote else SharedFolder)(
                config, self._retention, world, self._control
            )
        except BaseException:
            self._closed = True
            self._stager.close()
            self._control.close()
            raise

    def _make_stager(self) -> DefaultStager:
        on_device = self._world.device.type != "cpu"
        return DefaultStager(StagingOptions(on_device, False, False, on_device))

    def check_room(self, model: nn.Module, more_bytes: int = 0) -> None:
        """Raise a CheckpointRoomError, on every rank, if the disk cannot hold the checkpoints that are to be kept.

        Each has ``more_bytes`` besides model and optimizer.
        """
        one_bytes, kept = estimate_bytes(model) + more_bytes, self.config.keep_last + self.config.keep_best
        self._place.check_room(one_bytes, kept=kept)

    def name_of(self, step: int) -> str:
        """The path or URL of a step's checkpoint."""
        return self._place.name_of(step)

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
        averages: Mapping[str, Tensor] | None = None,
        given: Settings | None = None,
        again: bool = False,
        more: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> bool:
        """Save training as it is after ``step``; return when the state is copied, or with ``blocking`` when written.

        ``extra`` is JSON, the same on every rank and for any world (loader, schedule, scaler); rank 0's is kept.
        ``rank_state`` holds tensors of this rank alone, which are restored only in a world of the same size;
        ``averages`` are averaged weights by name, ``given`` the settings that the optimizer was given at first, and
        ``more`` further parts, each of tensors by name. A save that is under way is waited for first. Saving the step
        that was saved or loaded last does nothing, unless there is a metric to add or it is asked for ``again``;
        returns whether there was something to save, and nothing has failed so far.

        On a full disk the oldest checkpoints go, and the save is tried again. If that does not help, or if an object
        store does not take it, a save that is not ``blocking`` leaves a note, so that training can continue.

        Raises:
            CheckpointError: the state cannot be written, or the save before this one failed.
        """
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved to {self._place.name}: the trainer is closed")
        self._settle()
        if step == self._current_step and metric is None and not again:
            return False
        self._loaded_folder = None
        self._place.release()
        if step < 0:
            raise CheckpointError(f"step={step} cannot be saved; count steps from 0")
        averages = self._by_whole_names(averages)
        extra_text = encode_plain(extra)
        state = gather_state(
            model,
            optimizer,
            rank=self._world.rank,
            rank_state=rank_state,
            averages=averages,
            given=given,
            stages=self._stages,
            more=more,
        )
        staged = self._stager.stage(state)
        assert isinstance(staged, dict), "the stager was told to copy at once"
        if not _STAGERS_STAY:
            self._stager = self._make_stager()
        self._thread = Thread(target=self._write, args=(step, staged, extra_text, metric), name="penstock-checkpoint")
        self._thread.start()
        if blocking:
            self.wait()
        return blocking or self.config.background or self._settle()

    def load_newest(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        at_most: int | None = None,
        averages: Mapping[str, Tensor] | None = None,
        given: Settings | None = None,
        parts: Collection[str] = (),
    ) -> tuple[int, dict[str, Any]] | None:
        """Restore the newest checkpoint that verifies and return its step and extra; None if there are no checkpoints.

        With ``at_most`` those of later steps are left out.
        Damaged ones are passed over, with a warning that names the file; ``passed_over`` keeps what was wrong by step.
        Settings that the optimizer is ``given`` otherwise than then stay; ``changed_settings`` says which they are, and
        what else is otherwise than then; ``groups_then`` has the groups of the checkpoint that each group has its
        parameters from.
        ``averages`` are those that ``load_averages`` will ask for, ``parts`` those that ``load_part`` will.

        Raises:
            CheckpointMismatchError: that checkpoint is of another model or optimizer.
            CheckpointError: there are checkpoints and none verifies.
        """
        self._settle()
        steps = [step for step in self._place.list_steps() if at_most is None or step <= at_most]
        for step in steps:
            folder, damage = self._place.verify(
                step, lambda folder: self._find_needs(folder, model, optimizer, averages, parts), self._alone
            )
            if damage:
                self.passed_over[step] = damage
                if self._world.rank == 0:
                    logger.warning("checkpoint %s is damaged and skipped: %s", self._place.name_of(step), damage)
                continue
            extra = self._restore(folder, model, optimizer, given)
            self._current_step, self._loaded_folder = step, folder
            return step, extra
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self._place.name} verifies; newest: step {steps[0]}, "
                f"{self.passed_over[steps[0]]}. Give another folder to start from scratch"
            )
        return None

    def loaded_metric(self) -> float | None:
        """Return the metric that the checkpoint loaded last was saved with, if it has one of this run's measure.

        Before the next save.
        """
        folder = self._loaded_folder
        return None if folder is None else read_manifest(folder).metric_by(self._retention.measure)

    def delete_after(self, step: int) -> list[int]:
        """Delete the checkpoints of later steps but for damaged ones, and return their steps; a collective."""
        return self._place.delete_after(step, spare=self.passed_over)

    def load_averages(self, averages: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Fill averaged weights by name from the checkpoint loaded last; a collective.

        Returns the names that it lacks, whose tensors are left alone, and those that it alone has.
        """
        folder, found = self._loaded_folder, self._by_whole_names(averages) or {}
        assert folder is not None, "a checkpoint was loaded"

        @self._alone()
        def restore() -> tuple[list[str], list[str]]:
            return restore_averages(folder, found, self._stages)

        return self._control.gather(f"{folder} cannot be loaded", restore)[0]

    def load_part(self, part: str, tensors: Mapping[str, Tensor]) -> list[str]:
        """Fill tensors by name from a further part of the checkpoint loaded last; a collective.

        Returns the names that it lacks, whose tensors are left alone. The part may be another one on each rank.
        """
        folder = self._loaded_folder
        assert folder is not None, "a checkpoint was loaded"

        @self._alone()
        def restore() -> list[str]:
            return restore_part(folder, part, tensors)[0]

        return self._control.gather(f"{folder} cannot be loaded", restore)[self._world.rank]

    def load_rank_state(self) -> dict[str, Tensor]:
        """Return this rank's ``rank_state`` of the checkpoint loaded last; empty if another world size saved it.

        This is not a collective. It belongs before the next save, which gives up what was loaded.
        """
        folder = self._loaded_folder
        return restore_rank_state(folder, self._world.rank) if folder and self._is_of_this_world(folder) else {}

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
        """Wait like ``wait``, but only note a full disk or a failing store; returns whether all is well."""
        try:
            self.wait()
        except (CheckpointRoomError, CheckpointUploadError) as exc:
            self._notes.append(f"{exc}; training continues, and the next save tries again")
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
        return [*self._place.take_notes(), *(self._notes.pop(0) for _ in range(len(self._notes)))]

    def _release(self) -> None:
        self._stager.close()
        self._control.close()
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, step: int, staged: dict[str, Any], extra_text: str, metric: float | None) -> None:
        try:
            saved = Snapshot(step=step, state=staged, extra_text=extra_text, metric=metric)
            self._place.write(saved, damaged=set(self.passed_over) - {step}, note=self._notes.append)
            self._current_step = step
            self.passed_over.pop(step, None)
        except CheckpointError as exc:
            self._failure = exc
        except Exception as exc:  # noqa: BLE001 - the thread's owner raises it, from wait()
            failure = CheckpointError(f"step {step} could not be saved to {self._place.name}: {exc}")
            failure.__cause__ = exc
            self._failure = failure

    def _is_of_this_world(self, folder: Path) -> bool:
        return read_manifest(folder).world_size == self._world.world_size

    def _find_needs(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        averages: Mapping[str, Tensor] | None,
        parts: Collection[str],
    ) -> dict[str, list[ByteRange]]:
        rank = self._world.rank if self._is_of_this_world(folder) else None
        averages = self._by_whole_names(averages)
        return find_needs(folder, model, optimizer, rank=rank, averages=averages, stages=self._stages, parts=parts)

    def _by_whole_names(self, averages: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """Averages by the names that one process would give the weights."""
        if self._stages is None or averages is None:
            return averages
        return {self._stages.renamed.get(name, name): one for name, one in averages.items()}

    def _restore(self, folder: Path, model: nn.Module, optimizer: Optimizer, given: Settings | None) -> dict[str, Any]:
        what = f"{folder} cannot be loaded"

        @self._alone()
        def restore() -> Restored:
            return restore_state(folder, model, optimizer, given, self._stages)

        restored = self._control.gather(what, restore)[0]
        self.changed_settings, self.groups_then = restored.notes, restored.groups
        return self._control.decide(what, lambda: json.loads((folder / EXTRA_NAME).read_bytes()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Announce work that this rank does alone."""
        self.entered("read checkpoint")
        try:
            yield
        finally:
            self.entered("resume")


def encode_plain(extra: Any) -> str:
    """Encode as JSON what JSON gives back unchanged: the loader's state and the counts.

    Raises:
        CheckpointError: JSON would change something; names the place and the value's type.
    """
    try:
        text = json.dumps(extra)
    except (TypeError, ValueError) as exc:
        place = None if isinstance(exc, ValueError) else _find_changed(extra, "extra")  # the other is of a circle
        raise CheckpointError(f"extra cannot be written as JSON: {place or exc}. {_CURE}") from exc
    changed = _find_changed(extra, "extra")
    if changed is not None:
        raise CheckpointError(f"extra cannot be written as JSON: {changed}. {_CURE}")
    return text


def _find_changed(value: Any, place: str) -> str | None:
    """Describe the first place that would come back as something else, or not at all; None if there is none."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                return f"{place} has the key {key!r} ({type(key).__name__}), which would come back as text"
            if (found := _find_changed(one, f"{place}[{key!r}]")) is not None:
                return found
        return None
    if isinstance(value, list):
        changed = (_find_changed(one, f"{place}[{index}]") for index, one in enumerate(value))
        return next((found for found in changed if found is not None), None)
    if isinstance(value, tuple):
        return f"{place} is a tuple, which would come back as a list"
    return (
        None if value is None or isinstance(value, str | int | float) else f"{place} is of type {type(value).__name__}"
    )
