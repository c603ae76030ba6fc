"""WebDataset tar shards."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from ...loader.columns import KEY_COLUMN
from ...loader.errors import DatasetError
from ...loader.formats.tar.names import RESERVED_FIELDS, find_field_dot
from .values import encode_member
from .writer import SampleWriter, Shard

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class TarWriter(SampleWriter):
    """Members ``key.field``; a sample without a ``__key__`` gets its ordinal as key."""

    suffix = ".tar"

    def __init__(self, shard_bytes: int) -> None:
        super().__init__()
        self._shard_bytes = shard_bytes
        self._last_key = ""
        self._renamed: dict[str, str] = {}  # each field's name in the shards, where known
        self._buffer = io.BytesIO()
        self._tar = self._new_tar()

    def _new_tar(self) -> tarfile.TarFile:
        self._buffer = io.BytesIO()
        return tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        super().resume(state, units)
        self._last_key, self._renamed = state["last_key"], dict(state["renamed"])

    def add(self, item: Any) -> list[Shard]:
        if not isinstance(item, Mapping):
            raise DatasetError(f"sample {self.added} is a {type(item).__name__}; tar shards need dicts")
        key = str(item.get(KEY_COLUMN, f"{self.added:09d}"))
        if key == self._last_key:
            raise DatasetError(f"sample {self.added} has the key {key!r} of the one before it; keys must be unique")
        members = self._members(key, item)
        size = sum(1024 + len(data) for _, data in members)
        full: list[Shard] = []
        if self._buffer.tell() and self._buffer.tell() + size > self._shard_bytes:
            full = self.finish()
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))
        self.added += 1
        self._last_key = key
        return full

    def _members(self, key: str, sample: Mapping[str, Any]) -> list[tuple[str, bytes]]:
        check_key(key, self.added)
        members: dict[str, bytes] = {}
        for field, value in sample.items():
            if field == KEY_COLUMN or value is None:
                continue
            name, data = encode_member(str(field).lower(), value, key)
            if self._renamed.setdefault(str(field), name) != name:
                raise DatasetError(
                    f"sample {self.added} ({key!r}) has in field {field!r} a {type(value).__name__}, which would be "
                    f"written as {name!r}, but in earlier samples it is {self._renamed[str(field)]!r}; give all "
                    "samples values of one type"
                )
            if name in members:
                raise DatasetError(f"sample {self.added} ({key!r}) has two fields that tar calls {name!r}; rename one")
            check_field(key, name, self.added)
            members[name] = data
        if not members:
            raise DatasetError(f"sample {self.added} ({key!r}) has no fields")
        return [(f"{key}.{name}", data) for name, data in members.items()]

    def finish(self) -> list[Shard]:
        if not self._buffer.tell():
            return []
        self._tar.close()
        data = self._buffer.getvalue()
        self._tar = self._new_tar()
        return [Shard(data, self.added, {"last_key": self._last_key, "renamed": dict(self._renamed)})]

    def notes(self) -> Sequence[str]:
        return [f"field {field!r} is named {name!r}" for field, name in self._renamed.items() if field != name]


def check_key(key: str, ordinal: int) -> None:
    """Raise DatasetError for a key that readers of tar shards would not give back, or that leads out of a folder."""
    problem = ""
    parts = key.split("/")
    if not key or "." in parts[-1]:
        problem = "a key must not have a dot in its last part, nor be empty"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "a key is a path without empty parts, '.' and '..'"
    elif find_field_dot(f"{key}.x".encode("utf-8", "replace")) != len(key.encode("utf-8", "replace")):
        problem = "readers skip samples whose first folder or name is like __this__"
    else:
        problem = _bad_text(key)
    if problem:
        raise DatasetError(f"sample {ordinal} has the key {key!r}; {problem}")


def check_field(key: str, field: str, ordinal: int) -> None:
    """Raise DatasetError for a field's name that readers of tar shards would not give back."""
    problem = _bad_text(field)
    if field in RESERVED_FIELDS:
        problem = "readers keep that name for themselves"
    elif not field or "/" in field:
        problem = "a field's name must not be empty, nor have a slash"
    elif not problem and field != field.encode().decode().lower():
        problem = "it has no form in lower case"
    if problem:
        raise DatasetError(f"sample {ordinal} ({key!r}) has a field {field!r}; {problem}")


def _bad_text(text: str) -> str:
    if _CONTROL.search(text):
        return "control characters cannot be part of a name in a tar"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is not Unicode text"
    return ""
