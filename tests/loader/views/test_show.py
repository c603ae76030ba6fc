"""Tables of batches and data sets: escaped, bounded, and never in the way."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from collections import namedtuple
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock
from penstock import DistributedDataLoader, pack
from penstock.loader.views.html import thumbnail

MOST_HTML = 600_000


class Tags(HTMLParser):
    """Counts the tags of a page, and checks that each that is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def picture(uri: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_a_batch_of_images_shows_as_a_table_with_thumbnails(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = []
    for _ in range(4):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(file, "JPEG")
        files.append(file.getvalue())
    pack([{"__key__": f"k{n}", "jpg": data, "cls": n} for n, data in enumerate(files)], tmp_path)
    with DistributedDataLoader(tmp_path, batch_size=4) as loader:
        batch = loader.peek()
        assert type(batch) is dict
        tags = Tags(penstock.show(batch)._repr_html_())
        assert (tags.counts["tr"], tags.counts["img"]) == (5, 4)
        assert "uint8 [4, 3, 40, 60]" in tags.text
        assert re.search(r"jpg +uint8 \[4, 3, 40, 60\]", repr(penstock.show(batch)))
        tags = Tags(loader.dataset[1:]._repr_html_())
        assert (tags.counts["tr"], tags.counts["img"]) == (4, 3)
        assert re.search(r"\n3\nk3\n", tags.text)
    with DistributedDataLoader(tmp_path, batch_size=4, decode=None) as loader:
        assert Tags(penstock.show(loader.peek())._repr_html_()).counts["img"] == 4
        data = loader.dataset
    assert "closed" in Tags(data._repr_html_()).text


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_thumbnail_has_the_pixels_of_its_image(layout: str, kind: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (100, 200, 3), np.uint8)
    value: Any = pixels if layout == "hwc" else pixels.transpose(2, 0, 1)
    uri = thumbnail(torch.from_numpy(value.copy()) if kind == "tensor" else value)
    assert uri is not None
    assert np.array_equal(picture(uri), pixels[::4, ::4])


def test_a_list_of_samples_shows_as_one_row_a_sample() -> None:
    batch = [{"text": f"t{n}", **({"odd": n} if n % 2 else {})} for n in range(3)]
    tags = Tags(penstock.show(batch)._repr_html_())
    assert tags.counts["tr"] == 4
    assert {"text", "odd", "t2"} <= set(tags.text.split())


def test_images_of_other_types_are_scaled_and_what_is_none_has_no_thumbnail() -> None:
    ramp = np.linspace(0, 1, 64 * 64).reshape(64, 64)
    for value in (ramp[None], ramp[None] * 5 - 2, torch.tensor(ramp[None], dtype=torch.bfloat16)):
        uri = thumbnail(value)
        assert uri is not None
        seen = picture(uri)
        assert (seen.min(), seen.max()) == (0, 255)
    grey = thumbnail((ramp * 255).astype(np.uint8))
    assert grey is not None
    assert picture(grey).shape == (64, 64)
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1 << 20).to_bytes(4, "big") * 2 + b"\x08\x02" + bytes(100)
    damaged = b"\xff\xd8\xff" + bytes(50)
    for value in (bomb, damaged, b"text", "text", None, 3, np.zeros((3, 4, 5)), np.zeros((8, 9)), torch.zeros(4)):
        assert thumbnail(value) is None


def test_what_is_shown_is_escaped_and_bounded() -> None:
    hostile = "<script>alert(1)</script>"
    batch: dict[Any, Any] = {hostile * 20: [hostile * 10_000] * 32, "esc": ["\x1b[31mred\x07"] * 32}
    batch |= {f"image{n}": torch.zeros(1, 3, 2000, 100, dtype=torch.uint8).expand(32, -1, -1, -1) for n in range(3)}
    batch["noise"] = torch.randint(0, 255, (32, 3, 64, 64), dtype=torch.uint8)
    batch |= {f"field{n}": torch.arange(32) for n in range(500)}
    page = penstock.show(batch)._repr_html_()
    tags = Tags(page)
    assert "script" not in tags.counts
    assert len(page) < MOST_HTML
    assert tags.counts["img"] == 24
    assert "494 more fields" in tags.text
    assert "8 of 32 rows" in tags.text
    text = repr(penstock.show(batch))
    assert len(text) < 5000
    assert "\x1b" not in text
    assert "\x1b" not in page


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")


class BadShape:
    dtype = "uint8"
    shape = ("a", None)


Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: list[str]


@pytest.mark.parametrize(
    "batch",
    [
        {},
        None,
        3,
        "text",
        b"\x00\xff",
        (),
        [],
        {1: torch.zeros(2), "mixed": [1, None]},
        (torch.zeros(4, 3), torch.arange(4)),
        Pair(torch.zeros(2, 3, 16, 16), torch.arange(2)),
        Record(torch.zeros(3), ["a", "b", "c"]),
        {
            "s": torch.eye(3).to_sparse(),
            "c": torch.zeros(3, dtype=torch.complex64),
            "b": torch.zeros(3, dtype=torch.bool),
        },
        {"h": torch.zeros(2, 2, dtype=torch.bfloat16), "0d": torch.tensor(1.0), "empty": torch.zeros(0, 5)},
        {"m": torch.zeros(2, 3, device="meta"), "u": torch.zeros(2, dtype=torch.uint16), "long": ["x" * 10**6] * 2},
        {"nan": torch.full((1, 3, 32, 32), float("nan")), "flat": torch.zeros(1, 1, 8, 10_000)},
        {"dates": np.array(["2020-01-01"], "datetime64[D]"), "objects": np.array([{}], object)},
        {"deep": [[[[[[[[[]]]]]]]]], "dict": [{"a": {"b": "<i>"}}]},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_any_batch_can_be_shown(batch: Any) -> None:
    check_shown(batch)


def test_objects_that_raise_whatever_is_asked_of_them_can_be_shown() -> None:
    check_shown(Hostile())
    check_shown({"x": Hostile(), "y": [Hostile()], "z": BadShape(), "fine": [1]})


def check_shown(batch: Any) -> None:
    view = penstock.show(batch)
    page, text = view._repr_html_(), repr(view)
    Tags(page)
    assert 0 < len(text) < 5000
    assert len(page) < MOST_HTML
