"""Samples that cannot be read, decoded or transformed: replaced alike on any ranks, written down, and limited."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_images import DAMAGED, TOTAL, write_images
from row_functions import fail_on_sevens

from penstock import DistributedDataLoader
from penstock.cli import run
from penstock.loader import (
    BadChunkWarning,
    BadSampleWarning,
    ConfigError,
    DatasetError,
    DecodeError,
    Packing,
    audit,
    open_manifest,
    recheck,
)

pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, DAMAGED)
    return str(folder)


def make(source: Any, **options: Any) -> DistributedDataLoader[Any]:
    given = {"global_batch_size": 12, "with_ids": True, "last_batch": "partial", "max_errors": 50}
    return DistributedDataLoader(source, **{"on_error": "replace", **given, **options})


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["__id__"].tolist()]


def global_batches(source: Any, world_size: int, *, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The ids of each global batch, sorted."""
    steps = []
    for rank in range(world_size):
        with make(source, rank=rank, world_size=world_size, **options) as loader:
            steps.append([ids_of([batch]) for _ in range(epochs) for batch in loader])
    return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]


@pytest.mark.slow
def test_damaged_images_are_replaced_by_whole_ones_alike_on_any_number_of_ranks(images: str) -> None:
    alone = global_batches(images, 1, epochs=2)
    assert alone == global_batches(images, 2, epochs=2)
    assert alone == global_batches(images, 3, epochs=2)
    counts = np.bincount(list(itertools.chain(*alone)), minlength=TOTAL)
    assert not counts[sorted(DAMAGED)].any()
    assert counts.sum() == 2 * TOTAL
    assert (np.delete(counts, sorted(DAMAGED)) >= 2).all(), "all whole samples still come"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform": dict},
        {"collate": lambda samples: {name: torch.tensor([s[name] for s in samples]) for name in ("cls", "__id__")}},
    ],
    ids=["columns", "transform", "collate"],
)
def test_what_replaces_a_sample_is_whole_and_goes_by_its_own_id(images: str, options: dict[str, Any]) -> None:
    with make(images, **options) as loader:
        for batch in loader:
            assert batch["cls"].tolist() == batch["__id__"].tolist()
            if "jpg" in batch:
                assert batch["jpg"].shape[1:] == (3, 8, 8)
                brightness = batch["jpg"].float().mean((1, 2, 3))
                assert torch.allclose(brightness, 2.0 * batch["__id__"], atol=4)


@pytest.mark.slow
def test_worker_processes_and_views_give_the_same_batches(images: str) -> None:
    threads = global_batches(images, 1, transform=fail_on_sevens)
    assert threads == global_batches(images, 1, transform=fail_on_sevens, processes=2)
    assert not {i for i in itertools.chain(*threads) if i % 7 == 0}
    assert global_batches(images, 1) == global_batches(images, 1, processes=1)
    assert global_batches(images, 1) == global_batches(images, 1, raw="view")


@pytest.mark.slow
def test_a_resume_in_mid_epoch_goes_on_with_the_same_batches(images: str) -> None:
    with make(images) as loader:
        batches = iter(loader)
        first = [ids_of([next(batches)]) for _ in range(4)]
        state = loader.state_dict()
        rest = [ids_of([batch]) for batch in batches]
    with make(images) as resumed:
        resumed.load_state_dict(state)
        assert [ids_of([batch]) for batch in resumed] == rest
    assert [sorted(ids) for ids in first + rest] == global_batches(images, 2)


