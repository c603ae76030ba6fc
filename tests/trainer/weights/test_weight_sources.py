"""The fingerprint by which ranks compare what they load."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from penstock.trainer.weights import sources

XXH3_64 = xxhash.xxh3_64


class BytesOnly:
    """A digest as xxhash 4 has them: text is refused."""

    def __init__(self) -> None:
        self._digest = XXH3_64()

    def update(self, data: bytes) -> None:
        memoryview(data)
        self._digest.update(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def test_a_fingerprint_hashes_bytes_and_tells_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.xxhash, "xxh3_64", BytesOnly)
    found = set()
    for name, content in (("a", b"1"), ("b", b"1"), ("a", b"2"), ("a", b"2" * 2_000_000)):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        found.add(sources.SafetensorsSource(str(path), {path: None}).fingerprint())
    assert len(found) == 4
