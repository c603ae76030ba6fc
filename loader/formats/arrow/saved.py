"""Folders that ``save_to_disk`` of Hugging Face datasets wrote: a state.json says which files are the data."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...errors import FormatError

if TYPE_CHECKING:
    from ....storage import ObjectInfo, Store
    from ..shard import ShardTask

_STATE = "state.json"
# Beside the data of `save_to_disk`, and in the library's own cache, where no state says which files are the data.
_INFO = "dataset_info.json"


def pick_saved(
    store: Store, listing: Sequence[ObjectInfo], tasks: Sequence[ShardTask], named: Collection[str]
) -> list[ShardTask]:
    """Of such folders the files that their states list, in that order, and those that are ``named``; of others all.

    Beside the data may lie results of ``map``, in the cache of datasets, too, and files of an earlier save in another
    number of shards.

    Raises:
        FormatError: a file that a state lists is missing.
    """
    states = {info.key.removesuffix(_STATE): info for info in listing if info.key.rpartition("/")[2] == _STATE}
    known = {info.key.rpartition("/")[0] for info in listing if info.key.rpartition("/")[2] in (_STATE, _INFO)}
    listed = {folder: _list_files(store, info, folder) for folder, info in states.items()}
    there = {task.info.key for task in tasks}
    for folder, keys in listed.items():
        missing = next((key for key in keys or () if key not in there), None)
        if missing is not None:
            raise FormatError(states[folder].key, f"lists {missing}, which is not there; copy it, or save it again")
    places = {key: place for keys in listed.values() for place, key in enumerate(keys or ())}

    def is_data(key: str) -> bool:
        folder, slash, name = key.rpartition("/")
        keys = listed.get(folder + slash)
        return key in places if keys else folder not in known or not name.startswith("cache-")

    picked = [task for task in tasks if task.info.key in named or is_data(task.info.key)]
    for keys in listed.values():
        slots = [slot for slot, task in enumerate(picked) if task.info.key in set(keys or ())]
        in_order = sorted((picked[slot] for slot in slots), key=lambda task: places[task.info.key])
        for slot, task in zip(slots, in_order, strict=True):
            picked[slot] = task
    return picked


def _list_files(store: Store, info: ObjectInfo, folder: str) -> list[str] | None:
    """The keys that a state lists; None where it is another program's, or lists none."""
    try:
        files = json.loads(bytes(store.get(info.key, etag=info.etag)))["_data_files"]
        return [f"{folder}{file['filename']}" for file in files] or None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
