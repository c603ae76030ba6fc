"""Names that tell of shards that are missing, or there twice, are heeded in every format."""

from __future__ import annotations

import bz2
import gzip
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import open_manifest, pack, verify
from penstock.cli import run
from penstock.loader import DatasetError, DoubtfulDatasetWarning
from penstock.loader.dataset.listing import heed_names

FORMATS = ["tar", "parquet", "arrow", "jsonl", "tokens"]
ENDINGS = {"tokens": "bin"}
Write = Callable[..., Path]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def write(tmp_path: Path, form: str) -> Write:
    """Writes shards of one sample each, by names without ending; returns their folder."""
    options = {"seq_len": 4, "dtype": "uint16"} if form == "tokens" else {}
    sample = {"tokens": [1, 2, 3, 4]} if form == "tokens" else {"__key__": "a", "x": "text"}
    pack([sample], tmp_path / "made", format=form, progress=False, **options)
    ending = ENDINGS.get(form, form)

    def write_them(*names: str) -> Path:
        for name in names:
            path = tmp_path / "data" / f"{name}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((tmp_path / "made" / f"shard-000000.{ending}").read_bytes())
        return tmp_path / "data"

    return write_them


def how(form: str) -> dict[str, object]:
    from penstock import TokensFormat

    return {"format": TokensFormat(seq_len=4)} if form == "tokens" else {}


def count(source: object, form: str) -> int:
    """How many samples are read, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return open_manifest(source, **how(form)).num_samples  # type: ignore[arg-type]


def test_a_missing_shard_of_a_numbered_list_is_told_once_and_by_verify(write: Write, form: str) -> None:
    folder = write("train-00000-of-00003", "train-00002-of-00003")
    name = f"train-00001-of-00003.{ENDINGS.get(form, form)}"
    for source, options in ((folder, {}), (f"{folder}/*", {}), (folder, {"split": "train"})):
        with pytest.warns(DoubtfulDatasetWarning, match=f"{name} is missing") as told:
            assert open_manifest(source, **options, **how(form)).num_samples == 2
        assert len(told) == 1
    (flaw,) = verify(folder, **how(form)).flaws
    assert f"{name} is missing" in flaw.problem
    if form != "tokens":
        assert run(["index", str(folder)]) == 0
        assert [flaw.kind for flaw in verify(folder).flaws] == ["Doubtful"]


def test_a_part_that_is_named_as_such_misses_nothing(write: Write, form: str) -> None:
    folder = write("train-00000-of-00003", "train-00002-of-00003")
    ending = ENDINGS.get(form, form)
    assert count([f"{folder}/train-{i}-of-00003.{ending}" for i in ("00000", "00002")], form) == 2
    assert count(f"{folder}/train-0000{{0,2}}-of-00003.{ending}", form) == 2
    assert count(f"{folder}/train-0000[02]-of-*", form) == 2
    write("train-00001-of-00003", "part-1", "part-3")
    assert count(folder, form) == 5


def test_two_writings_of_one_data_set_are_refused_and_told_of_a_pattern(write: Write, form: str) -> None:
    folder = write("train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002")
    ending = ENDINGS.get(form, form)
    words = rf"train-00000-of-00001.{ending} and train-00000-of-00002.{ending} are of two writings"
    for options in ({}, {"split": "train"}):
        with pytest.raises(DatasetError, match=words):
            open_manifest(folder, **options, **how(form))
    with pytest.raises(DatasetError, match=words):
        verify(folder, **how(form))
    with pytest.warns(DoubtfulDatasetWarning, match=words):
        assert open_manifest(f"{folder}/**", **how(form)).num_samples == 3
    assert count(f"{folder}/train-*-of-00002.{ending}", form) == 2


@pytest.mark.parametrize("form", ["tar", "jsonl"])
@pytest.mark.parametrize("codec", ["gz", "bz2"])
def test_a_shard_in_two_forms_is_refused_and_told_of_a_pattern(write: Write, form: str, codec: str) -> None:
    folder = write("a", "b")
    compress = gzip.compress if codec == "gz" else bz2.compress
    (folder / f"a.{form}.{codec}").write_bytes(compress((folder / f"a.{form}").read_bytes()))
    words = rf"a.{form} and a.{form}.{codec} are one shard in two forms"
    with pytest.raises(DatasetError, match=words):
        open_manifest(folder)
    with pytest.warns(DoubtfulDatasetWarning, match=words):
        assert open_manifest(f"{folder}/*").num_samples == 3
    assert count(f"{folder}/*.{form}", form) == 2
    (folder / f"a.{form}").unlink()
    assert count(folder, form) == 2


LISTS = [
    (["x-00001-of-00002", "x-00002-of-00002"], "", []),
    (["x-00002-of-00002"], "", ["x-00001-of-00002"]),
    (["x_0_of_3", "x_1_of_3"], "", ["x_2_of_3"]),
    (["c4-train.00000-of-00002", "c4-train.00001-of-00002"], "", []),
    (["a/x-0-of-2", "b/x-0-of-1", "a/x-1-of-2"], "", []),
    (["x-0-of-2-0123456789abcdef", "x-1-of-2-fedcba9876543210"], "", []),
    (["x-0-of-2-0123456789abcdef"], "", ["x-1-of-2-*"]),
    (["x-0-of-1-0123456789abcdef", "x-0-of-1-fedcba9876543210"], "two writings", []),
    (["x-0-of-1-en", "x-0-of-2-de", "x-1-of-2-de"], "", []),
    (["train-0-of-1", "test-0-of-2", "test-1-of-2"], "", []),
    (["proof-1", "5-of-hearts", "12-of-2", "0-of-0"], "", []),
]


@pytest.mark.parametrize(("stems", "refused", "missing"), LISTS)
def test_lists_of_all_writers_are_understood(stems: list[str], refused: str, missing: list[str]) -> None:
    told: list[str] = []
    keys = [f"{stem}.jsonl" for stem in stems]
    if refused:
        with pytest.raises(DatasetError, match=refused):
            heed_names("s3://b/", keys, (".jsonl",), told.append)
        return
    heed_names("s3://b/", keys, (".jsonl",), told.append)
    assert bool(told) == bool(missing)
    assert all(f"{name}.jsonl" in told[0] for name in missing)
