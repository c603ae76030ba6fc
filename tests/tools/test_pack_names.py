"""Keys and fields come back from a tar as they were given, or are refused: none is lost, none leads out of a folder."""

from __future__ import annotations

import io
import itertools
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_samples import read_samples

from penstock import pack
from penstock.loader import DatasetError
from penstock.storage import MemoryStore

_buckets = itertools.count()
_NAMES = st.text(st.sampled_from("ab_./\\\0\n~ ëß\x1bA\ud800"), max_size=8) | st.sampled_from(
    ["__a__/b", "../../x", "/etc/x", "a//b", "a/../b", "__key__", "__url__", ".", "x" * 150, "K/" + "y" * 120]
)


@given(
    samples=st.lists(
        st.tuples(_NAMES, st.dictionaries(_NAMES, st.binary(max_size=3), min_size=1, max_size=2)),
        min_size=1,
        max_size=4,
        unique_by=lambda sample: sample[0],
    )
)
def test_a_tar_gives_back_every_key_and_field_or_refuses_it(samples: list[tuple[str, dict[str, bytes]]]) -> None:
    rows = [{**fields, "__key__": key} for key, fields in samples]
    store = MemoryStore(f"mem://pack-names-{next(_buckets)}/data").create()
    try:
        _check_round_trip(store, rows, samples)
    finally:
        store.drop()


def _check_round_trip(
    store: MemoryStore, rows: list[dict[str, Any]], samples: list[tuple[str, dict[str, bytes]]]
) -> None:
    try:
        pack(rows, store.url)
    except DatasetError:
        return
    expected = [
        {"__key__": key, **{name.lower(): value for name, value in fields.items() if name != "__key__"}}
        for key, fields in samples
    ]
    found = [{name: value for name, value in row.items() if value is not None} for row in read_samples(store.url)]
    assert found == expected
    with tarfile.open(fileobj=io.BytesIO(store.get("shard-000000.tar"))) as archive:
        for name in archive.getnames():
            assert not name.startswith("/")
            assert ".." not in name.split("/")


@pytest.mark.parametrize(
    "sample",
    [
        {"__key__": "a\0b", "txt": "x"},
        {"__key__": "__a__/b", "txt": "x"},
        {"__key__": "../../evil", "txt": "x"},
        {"__key__": "/evil", "txt": "x"},
        {"__key__": "a", "x/y.txt": "x"},
        {"__key__": "a", "../evil.txt": "x"},
        {"__key__": "a", "__url__": "x"},
        {"__key__": "a", "": "x"},
    ],
)
def test_names_that_readers_would_lose_are_refused(memory_store: MemoryStore, sample: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="sample 1"):
        pack([{"__key__": "good", "txt": "x"}, sample], memory_store.url)
