"""``dataset`` of a mixture: the samples of all sources by joint id, and of each source by its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader
from penstock.loader import ConfigError, Mixture, Source, Subset
from penstock.loader.errors import SampleNotFoundError

COUNTS = {"web": 20, "code": 30}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for number, (name, count) in enumerate(COUNTS.items()):
        (tmp_path / name).mkdir()
        values = np.arange(count) + 1000 * number
        pq.write_table(pa.table({"n": values}), tmp_path / name / "part-0.parquet", row_group_size=7)
    return {name: str(tmp_path / name) for name in COUNTS}


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": int(rng.integers(1 << 30))}


def mixed(folders: dict[str, str], transform: Callable[..., Any] | None = None, **of_web: Any) -> Any:
    sources = {"web": Source(folders["web"], **of_web), "code": Source(folders["code"])}
    options = {"batch_size": 4, "rank": 0, "world_size": 1, "with_ids": True, "transform": transform}
    return DistributedDataLoader(Mixture(sources), **options)


def test_samples_of_all_sources_have_joint_ids_one_source_after_another(folders: dict[str, str]) -> None:
    with mixed(folders) as loader:
        view = loader.dataset
        assert view.ids.tolist() == list(range(50))
        expected = [*range(20), *range(1000, 1030)]
        assert [int(view[i]["n"]) for i in (0, 19, 20, 49, -1)] == [expected[i] for i in (0, 19, 20, 49, -1)]
        assert [int(sample["n"]) for sample in view[15:25]] == expected[15:25]
        assert [int(sample["n"]) for sample in view[::-7]] == expected[::-7]
        assert view[15:25].ids.tolist() == list(range(15, 25))
        with pytest.raises(IndexError, match="sample 50 of 50"):
            view[50]


def test_samples_of_one_source_have_their_own_ids(folders: dict[str, str]) -> None:
    with mixed(folders) as loader:
        views = loader.dataset.sources
        assert {name: len(view) for name, view in views.items()} == COUNTS
        assert [int(sample["n"]) for sample in views["code"]] == list(range(1000, 1030))
        assert int(views["code"].raw(3)["n"]) == 1003
    with DistributedDataLoader(folders["web"], batch_size=4, rank=0, world_size=1) as loader:
        assert loader.dataset.sources == {}


def test_a_sample_is_what_a_batch_has_of_it_with_the_random_numbers_of_its_source(folders: dict[str, str]) -> None:
    with mixed(folders, draw) as loader:
        views = list(loader.dataset.sources.values())
        seen = 0
        for batch in loader:
            for row in range(len(batch["n"])):
                source, own = int(batch["__source__"][row]), int(batch["__id__"][row])
                sample = views[source].sample(own)
                assert (sample["n"], sample["drawn"]) == (batch["n"][row], batch["drawn"][row])
                seen += 1
        assert seen


def test_a_subset_of_a_source_leaves_its_other_samples_out(folders: dict[str, str]) -> None:
    with mixed(folders, subset=Subset.take(5, seed=3)) as loader:
        view = loader.dataset
        ids = loader.dataset.sources["web"].ids
        assert (len(ids), len(view)) == (5, 35)
        assert view.ids.tolist() == [*ids.tolist(), *range(20, 50)]
        assert [int(sample["n"]) for sample in view][:6] == [*ids.tolist(), 1000]
        with pytest.raises(SampleNotFoundError):
            view.find(int(next(n for n in range(20) if n not in ids.tolist())), field="n")


def test_a_sample_is_found_in_whichever_source_it_is(folders: dict[str, str]) -> None:
    with mixed(folders) as loader:
        view = loader.dataset
        assert view.find(7, field="n") == 7
        assert view.find(1011, field="n") == 31
        assert view[10:40:2].find(1010, field="n") == 10
        assert view[39:10:-1].find(1010, field="n") == 9
        with pytest.raises(SampleNotFoundError, match="none of 50 samples has n 5000"):
            view.find(5000, field="n")
        with pytest.raises(ConfigError, match="there is no field 'm'"):
            view.find(1, field="m")


def test_errors_name_the_source(folders: dict[str, str]) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no")

    with mixed(folders, fail) as loader, pytest.raises(ValueError, match="no") as caught:
        loader.dataset[25]
    assert any("in the source 'code' of the mixture" in note for note in caught.value.__notes__)


def test_a_view_reads_on_while_a_pass_runs_and_ends_with_its_loader(folders: dict[str, str]) -> None:
    loader = mixed(folders)
    view = loader.dataset
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert int(view[30]["n"]) == 1010
    assert loader.state_dict() == state
    loader.close()
    with pytest.raises(Exception, match="closed"):
        view[31]
