"""Free space on the checkpoints' disk: require enough at the start, and make room when it runs out."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, CheckpointRoomError
from .folder import hide_folder, list_steps, read_manifest, remove_leftovers, step_folder
from .retention import Measure, Retention

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(folder: Path, checkpoint_bytes: int, *, kept: int) -> None:
    """Raise a CheckpointError where there is no room for ``kept`` checkpoints and one more that is being written.

    Existing checkpoints count as room, because retention deletes them in turn.
    """
    free_bytes = shutil.disk_usage(folder).free
    held_bytes = sum(_measure(step_folder(folder, step)) for step in list_steps(folder))
    needed_bytes = max(checkpoint_bytes, checkpoint_bytes * (kept + 1) - held_bytes)
    if free_bytes < needed_bytes:
        raise CheckpointRoomError(
            f"a checkpoint takes about {checkpoint_bytes / 1e6:.1f} MB, and {kept} kept with one being written need "
            f"{needed_bytes / 1e6:.1f} MB, but {folder} has {free_bytes / 1e6:.1f} MB free; make room, give another "
            "folder, or lower checkpoint.keep_last or keep_best"
        )


@contextmanager
def naming_a_full_disk() -> Iterator[None]:
    """Turn the OSError of a full disk or quota into a CheckpointRoomError, and let others pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise CheckpointRoomError(describe_full_disk(exc)) from exc
        raise


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def describe_full_disk(error: BaseException) -> str:
    return f"the disk is full ({getattr(error, 'strerror', None) or error})"


def delete_oldest(folder: Path, retention: Retention, *, spare: Iterable[int]) -> int | None:
    """Delete the checkpoint that retention would delete next, and return its step; None if all others must stay.

    The newest stays, and so do the best, those in ``spare`` and those that cannot be read.
    """
    metrics: Mapping[int, float | None] = dict(_readable_metrics(folder, retention.measure, set(spare)))
    for step in sorted(set(metrics) - retention.choose(metrics, keep_last=1)):
        with suppress(OSError):  # then the next one goes
            hide_folder(step_folder(folder, step))
            remove_leftovers(folder)
            return step
    return None


def _readable_metrics(folder: Path, measure: Measure, spare: set[int]) -> Iterator[tuple[int, float | None]]:
    for step in list_steps(folder):
        if step not in spare:
            try:
                yield step, read_manifest(step_folder(folder, step)).metric_by(measure)
            except CheckpointError:
                continue


def _measure(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0  # deleted meanwhile
