"""Shards of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...loader.errors import DatasetError
from .values import dump_json, read_member
from .writer import SampleWriter, Shard


class JsonlWriter(SampleWriter):
    """One object a line, not compressed, so that chunks end at lines."""

    suffix = ".jsonl"

    def __init__(self, shard_bytes: int) -> None:
        super().__init__()
        self._shard_bytes = shard_bytes
        self._lines: list[bytes] = []
        self._held = 0

    def add(self, item: Any) -> list[Shard]:
        if not isinstance(item, Mapping):
            raise DatasetError(f"sample {self.added} is a {type(item).__name__}; JSON lines need dicts")
        line = "{" + ", ".join(self._entry(name, value) for name, value in item.items()) + "}\n"
        data = line.encode()
        full = self.finish() if self._held and self._held + len(data) > self._shard_bytes else []
        self._lines.append(data)
        self._held += len(data)
        self.added += 1
        return full

    def _entry(self, name: Any, value: Any) -> str:
        try:
            return f"{dump_json(str(name))}: {dump_json(read_member(str(name), value, parse=True))}"
        except ValueError as exc:
            raise DatasetError(f"sample {self.added}, field {name!r}: {exc}") from exc

    def finish(self) -> list[Shard]:
        if not self._lines:
            return []
        data = b"".join(self._lines)
        self._lines, self._held = [], 0
        return [Shard(data, self.added)]