def test_a_look_is_the_first_batch(images: str) -> None:
    with make(images, shuffle=False) as loader:
        assert ids_of([loader.peek()]) == ids_of([next(iter(loader))])
        assert loader.bad_samples


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Parquet: three files of 40 rows."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(3):
        first = 40 * number
        ids = range(first, first + 40)
        table = pa.table({"n": ids, "data": [f"{i:064d}".encode() for i in ids]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=5, compression="zstd", use_dictionary=False)
    return folder


def damage(folder: Path) -> set[int]:
    """Overwrites the pages of a row group; the ids of the samples that cannot be read then."""
    path = folder / "1.parquet"
    column = pq.ParquetFile(path).metadata.row_group(4).column(0)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    return set(range(40, 80))  # a file this small is one chunk


@pytest.mark.slow
def test_a_chunk_that_cannot_be_read_is_counted_written_down_and_replaced(rows: Path, tmp_path: Path) -> None:
    bad = damage(rows)
    manifest = open_manifest(str(rows))
    with pytest.warns(BadChunkWarning, match="replaced"):
        alone = global_batches(manifest, 1, quarantine=tmp_path / "q")
    with pytest.warns(BadChunkWarning, match="replaced"):
        assert alone == global_batches(manifest, 3)
    assert not bad & set(itertools.chain(*alone))
    (entry,) = entries(tmp_path / "q")
    assert (entry["kind"], entry["id"], entry["samples"], entry["shard"]) == ("chunk", 40, 40, "1.parquet")
    with (
        pytest.warns(BadChunkWarning),
        pytest.raises(DatasetError, match=r"samples of epoch 0 are bad .* could not be read"),
    ):
        global_batches(manifest, 1, max_errors=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the chunk is not tried
        assert global_batches(manifest, 2, avoid=tmp_path / "q", max_errors=1) == alone


def entries(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*.quarantine.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_quarantine_file_names_each_bad_sample_and_a_later_run_avoids_them(images: str, tmp_path: Path) -> None:
    found = global_batches(images, 3, epochs=2, quarantine=tmp_path / "q")
    told = entries(tmp_path / "q")
    assert {entry["id"] for entry in told} == DAMAGED
    assert {(entry["step"], entry["field"]) for entry in told} == {("decode", "jpg")}
    by_id = {entry["id"]: entry for entry in told}
    assert (by_id[21]["key"], by_id[21]["shard"], by_id[21]["number"]) == ("0021", "shard-00001.tar", 1)
    with make(images, avoid=tmp_path / "q", max_errors=1) as loader:
        batches = [sorted(ids_of([batch])) for _ in range(2) for batch in loader]
        assert loader.bad_samples == []
    assert batches == found


def test_raw_samples_are_avoided_too(images: str, tmp_path: Path) -> None:
    global_batches(images, 1, quarantine=tmp_path / "q")
    ids = list(itertools.chain(*global_batches(images, 2, decode=None, avoid=tmp_path / "q")))
    assert len(ids) == TOTAL
    assert not DAMAGED & set(ids)


def test_the_audit_counts_what_was_replaced_and_nothing_as_missing(images: str, tmp_path: Path) -> None:
    global_batches(images, 2, audit_dir=tmp_path)
    (account,) = audit(tmp_path).epochs
    assert (account.delivered, account.missing, account.duplicated) == (TOTAL, 0, 0)
    assert account.replaced == len(DAMAGED)
    assert audit(tmp_path).is_exact


def test_more_bad_samples_than_allowed_are_an_error_that_names_counts_and_reasons(images: str) -> None:
    with make(images, max_errors=3) as loader, pytest.raises(DatasetError, match="more than max_errors=3") as error:
        list(loader)
    assert "not decoded" in str(error.value)
    assert "field 'jpg'" in str(error.value)
    with make(images, max_errors=0.02) as loader, pytest.raises(DatasetError, match=r"max_errors=0.02, 2 of"):
        list(loader)
    with make(images, max_errors=len(DAMAGED)) as loader:
        for _ in range(3):  # epochs are counted apart
            list(loader)


def test_a_transform_that_always_fails_ends_the_run_at_its_first_batch(images: str) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        return sample["nothing"]

    options: dict[str, Any] = {"transform": broken, "max_errors": 0.99, "threads": 1, "decode": None}
    with make(images, **options) as loader:
        with pytest.raises(DatasetError, match="KeyError: 'nothing'"):
            next(iter(loader))
        assert (loader.state_dict()["consumed"], loader.metrics().batches) == (0, 0)


def test_what_is_no_fault_of_a_sample_still_stops(images: str) -> None:
    with make(images, transform=lambda sample: None) as loader, pytest.raises(ConfigError, match="may_drop"):
        list(loader)
    with (
        DistributedDataLoader(images, batch_size=4) as loader,
        pytest.raises(DecodeError),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"on_error": "stop", "max_errors": 3}, "on_error='stop'"),
        ({"max_errors": 1.5}, "max_errors=1.5"),
        ({"max_errors": True}, "max_errors=True"),
        ({"keep": bool}, "keep="),
        ({"packing": Packing(seq_len=8)}, "packing="),
        ({"on_error": "skip", "packing": Packing(seq_len=8)}, "packing="),
        ({"quarantine": "q", "avoid": "q"}, "avoid='q'"),
        ({"avoid": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"avoid": 3}, "avoid=3: give a folder or file"),
        ({"avoid": ["q", None]}, "avoid="),
    ],
)
def test_arguments_that_cannot_work_are_refused(images: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(images, **options)


def test_a_file_of_another_data_set_is_refused(images: str, rows: Path, tmp_path: Path) -> None:
    global_batches(images, 1, quarantine=tmp_path / "q")
    with pytest.raises(ConfigError, match="another data set"):
        make(str(rows), avoid=tmp_path / "q")


def test_the_first_bad_sample_is_a_warning_that_names_it(images: str) -> None:
    with make(images, shuffle=False) as loader, pytest.warns(BadSampleWarning, match=r"sample 3 .*shard-00000") as told:
        list(loader)
    assert len([each for each in told if each.category is BadSampleWarning]) == 1


@pytest.mark.slow
def test_verify_checks_again_what_is_quarantined(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    global_batches(images, 1, quarantine=tmp_path / "q")
    mended = tmp_path / "mended"
    shutil.copytree(images, mended)
    assert run(["verify", str(mended), "--quarantine", str(tmp_path / "q")]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"still bad +7\b", shown)
    assert "shard-00001.tar, sample 1, key 0021" in shown
    write_images(mended, damaged=set(range(20, TOTAL)) & DAMAGED)  # another index: sizes differ
    result = recheck(str(mended), tmp_path / "q", progress=False)
    assert {found.entry.id for found in result.entries if found.problem is None} == {3, 4}
    assert all("field 'jpg'" in (found.problem or "field 'jpg'") for found in result.entries)
    write_images(mended, damaged=set())
    (mended / "shard-00005.tar").unlink()
    assert run(["verify", str(mended), "--quarantine", str(tmp_path / "q"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [found["entry"]["id"] for found in told["entries"] if found["is_gone"]] == [99]


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("transform", [None, fail_on_sevens], ids=["decoded", "transformed"])
def test_a_bad_sample_that_is_looked_at_raises_what_it_raises_where_the_first_one_stops(
    images: str, tmp_path: Path, on_error: str, transform: Any
) -> None:
    def errors(**options: Any) -> dict[int, tuple[type[Exception], str, Any]]:
        found: dict[int, tuple[type[Exception], str, Any]] = {}
        with DistributedDataLoader(images, batch_size=4, transform=transform, **options) as loader:
            for i in range(TOTAL):
                try:
                    assert int(loader.dataset[i]["cls"]) == i
                except Exception as exc:  # noqa: BLE001 - compared below
                    found[i] = type(exc), str(exc), getattr(exc, "__notes__", None)
            assert len(loader.dataset.raw(3)["jpg"]) == 30
        return found

    stopped = errors()
    assert set(stopped) == DAMAGED | ({i for i in range(TOTAL) if i % 7 == 0} if transform else set())
    assert errors(on_error=on_error) == stopped
    with make(images, transform=transform, quarantine=tmp_path / "bad") as loader:
        list(loader)
    avoiding = errors(on_error=on_error, avoid=tmp_path / "bad")
    assert set(avoiding) == set(stopped)
    assert all(kind is DecodeError and "avoid= names it" in text for kind, text, _ in avoiding.values())
