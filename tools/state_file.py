"""A loader's state in a file: found, read, moved on or back by arithmetic, and written back whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..loader.errors import ConfigError, StateMismatchError
from ..loader.order.costs.steps import EvenSteps
from ..loader.order.selecting import Subset, blocks
from ..loader.order.state import LoaderState
from ..storage.files import write_whole

# What a trainer's checkpoint holds besides tensors; it is sealed by checksums.
CHECKPOINT_NAME, SEAL_NAME = "extra.json", "manifest.json"
_MARKS = ({"fingerprint", "consumed"}, {"mixture", "consumed"})  # the second are a mixture's
_MOST_BYTES = 64 << 20
_LIKELY = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """A file that holds a loader's state, alone or inside other JSON; the same at all ``places``, paths of keys."""

    path: Path
    document: Any
    places: tuple[tuple[str | int, ...], ...]
    state: LoaderState
    is_checkpoint: bool


def read_state_file(path: str | os.PathLike[str]) -> StateFile:
    """Read a JSON file that holds what ``state_dict()`` returned, anywhere in it, or a checkpoint of the trainer.

    Raises:
        ConfigError: it cannot be read.
        StateMismatchError: it holds no state, several different ones, or a damaged one.
    """
    file = Path(path)
    is_checkpoint = file.is_dir() or (file.name == CHECKPOINT_NAME and (file.parent / SEAL_NAME).exists())
    if file.is_dir():
        file = file / CHECKPOINT_NAME
    try:
        with file.open("rb") as opened:  # a pipe or a device tells no size
            text = opened.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read ({exc.strerror}); give a file with a state") from exc
    if len(text) > _MOST_BYTES:
        raise StateMismatchError(f"{file}: too large for a state; give the file that it was saved in")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise StateMismatchError(f"{file}: not JSON ({exc}); give the file that state_dict() was saved in") from exc
    found = list(_find(document, ()))
    different = {json.dumps(each, sort_keys=True) for _, each in found}
    if len(different) != 1:
        shown = ", ".join(".".join(map(str, place)) or "the top" for place, _ in found)
        held = f"{len(different)} different states of loaders, at {shown}" if found else "no state of a loader"
        raise StateMismatchError(f"{file}: holds {held}; give a file with what one loader's state_dict() returned")
    places = tuple(place for place, _ in found)
    if "mixture" in found[0][1]:
        raise StateMismatchError(
            f"{file}: holds the state of a mixture, which is moved by its loader alone; load it there, call "
            "loader.skip_batches(n), and save its state_dict()"
        )
    try:
        state = LoaderState.from_dict(found[0][1])
    except StateMismatchError as exc:
        raise StateMismatchError(f"{file}: {exc}") from exc
    return StateFile(path=file, document=document, places=places, state=state, is_checkpoint=is_checkpoint)


def _find(document: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """The dicts in JSON that look like states, and where they are."""
    if isinstance(document, dict):
        if any(document.keys() >= marks for marks in _MARKS):
            yield place, document
            return
        items: Any = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    else:
        return
    for key, value in items:
        yield from _find(value, (*place, key))


def write_state_file(file: StateFile, state: LoaderState) -> None:
    """Put another state in the place of the one that was read; the file is replaced as a whole, or not at all.

    Raises:
        ConfigError: it is a trainer's checkpoint, or it cannot be written.
    """
    if file.is_checkpoint:
        raise ConfigError(
            f"{file.path.parent}: a checkpoint of the trainer is sealed by checksums and is not edited; resume it and "
            "call loader.skip_batches(n), or set spike.on_spike='rewind'"
        )
    document = file.document
    for place in file.places:
        document = _with(document, place, state.to_dict())
    try:
        text = file.path.read_text()
        if json.loads(text) != file.document:
            raise ConfigError(f"{file.path}: changed since it was read; run this again")
        indent = 2 if "\n" in text.strip() else None
        write_whole(file.path, (json.dumps(document, indent=indent) + "\n").encode(), durable=True)
    except OSError as exc:
        raise ConfigError(f"{file.path}: cannot be written ({exc.strerror}); it is unchanged") from exc


def _with(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = _with(document[place[0]], place[1:], value)
    return copy


def count_epoch(state: LoaderState) -> int:
    """Number of samples, or draws, in an epoch. A subset by share is counted, in O(samples) time.

    Raises:
        StateMismatchError: the state names a subset that does not exist.
    """
    stated = state.selection.get("subset")
    if stated is None:
        return state.num_samples
    try:
        subset = Subset(**stated)
        bounds = subset.bounds(state.num_samples)
        return sum(int(np.count_nonzero(subset.holds(*part, bounds))) for part in blocks(state.num_samples))
    except (TypeError, ConfigError) as exc:
        raise StateMismatchError(f"a damaged loader state: subset={stated} ({exc})") from exc


def skip_in_state(
    state: LoaderState,
    *,
    samples: int | None = None,
    batches: int | None = None,
    size: int = 1,
    last_batch: str = "drop",
) -> LoaderState:
    """Move the state forward by samples, or by global batches of ``size`` samples; back if the number is negative.

    Further goes through the ends of epochs: with samples, epochs have all of theirs; with batches, ``last_batch`` says
    what comes of those that fill none. Back goes to the epoch's beginning at most.

    Raises:
        ConfigError: that is before the epoch's beginning, or numbers are not what they must be.
    """
    if (samples is None) == (batches is None):
        raise ConfigError(f"samples={samples}, batches={batches}: give one of them")
    if size < 1:
        raise ConfigError(f"global_batch_size={size}: must be at least 1")
    if state.stream:
        raise ConfigError(
            "the state is of a loader with keep= or may_drop=: where its lanes stand further on is known only by "
            "reading; load the state, take batches from the loader, and save its state_dict()"
        )
    total, count = count_epoch(state), samples if batches is None else batches
    assert count is not None
    if not -_LIKELY < count * size < _LIKELY:
        raise ConfigError(f"{count:,} is beyond any run")
    if count < 0:
        consumed = state.consumed + count * (1 if batches is None else size)
        if consumed < 0:
            raise ConfigError(
                f"{-count:,} back is before the beginning of epoch {state.epoch}, of which {state.consumed:,} samples "
                f"are consumed; go back less: --samples -{state.consumed} is the epoch's beginning"
            )
        return replace(state, consumed=consumed)
    if batches is None:
        more, consumed = divmod(state.consumed + count, total)
        return replace(state, epoch=state.epoch + more, consumed=consumed)
    steps = EvenSteps(total, size, last_batch)
    in_epoch, left = steps.count(0), steps.count(state.consumed)
    if not in_epoch:
        raise ConfigError(f"global_batch_size={size}: no batch in an epoch of {total:,} samples with last_batch='drop'")
    if count < left or not count:
        return replace(state, consumed=int(steps.bounds(state.consumed, count)[-1]))
    whole, rest = divmod(count - left, in_epoch)
    return replace(state, epoch=state.epoch + 1 + whole, consumed=int(steps.bounds(0, rest)[-1]))
