"""What is known of a data set is not used where the data, or what says how they are read, is another one now."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock import DistributedDataLoader, TokensFormat, open_manifest
from penstock.loader import Manifest, StaleManifestWarning, TokenDocumentsFormat, verify
from penstock.loader.dataset.manifest import MANIFEST_NAME

TOKENS = np.arange(64, dtype="<i4")
SEQUENCES = TokensFormat(seq_len=8)


def write_index(folder: Path, *lengths: int) -> None:
    """Megatron's index of int32 tokens in documents of these lengths."""
    ends = np.cumsum(lengths)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    pointers = (ends - lengths) * TOKENS.itemsize
    parts = (np.array(lengths, "<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    (folder / "a.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.bin").write_bytes(TOKENS.tobytes())
    return folder


@pytest.fixture
def index(data: Path, tmp_path: Path) -> Callable[..., Manifest]:
    def open_it(form: TokensFormat | TokenDocumentsFormat | None = None) -> Manifest:
        return open_manifest(data, format=form, cache_dir=tmp_path / "cache", progress=False)

    return open_it


def save(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())


def told(manifest: Manifest) -> tuple[str, int]:
    return manifest.schema["columns"]["tokens"]["type"], manifest.num_samples


def test_an_index_of_megatrons_that_comes_later_is_heeded(data: Path, index: Callable[..., Manifest]) -> None:
    assert told(index(SEQUENCES)) == ("uint16", 16)
    write_index(data, 64)
    assert told(index(SEQUENCES)) == ("int32", 8)


def test_an_index_of_megatrons_that_comes_after_the_manifest_makes_that_stale(
    data: Path, index: Callable[..., Manifest]
) -> None:
    save(data, index(SEQUENCES))
    write_index(data, 64)
    with pytest.warns(StaleManifestWarning, match="1 new or changed shards"):
        assert told(index(SEQUENCES)) == ("int32", 8)
    flaws = verify(data, progress=False).flaws
    assert [(flaw.shard, flaw.kind) for flaw in flaws] == [("a.bin", "ObjectChangedError")]
    assert "a.idx, which came or changed since" in flaws[0].problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleManifestWarning)
        save(data, index(SEQUENCES))
    assert told(index(SEQUENCES)) == ("int32", 8)
    assert verify(data, progress=False).ok


@pytest.mark.parametrize("is_saved", [False, True], ids=["cached", "saved"])
def test_an_index_of_megatrons_that_changes_gives_its_own_documents(
    data: Path, index: Callable[..., Manifest], is_saved: bool
) -> None:
    form = TokenDocumentsFormat()
    write_index(data, 32, 32)
    before = index(form)
    if is_saved:
        save(data, before)
    assert index(form).num_samples == 2
    write_index(data, 16, 16, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleManifestWarning)
        after = index(form)
    assert after.num_samples == 3
    with DistributedDataLoader(after, batch_size=1, shuffle=False) as loader:
        assert [len(batch["tokens"][0]) for batch in loader] == [16, 16, 32]


def test_an_index_of_megatrons_that_is_gone_is_known_by_the_manifest(
    data: Path, index: Callable[..., Manifest]
) -> None:
    write_index(data, 64)
    save(data, index(SEQUENCES))
    (data / "a.idx").unlink()
    assert told(index(SEQUENCES)) == ("int32", 8)


def test_what_says_how_shards_are_read_is_part_of_a_manifest(data: Path, index: Callable[..., Manifest]) -> None:
    write_index(data, 64)
    manifest = index(SEQUENCES)
    stored = manifest.to_bytes()
    again = Manifest.from_bytes(stored, manifest.url)
    assert again.companions == manifest.companions
    assert list(again.companions) == ["a.bin"]
    damaged = stored.replace(b'"a.idx"', b'"b.idx"')
    assert damaged != stored
    with pytest.raises(Exception, match="its checksum does not fit"):
        Manifest.from_bytes(damaged, manifest.url)


@pytest.mark.parametrize("is_whole", [True, False], ids=["all written anew", "one of two"])
def test_fields_of_data_that_were_written_anew_are_none_of_the_old(
    tmp_path: Path, index: Callable[..., Manifest], data: Path, is_whole: bool
) -> None:
    (data / "a.bin").unlink()
    names = ["p.jsonl"] if is_whole else ["p.jsonl", "q.jsonl"]
    for name in names:
        (data / name).write_text('{"a": 1}\n{"a": 2}\n')
    save(data, index())
    (data / "p.jsonl").write_text('{"b": "x"}\n' * 3)
    with pytest.warns(StaleManifestWarning):
        stale = index()
    assert stale.fields == (["b"] if is_whole else ["a", "b"])
    (data / MANIFEST_NAME).unlink()  # what was made by it is not what is made without
    for name in names[1:]:
        (data / name).write_text('{"b": "y"}\n')
    assert index().fields == ["b"]
