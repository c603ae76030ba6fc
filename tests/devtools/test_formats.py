"""The comparison of formats compares the same samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from devtools.formats import Config, tabulate, write_formats
from penstock import DistributedDataLoader


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return write_formats(tmp_path_factory.mktemp("formats"), Config(rows=300, blobs=8))


@pytest.mark.slow
def test_rows_are_the_same_in_every_format(made: dict[str, list[Path]]) -> None:
    assert len(made["rows"]) > 2
    found = []
    for folder in made["rows"]:
        with DistributedDataLoader(str(folder), batch_size=300, shuffle=False, decode=None) as loader:
            [batch] = loader
            found.append({name: np.asarray(values, np.float64) for name, values in batch.items() if name[0] != "_"})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, values in other.items():
            np.testing.assert_array_equal(values, found[0][name], name)


@pytest.mark.slow
def test_blobs_are_the_same_in_every_format(made: dict[str, list[Path]]) -> None:
    assert len(made["raw"]) > 2
    found = []
    for folder in made["raw"]:
        with DistributedDataLoader(str(folder), batch_size=8, shuffle=False, decode=None) as loader:
            [batch] = loader
            found.append(batch["jpg"])
    assert len(found[0]) == 8
    assert all(other == found[0] for other in found[1:])


def test_the_table_shows_each_format_by_its_rate() -> None:
    of = {"samples_per_s": 1234.5, "cpu_us_per_sample": 6.78, "first_batch_s": 0.5, "bytes": 9e6}
    table = tabulate("rows", {"arrow": of})
    assert [list(column.cells) for column in table.columns] == [["arrow"], ["1,234"], ["6.78"], ["0.50"], ["9"]]
