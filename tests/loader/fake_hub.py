"""The Hugging Face Hub in memory, behind the scheme hf://."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


class FakeHub(MemoryFileSystem):
    """As the hub's file system: paths are datasets/ORG/NAME/FILE, and files have a blob_id."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012 - the base class keeps it so
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/") if path.strip("/") else ""

    def find(self, path: str, detail: bool = False, **options: Any) -> Any:
        found = super().find(path, detail=True, **options)
        return {name: self.info(name) for name in found} if detail else list(found)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {**found, "blob_id": "b"} if found["type"] == "file" else found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "hf", FakeHub)
    yield fsspec.filesystem("hf")
    FakeHub.store.clear()
