"""The short way through small archives finds what the census finds, or nothing."""

from __future__ import annotations

import io
import random
import tarfile

import numpy as np
import pytest

from penstock.loader.formats.tar.census import take_census
from penstock.loader.formats.tar.format import MOST_MEMBERS, take_small_census
from penstock.loader.formats.windows import PieceWindows

SAMPLES = [("a/0.jpg", 700), ("a/0.cls", 3), ("a/1.jpg", 0), ("a/1.tar.GZ", 512), ("b.txt", 1)]


def archive(members: list[tuple[str, int]], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"." * size))
    return buffer.getvalue()


def both(data: bytes) -> tuple[object, object]:
    """What the two ways find: (starts, stops, fields, length), or None for the short way."""
    small = take_small_census(memoryview(data))
    census = take_census(PieceWindows(iter([memoryview(data)])), "s.tar")
    shown = [
        found and (found.starts.tolist(), found.stops.tolist(), found.fields, found.length) for found in (small, census)
    ]
    return shown[0], shown[1]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_archives_are_read_the_short_way(kind: int) -> None:
    small, census = both(archive(SAMPLES, kind))
    assert small is not None
    assert small == census


@pytest.mark.parametrize(
    "members",
    [
        [(f"{row}.txt", 1) for row in range(MOST_MEMBERS + 1)],
        [("a.txt", 1), ("README", 2)],
        [("ä.txt", 1)],
        [("d" * 90 + "/" + "e" * 30 + ".txt", 1)],
    ],
    ids=["many", "no sample's", "not ASCII", "a long name"],
)
def test_other_archives_are_left_to_the_census(members: list[tuple[str, int]]) -> None:
    small, census = both(archive(members))
    assert small is None
    assert census is not None


@pytest.mark.slow
def test_damaged_archives_are_never_read_otherwise_than_by_the_census() -> None:
    whole = np.frombuffer(archive(SAMPLES), np.uint8)
    rng = random.Random(7)
    agreed = 0
    for _ in range(1500):
        data = whole.copy()
        for _ in range(rng.choice((1, 1, 2, 8))):
            # Mostly in headers, which are where a census looks.
            at = rng.choice((0, 1024 + 512, 2048 + 512)) + rng.randrange(512)
            data[at] = rng.choice((0, 32, 46, 47, 48, 49, 55, 57, 95, 120, 255, rng.randrange(256)))
        if rng.random() < 0.5:
            repair_sums(data)
        found = take_small_census(memoryview(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))]))
        if found is None:
            continue
        small, census = both(data[: found.length].tobytes())
        assert small == census
        agreed += 1
    assert agreed > 100


def repair_sums(data: np.ndarray) -> None:
    """Write each header's sum anew, so that damage to other fields is not noticed by it."""
    for at in range(0, len(data) - 511, 512):
        header = data[at : at + 512]
        if bytes(header[257:262]) == b"ustar":
            header[148:156] = 32
            header[148:156] = np.frombuffer(b"%06o\0 " % int(header.sum()), np.uint8)
