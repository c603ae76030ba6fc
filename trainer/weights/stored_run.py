"""A checkpoint in an object store: what is read of its weights is fetched, part by part, and deleted afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...storage.checks import where
from ...storage.errors import NotFoundError, StorageError
from ...storage.resolve import open_store
from ..checkpoint.folder import EXTRA_NAME
from ..checkpoint.remote.download import fetch, fetch_files
from ..checkpoint.remote.layout import find_missing, list_stored, read_stored
from ..checkpoint.remote.staging import Staging
from ..errors import CheckpointError
from .run_folder import (
    CONFIG_NAME,
    Advance,
    Chosen,
    LocalCheckpoint,
    Ranges,
    Step,
    check_single,
    choose_step,
    find_checkpoint,
    read_best_step,
)

_STEP = re.compile(r"(?P<run>.+)/step-(?P<step>\d+)/?")
_SHOWN = 3


def is_url(path: str | Path) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def open_checkpoint(run: str | Path, step: Step) -> Chosen:
    """Find one checkpoint of a run, in a folder or below a URL; ``find_checkpoint`` says what may be given.

    Raises:
        CheckpointError: there is none, or not this one, or the store cannot be read.
    """
    if is_url(run):
        return StoredCheckpoint(str(run), step)
    return LocalCheckpoint(find_checkpoint(Path(run), step), Path(run))


class StoredCheckpoint:
    """A checkpoint below a URL of an object store: ``s3://bucket/run``, or one of its steps, ``s3://bucket/run/step-5``.

    Owns the store and a folder with its metadata, which is on this node's disk until ``close``.
    """

    def __init__(self, url: str, step: Step) -> None:
        match = _STEP.fullmatch(url)
        if match is not None:
            check_single(url, int(match["step"]), step)
            url, step = match["run"], int(match["step"])
        self._staging: Staging | None = None
        with _in_words():
            self._store = open_store(url)
        try:
            with _in_words():
                self._find(step)
        except BaseException:
            self.close()
            raise

    def _find(self, step: Step) -> None:
        steps = list_stored(self._store)
        if not steps:
            raise CheckpointError(
                f"{self._store.url} holds no checkpoint; give the checkpoint.folder of a run that saved there "
                "(safetensors files are read from a file system: copy them, or mount the store)"
            )
        if step == "best":
            self._stage(steps[0])
            best = read_best_step(self.folder / EXTRA_NAME, self._store.url)
        else:
            best = None
        self._stage(choose_step(self._store.url, steps, step, best))

    def _stage(self, step: int) -> None:
        """Have a step's metadata in a folder of its own."""
        if self._staging is not None:
            self._staging.close()
        self._stored = read_stored(self._store, step)
        self._staging = Staging()
        self._refuse(fetch(self._store, self._stored, lambda folder: {}, self._staging.folder))

    @property
    def name(self) -> str:
        return where(self._store.url, f"step-{self.step}")

    @property
    def step(self) -> int:
        return self._stored.manifest.step

    @property
    def folder(self) -> Path:
        assert self._staging is not None, "closed"
        return self._staging.folder

    def count_bytes(self, ranges: Ranges) -> int:
        return sum(part.seal.size for name, of_file in ranges.items() for part in self._stored.parts_of(name, of_file))

    def find_damage(self, *, share: int = 0, shares: int = 1, advance: Advance = lambda count: None) -> list[str]:
        """List the damage that a listing shows, once for all shares; contents are verified as they are fetched."""
        with _in_words():
            return [] if share else find_missing(self._store, self._stored)

    def bring(self, ranges: Ranges, advance: Advance = lambda count: None) -> None:
        with _in_words():
            self._refuse(fetch_files(self._store, self._stored, ranges, self.folder, advance))

    def read_config(self) -> bytes | None:
        """Read the run's configuration beside the manifests; None if there is none."""
        with _in_words():
            try:
                return bytes(self._store.get(CONFIG_NAME))
            except NotFoundError:
                return None

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._store.close()

    def _refuse(self, damage: list[str]) -> None:
        if damage:
            raise CheckpointError(f"{self.name} is damaged: {'; '.join(damage[:_SHOWN])}; take another checkpoint")


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except StorageError as exc:
        raise CheckpointError(str(exc)) from exc
