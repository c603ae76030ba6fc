"""Inputs that hypothesis makes up by the grammar of a format: JSON of the right keys, patterns, manifests."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np

from . import seeds
from .targets import any_manifest, any_state


@functools.cache
def strategies() -> dict[str, Any]:
    """Make a hypothesis strategy of bytes for each target that has a grammar."""
    from hypothesis import strategies as st

    words = ["type", "int64", "columns", "fields", "nulls", "x", "a", "str", "int", "uint8", "ndarray", "jpeg"]
    numbers = st.integers() | st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 53, 1 << 62, 1 << 63, 1 << 64, 10**40])
    leaves = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.sampled_from(words)
    anything = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(words), inner, max_size=4),
        max_leaves=12,
    )

    def changed(whole: dict[str, Any]) -> Any:
        """Replace some of the values of a JSON object by anything."""
        change = st.dictionaries(st.sampled_from(sorted(whole)), anything, max_size=3)
        return change.map(lambda values: {**whole, **values})

    def dumped(values: Any) -> bytes:
        return json.dumps(values).encode()

    entry = json.loads(seeds.mds_index(len(seeds.mds_shard())))["shards"][0]
    columns = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(_MDS), leaves), max_size=4)
    entries = changed(entry) | columns.map(
        lambda rows: {
            **entry, "column_names": [r[0] for r in rows], "column_encodings": [r[1] for r in rows],
            "column_sizes": [r[2] for r in rows],
        }
    )  # fmt: skip
    header, _, records = seeds.delivery_logs()[0].partition(b"\n")
    sides = st.sampled_from([0, 1, 2, 3, 7, 64, 1 << 31, 1 << 40, 1 << 62, -1, -(1 << 62)])
    manifest = any_manifest()
    arrays = st.fixed_dictionaries(
        {},
        optional={
            name: st.lists(sides, min_size=manifest.num_chunks, max_size=manifest.num_chunks)
            for name in ("shard_index", "offsets", "lengths", "samples", "memory")
        },
    )
    texts = st.fixed_dictionaries({}, optional={"schema": changed(dict(manifest.schema)), "config": changed(_CONFIG)})
    pattern = st.lists(st.sampled_from(_PATTERN) | st.text(max_size=3), max_size=12).map("".join)
    return {
        "mds-index": st.lists(entries, max_size=2).map(lambda found: dumped({"version": 2, "shards": found})),
        "jsonl": st.lists(anything.map(dumped), max_size=6).map(b"\n".join),
        "state": changed(any_state()).map(dumped),
        "audit": st.tuples(changed(json.loads(header)).map(dumped), st.sampled_from([records, records[:48], b""])).map(
            lambda parts: parts[0] + b"\n" + parts[1]
        ),
        "manifest": st.tuples(arrays, texts).map(lambda parts: _changed_manifest(*parts)),
        "pattern": pattern.map(str.encode),
        "text": anything.map(dumped),
    }


def _changed_manifest(arrays: dict[str, list[int]], texts: dict[str, Any]) -> bytes:
    changes: dict[str, Any] = {**{name: np.array(values) for name, values in arrays.items()}, **texts}
    return replace(any_manifest(), **changes).to_bytes()


_CONFIG = {"chunk_bytes": 64}
_MDS = [
    "str", "int", "bytes", "json", "uint8", "float32", "str_int", "str_decimal", "ndarray", "ndarray:int8",
    "ndarray:int8:2,3", "jpeg", "jpeg_array", "png", "pil", "pkl", "ndarray:float64:99999999999", "ndarray::",
]  # fmt: skip
_PATTERN = ["{", "}", ",", "..", "0", "9", "00", "999999", "*", "**", "/", "?", "[", "]", "!", "a", "s3://", "\\"]
