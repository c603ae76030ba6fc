"""Parts of files share a mapping, which keeps their pages up to a limit and ends when nobody needs it."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.memory import libc, mapped
from penstock.storage.memory.file_maps import FileMaps

PART = 8192
PARTS = 12
FILES = 3
DATA = [np.random.default_rng(number).bytes(PART * PARTS + 100) for number in range(FILES)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    if not mapped.can_map(folder.stat().st_dev):
        pytest.skip(f"nothing is mapped of {mapped.kind_of_disk(folder.stat().st_dev) or 'this file system'}")
    for number, data in enumerate(DATA):
        (folder / str(number)).write_bytes(data)
    return [folder / str(number) for number in range(FILES)]


@pytest.fixture
def opened(paths: list[Path]) -> Iterator[list[int]]:
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that change mappings, in their order."""
    found: list[str] = []

    def note(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found.append(name)
        return call(*args, **options)

    gc.collect()
    for name in ("map_pages", "unmap_pages", "drop_pages"):
        monkeypatch.setattr(libc, name, partial(note, name, getattr(libc, name)))
    return found


def take(maps: FileMaps, opened: list[int], file: int, part: int, nbytes: int = PART) -> memoryview:
    found = maps.map(opened[file], (file,), len(DATA[file]), part * PART + 50, nbytes)
    assert found == DATA[file][part * PART + 50 :][:nbytes]
    assert found.readonly
    return found


def count_maps(paths: list[Path]) -> int:
    gc.collect()
    text = Path("/proc/self/maps").read_text()
    return sum(text.count(str(path)) for path in paths)


def test_parts_of_a_file_share_a_mapping(opened: list[int], calls: list[str]) -> None:
    maps = FileMaps()
    views = [take(maps, opened, file, part) for part in range(PARTS) for file in range(FILES)]
    assert calls == ["map_pages"] * FILES
    del views
    again = [take(maps, opened, file, part) for part in range(PARTS) for file in range(FILES)]
    assert calls == ["map_pages"] * FILES
    maps.close()
    assert calls == ["map_pages"] * FILES
    kept = again[0]
    del again
    gc.collect()
    assert calls == ["map_pages"] * FILES + ["unmap_pages"] * (FILES - 1)
    assert kept == DATA[0][50:][:PART]
    del kept
    gc.collect()
    assert calls.count("unmap_pages") == FILES


def test_pages_of_parts_that_are_too_many_are_dropped_first_those_that_were_left_first(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(libc, "drop_pages", lambda address, nbytes: dropped.append(address))
    maps = FileMaps()
    held = take(maps, opened, 0, 11)
    views = [take(maps, opened, 0, part) for part in range(8)]
    first = int(np.frombuffer(views[0], np.uint8).__array_interface__["data"][0])
    for part in (5, 2, 7, 0, 3):
        views[part] = held
    gc.collect()
    take(maps, opened, 0, 1)
    assert dropped == []
    maps.limit(7 * PART)  # of which four are in use
    take(maps, opened, 0, 1)
    assert [(address - first) // PART for address in dropped] == [5, 2]
    again = [take(maps, opened, 0, part) for part in (7, 0)]  # kept no longer, as they are in use
    views[4] = views[6] = held
    take(maps, opened, 0, 1)
    assert [(address - first) // PART for address in dropped] == [5, 2]
    again.clear()
    maps.limit(5 * PART)
    take(maps, opened, 0, 1)
    assert [(address - first) // PART for address in dropped] == [5, 2, 3, 4]


def test_a_file_that_nobody_needs_is_unmapped(opened: list[int], calls: list[str], paths: list[Path]) -> None:
    before = count_maps(paths)
    maps = FileMaps(most_bytes=0)
    take(maps, opened, 0, 1)
    held = take(maps, opened, 1, 1)
    take(maps, opened, 1, 2)
    take(maps, opened, 2, 1)
    assert calls == ["map_pages", "unmap_pages", "map_pages", "drop_pages", "map_pages"]
    del held
    gc.collect()
    other = take(maps, opened, 0, 3)
    assert count_maps(paths) == before + 1
    del maps, other
    gc.collect()
    assert count_maps(paths) == before


def test_a_part_that_two_look_at_is_kept_for_the_second(opened: list[int], calls: list[str]) -> None:
    maps = FileMaps(most_bytes=0)
    one, two = take(maps, opened, 0, 1), take(maps, opened, 0, 1)
    del one
    take(maps, opened, 0, 2)
    assert calls == ["map_pages"]
    assert two == DATA[0][PART + 50 :][:PART]


def test_where_files_take_too_many_addresses_parts_are_mapped_by_themselves(
    opened: list[int], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = FileMaps(most_bytes=0, most_mapped_bytes=len(DATA[0]))
    views = [take(maps, opened, file, part) for file in range(2) for part in range(2)]
    assert calls == ["map_pages"] * 3
    views.clear()
    views = [take(maps, opened, 1, part) for part in range(3)]  # the first file is unmapped by now
    assert calls == [*["map_pages"] * 3, *["unmap_pages"] * 3, "map_pages"]
    calls.clear()
    calls += ["map_pages"] * 3
    map_pages = libc.map_pages

    def refuse(fd: int, start: int, nbytes: int, *, private: bool = False) -> int:
        if nbytes > 3 * PART:
            raise OSError(12, "Cannot allocate memory")
        return map_pages(fd, start, nbytes, private=private)

    monkeypatch.setattr(libc, "map_pages", refuse)
    small = FileMaps()
    views += [take(small, opened, 2, part) for part in range(3)]
    assert calls == ["map_pages"] * 6


def test_where_addresses_are_few_whole_files_take_none(
    opened: list[int], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 34, resource.RLIM_INFINITY))
    maps = FileMaps()
    held = [take(maps, opened, 0, 0), take(maps, opened, 0, 1)]
    assert calls == ["map_pages"] * 2
    held.clear()
    gc.collect()
    assert calls == ["map_pages"] * 2 + ["unmap_pages"] * 2


def test_a_part_behind_the_end_of_a_file_is_an_error_and_is_not_held(opened: list[int], paths: list[Path]) -> None:
    before = count_maps(paths)
    maps = FileMaps(most_bytes=0)
    size = len(DATA[0]) + 5 * 4096
    with pytest.raises(OSError, match=r"Input/output|Bad address"):
        maps.map(opened[0], (0,), size, 0, size)
    gc.collect()
    take(maps, opened, 1, 0)
    assert count_maps(paths) == before + 1


@given(
    steps=st.lists(st.tuples(st.integers(0, FILES - 1), st.integers(0, PARTS - 1), st.booleans()), max_size=60),
    kept=st.integers(0, 6),
    closes_at=st.integers(0, 60),
)
def test_whatever_is_asked_for_and_left_the_bytes_are_those_of_the_files(
    paths: list[Path], steps: list[tuple[int, int, bool]], kept: int, closes_at: int
) -> None:
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    before = count_maps(paths)
    maps = FileMaps(most_bytes=kept * PART)
    held: dict[tuple[int, int], memoryview] = {}
    for number, (file, part, is_held) in enumerate(steps):
        if number == closes_at:
            maps.close()
        found = take(maps, opened, file, part)
        if is_held:
            held[file, part] = found
        else:
            held.pop((file, part), None)
        del found
        assert all(view == DATA[one][at * PART + 50 :][:PART] for (one, at), view in held.items())
    maps.close()
    held.clear()
    gc.collect()
    assert count_maps(paths) == before
    for descriptor in opened:
        os.close(descriptor)
