"""A file system of local files that stops answering at one file, once told to: ``hanging://folder``."""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class HangingFileSystem(LocalFileSystem):
    protocol = "hanging"
    cachable = False
    hangs_at: str | None = None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        if self.hangs_at is not None and path.endswith(self.hangs_at) and start is not None:
            time.sleep(600.0)
        return super().cat_file(path, start=start, end=end, **options)


def register_hanging_store() -> None:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
