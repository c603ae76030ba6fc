"""A folder of loose files as samples: files whose names differ only after the first dot belong together."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...loader.columns import KEY_COLUMN
from ...loader.dataset.class_names import LABEL_FIELD
from ...loader.errors import DatasetError
from ...loader.formats.shard import is_system
from ...storage import ObjectInfo, Store
from ...storage.suggestions import list_some
from ...storage.threads.daemon_pool import DaemonPool
from .grouping import group_files
from .samples import Batch

_GROUP = 64  # samples read by one thread at a time
_THREADS = 8
_IMAGES = ("jpg", "jpeg", "png", "webp")


class FolderSource:
    """Samples of a folder, in the order of their keys; with two or more folders of files alone, these are classes.

    ``classes``: their names in the order of their numbers; then one folder is enough. ``extensions``: the endings of
    the files to take, which are the fields.
    """

    def __init__(
        self,
        store: Store,
        listing: Iterable[ObjectInfo],
        *,
        follow_links: bool = False,
        classes: Sequence[str] | None = None,
        extensions: Sequence[str] | None = None,
    ) -> None:
        self._store = store
        files, self.notes = _leave_out(listing)
        if not files:
            raise DatasetError(f"{store.url}: the folder holds no files; there is nothing to pack")
        if store.url.startswith("file://") and not follow_links:
            _refuse_links(store.url.removeprefix("file://"), files)
        grouped = group_files(files, store.url, extensions)
        self._samples = grouped.samples
        taken = [info for _, fields in self._samples for info in fields.values()]
        labelled = any(LABEL_FIELD in fields for _, fields in self._samples)
        folders = find_classes(info.key for info in taken)
        if classes is not None and not labelled:
            _check_folders([info.key for info in taken], classes, store.url)
        self.classes = tuple(classes or (() if labelled else folders))
        self._ordinals = {} if labelled else {name: ordinal for ordinal, name in enumerate(self.classes)}
        self.total: int | None = len(self._samples)
        self.identity: Any = ["folder", [[info.key, info.size, info.etag] for info in files]]
        # Only extensions that name other samples than the first dots do, so that packs of older releases resume.
        self.identity += [list(extensions)] if extensions else []
        self.identity += grouped.notes
        self.has_members = True
        self.hints: Mapping[str, pa.DataType] = {}
        notes, self._names = name_images([fields for _, fields in self._samples])
        self.notes += [*grouped.notes, *notes]
        if labelled and folders:
            self.notes.append(f"classes are those of the .{LABEL_FIELD} files, not the folders")

    def batches(self, first_piece: int = 0) -> Iterator[Batch]:
        running: deque[tuple[int, Future[list[dict[str, Any]]]]] = deque()
        with DaemonPool("penstock-files", _THREADS) as pool:
            for piece in range(first_piece, -(-len(self._samples) // _GROUP)):
                if len(running) >= _THREADS:
                    number, done = running.popleft()
                    yield Batch(number, done.result())
                running.append((piece, pool.submit(self._read, piece)))
            while running:
                number, done = running.popleft()
                yield Batch(number, done.result())

    def before(self, piece: int) -> int:
        return piece * _GROUP

    def _read(self, piece: int) -> list[dict[str, Any]]:
        return [self._sample(*each) for each in self._samples[piece * _GROUP : (piece + 1) * _GROUP]]

    def _sample(self, key: str, fields: Mapping[str, ObjectInfo]) -> dict[str, Any]:
        sample: dict[str, Any] = {KEY_COLUMN: key}
        if self._ordinals:
            sample[LABEL_FIELD] = self._ordinals[key.partition("/")[0]]
        for field, info in fields.items():
            sample[self._names.get(field, field)] = bytes(self._store.get(info.key, etag=info.etag))
        return sample

    def close(self) -> None:
        self._store.close()


def _leave_out(listing: Iterable[ObjectInfo]) -> tuple[list[ObjectInfo], list[str]]:
    """The files without those that are hidden or a system's, and a note of these."""
    kept: list[ObjectInfo] = []
    others: list[str] = []
    for info in listing:
        if is_system(info.key) or any(part.startswith(".") for part in info.key.split("/")):
            others.append(info.key)
        else:
            kept.append(info)
    if not others:
        return kept, []
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return kept, [f"hidden and system files are left out: {len(others):,} ({shown})"]


def _check_folders(keys: Iterable[str], classes: Sequence[str], url: str) -> None:
    """Raise DatasetError unless every file lies in a folder of one of ``classes``."""
    known = set(classes)
    for key in keys:
        folder, slash, name = key.partition("/")
        if not slash or "/" in name:
            raise DatasetError(
                f"{url}/{key}: classes= numbers folders of files, and this file lies in "
                f"{'a deeper one' if slash else 'none'}; move it into the folder of its class, or "
                "leave classes= (--classes) out"
            )
        if folder not in known:
            shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise DatasetError(
                f"{url}/{key}: its folder {folder!r} is none of the {len(classes):,} classes ({shown}); add its name "
                "at the end of classes= (--classes), or leave the folder out"
            )


def find_classes(keys: Iterable[str]) -> tuple[str, ...]:
    """The sorted names of the folders if every file lies in one of two or more folders; otherwise nothing."""
    folders: set[str] = set()
    for key in keys:
        folder, slash, name = key.partition("/")
        if not slash or "/" in name:
            return ()
        folders.add(folder)
    return tuple(sorted(folders)) if len(folders) > 1 else ()


def name_images(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """One name for images in several formats, where each sample has one at most, and what to say of fields.

    Decoders look at the bytes, so that a PNG may be in a field named ``jpg``; a field that half of the samples lack
    could not be read as a batch.
    """
    kinds = Counter(field for fields in samples for field in fields if field in _IMAGES)
    notes: list[str] = []
    names: dict[str, str] = {}
    if len(kinds) > 1 and all(sum(kind in fields for kind in kinds) <= 1 for fields in samples):
        chosen = max(kinds, key=lambda kind: (kinds[kind], -_IMAGES.index(kind)))
        names = dict.fromkeys(kinds, chosen)
        counted = ", ".join(f"{count:,} .{kind}" for kind, count in kinds.most_common())
        notes.append(f"images of several kinds ({counted}) are one field, {chosen!r}")
    counts = Counter(names.get(field, field) for fields in samples for field in fields)
    partial = [f"{name!r} ({count:,} of {len(samples):,})" for name, count in counts.items() if count < len(samples)]
    if partial:
        notes.append(f"only some samples have the fields {list_some(partial, 5)}")
    return notes, names


def _refuse_links(root: str, files: Iterable[ObjectInfo]) -> None:
    """Raise DatasetError for a link, of a file or a folder, to a place outside of the folder."""
    home = os.path.realpath(root)
    checked: dict[str, bool] = {}
    for info in files:
        folder = info.key.rpartition("/")[0]
        if folder not in checked:
            checked[folder] = _is_inside(Path(root, folder), home)
        if not checked[folder] or (Path(root, info.key).is_symlink() and not _is_inside(Path(root, info.key), home)):
            raise DatasetError(
                f"{root}/{info.key}: a link leads out of the folder, to {os.path.realpath(Path(root, info.key))}; "
                "give follow_links=True (--follow-links) to pack what it leads to"
            )


def _is_inside(path: Path, home: str) -> bool:
    real = os.path.realpath(path)
    return real == home or real.startswith(home.rstrip("/") + "/")
