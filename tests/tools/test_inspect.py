"""What ``inspect_dataset`` says of sizes and images."""

from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock import pack
from penstock.cli.inspect import can_draw, draw_thumbnails
from penstock.cli.screen import Screen
from penstock.loader import inspect_dataset
from penstock.loader.formats.arrow.columns import value_sizes


def test_sizes_of_samples_are_their_own_not_their_chunks_mean(tmp_path: Path) -> None:
    rows = [{"text": "x" * n, "tags": ["ab"] * n, "n": n} for n in (1, 10, 1000)]
    for form in ("jsonl", "parquet", "arrow"):
        pack(rows, tmp_path / form, format=form, progress=False)  # type: ignore[arg-type]
        spread = inspect_dataset(tmp_path / form).sample_sizes
        assert (spread.low, spread.median, spread.high) == (1 + 2 + 8, 10 + 20 + 8, 1000 + 2000 + 8)


_VALUES = st.recursive(
    st.none() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


def naive_size(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(map(naive_size, value.values()))
    return sum(map(naive_size, value)) if isinstance(value, list) else len(value) if isinstance(value, bytes) else 8


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.text(max_size=4), max_size=3), max_size=6), cut=st.integers(0, 3)
)
def test_value_sizes_are_those_of_a_naive_count(rows: list[Any], cut: int) -> None:
    kinds = [
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_view(pa.string_view()),
    ]
    for kind in kinds:
        array = pa.array(rows, kind).slice(cut)
        assert value_sizes(array).tolist() == [naive_size(row) for row in array.to_pylist()]
    structs = pa.array([None if row is None else {"a": row, "n": 1} for row in rows])
    if pa.types.is_struct(structs.type):
        assert value_sizes(structs).tolist() == [naive_size(row) for row in structs.to_pylist()]


def test_sizes_of_maps_decimals_and_fixed_lists() -> None:
    assert value_sizes(pa.array([[("ab", 1)], None], pa.map_(pa.string(), pa.int32()))).tolist() == [6, 0]
    assert value_sizes(pa.array([Decimal("1.5"), None])).tolist() == [16, 0]
    assert value_sizes(pa.array([[1, 2], None], pa.list_(pa.int16(), 2))).tolist() == [4, 0]
    assert value_sizes(pa.array(["abc", "d", "abc"]).dictionary_encode()).tolist() == [3, 1, 3]


def test_images_are_drawn_where_the_terminal_can_and_never_into_a_pipe(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    red = np.zeros((60, 40, 3), np.uint8)
    red[..., 2] = 255
    png = cv2.imencode(".png", red)[1].tobytes()
    pack(({"__key__": f"k{n}", "png": png} for n in range(5)), tmp_path / "out", progress=False)
    seen = inspect_dataset(tmp_path / "out", thumbnails=3)
    assert [picture.name for picture in seen.thumbnails] == ["k0 png", "k1 png", "k2 png"]
    assert seen.thumbnails[0].pixels.shape == (24, 16, 3)
    assert seen.thumbnails[0].pixels[12, 8].tolist() == [255, 0, 0]
    assert inspect_dataset(tmp_path / "out").thumbnails == ()
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    assert can_draw(screen)
    draw_thumbnails(screen, seen.thumbnails)
    drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    assert drawn.count("▀") == 3 * 16 * 12
    assert "38;2;255;0;0" in drawn
    assert not can_draw(Screen(file=io.StringIO()))
    assert not can_draw(Screen(file=io.StringIO(), force_terminal=True, color_system="standard"))
    assert isinstance(screen, Console)
