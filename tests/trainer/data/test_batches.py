"""The rows of a batch: how many there are, and which belong to which part, whatever fields are made of."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader import ByteViews
from penstock.trainer import TrainerConfigError
from penstock.trainer.data.batches import count_rows, move_batch
from penstock.trainer.steps.microbatches import cut_batch

Pair = namedtuple("Pair", "x y")


@given(rows=st.integers(0, 20), parts=st.integers(1, 8))
def test_parts_are_even_and_hold_every_row_of_every_field_once(rows: int, parts: int) -> None:
    x = torch.arange(2.0 * rows).reshape(rows, 2)
    batch = {
        "x": x,
        "texts": [str(row) for row in range(rows)],
        "nested": Pair(x + 1, (x + 2, {"deep": x + 3})),
        "scale": torch.tensor(2.0),
        "name": "train",
        "none": None,
        "number": np.int64(7),
    }
    found = cut_batch(batch, parts)
    sizes = [len(part["x"]) for part in found]
    assert len(found) == parts
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part["x"] for part in found]), x)
    assert [text for part in found for text in part["texts"]] == batch["texts"]
    assert isinstance(found[0]["nested"], Pair)
    assert torch.equal(torch.cat([part["nested"].y[1]["deep"] for part in found]), x + 3)
    assert all((part["scale"], part["name"], part["none"], part["number"]) == (2.0, "train", None, 7) for part in found)


@pytest.mark.parametrize("alone", [True, False])
def test_rows_are_counted_and_cut_in_views_and_arrays_too(alone: bool) -> None:
    views = ByteViews([b"a", None, b"bcd", b"", b"e"])
    for field in (views, np.arange(5), pa.array(range(5))):
        batch = {"nothing": {}, "field": field} if alone else {"field": field, "x": torch.zeros(5, 2)}
        assert count_rows(batch) == 5
        assert [list(part["field"]) for part in cut_batch(batch, 2)] == [list(field[:2]), list(field[2:])]
    gathered = views.gather()
    assert count_rows({"field": gathered}) == count_rows({"field": gathered, "x": torch.zeros(5, 2)}) == 5


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (ByteViews([b"bytes"] * 4).gather(), r"batch\['cu_seqlens'\]\[0\] has 20 values and the batch 4 rows"),
        (torch.tensor([0, 3, 5]), r"batch\['cu_seqlens'\] has 3 values and the batch 4 rows"),
        ({1, 2, 3, 4}, r"batch\['cu_seqlens'\] is a set"),
    ],
)
def test_fields_that_do_not_go_by_rows_are_refused_by_name(field: Any, said: str) -> None:
    with pytest.raises(TrainerConfigError, match=said):
        cut_batch({"x": torch.zeros(4, 2), "cu_seqlens": field}, 2)


x, y = torch.zeros(5, 3), torch.zeros(5)
samples = [(torch.zeros(8, 2), row % 3) for row in range(4)]
boxes = [{"boxes": torch.zeros(row, 4), "labels": torch.zeros(row)} for row in range(4)]
images = tuple(torch.zeros(3, 2, 2 + row) for row in range(4))


@pytest.mark.parametrize(
    ("batch", "rows", "said"),
    [
        (tuple(zip(*samples, strict=True)), 4, r"the batch is a tuple of 2|batch\[0\] is a tuple of 4 alike"),
        (samples, 4, "the batch is a list of 4 alike, which may be samples"),
        (
            [{"x": torch.zeros(2), "y": torch.tensor(1.0)}] * 4,
            4,
            "the batch is a list of 4 alike, which may be samples",
        ),
        (boxes, 4, "the batch is a list of 4 alike"),
        ((images, tuple(boxes)), 4, r"batch\[0\] is a tuple of 4 alike, which may be rows"),
        ((images, torch.zeros(4)), 4, r"batch\[0\] is a tuple of 4 alike, which may be rows"),
        ({"x": x, "label": (0, 1, 0, 1, 1)}, 5, r"batch\['label'\] is a tuple of 5 alike, which may be rows"),
    ],
)
def test_tuples_of_rows_and_lists_of_samples_are_counted_and_not_cut(batch: Any, rows: int, said: str) -> None:
    assert count_rows(batch) == rows
    assert cut_batch(batch, 1) == [batch]
    with pytest.raises(TrainerConfigError, match=said):
        cut_batch(batch, 2)


@pytest.mark.parametrize(
    "batch",
    [
        [x, y],
        (x, y),
        ((x, x), y),
        {"x": (x, (y, [1, 2, 3, 4, 5])), "size": (480, 640), "y": y},
        Pair((x, x), Pair(y, y)),
        {"inputs": {"a": x, "b": x}, "y": (y, y)},
        (Pair(x, y), {"z": y}),
    ],
)
def test_nested_tuples_of_fields_are_cut_where_other_fields_have_as_many_rows(batch: Any) -> None:
    assert count_rows(batch) == 5
    assert [count_rows(part) for part in cut_batch(batch, 2)] == [2, 3]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_in_host_memory_come_to_cuda_without_a_wait() -> None:
    """Torch raises at what waits for the device, as a copy from memory that is not pinned does."""
    device = torch.device("cuda", 0)
    batches = [{"x": torch.full((1 << 20,), number), "more": [torch.tensor(number), "text"]} for number in range(40)]
    wrong = torch.zeros((), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(batches):
            torch.cuda._sleep(2_000_000)
            moved = move_batch(batch, device)
            batch["x"].fill_(-1)  # a loader may use its memory again
            wrong += (moved["x"] != number).sum() + (moved["more"][0] != number)
            assert moved["more"][1] == "text"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wrong.item() == 0


def test_a_batch_moves_with_all_that_it_is_made_of() -> None:
    batch = {"a": [torch.ones(2), "text"], "b": Pair(torch.zeros(1), 3)}
    moved = move_batch(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"].x.device.type == "meta"
    assert (moved["a"][1], moved["b"].y, type(moved["b"])) == ("text", 3, Pair)
    assert move_batch(batch, torch.device("cpu"))["a"][0] is batch["a"][0]
